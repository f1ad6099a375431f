"""Train the demo model that ``Runtime("demo")`` serves without a download.

One command does everything: it reads the documentation that every Python installation carries
(the language topics of ``pydoc`` and the docstrings of the standard library, PSF licence), turns
it into plain documents and synthetic chats, trains a byte-level BPE tokenizer and a small Llama
on them with the CPU, and writes the folder that ships with the package::

    python tools/train_demo.py --out radixserve/models/demo --minutes 50

The result is a toy: it writes documentation-like English about the standard library, and is
there to exercise the engine (chat template, prefix cache, long prompts), not to be relied on.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import json
import logging
import math
import platform
import pydoc
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pydoc_data import topics as pydoc_topics
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger("train_demo")

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)  # their ids are 0, 1, 2, ...
CONTEXT = 4096

# No trimming and no text between the markers: the rendering of a longer history starts with the
# rendering of the shorter one, as text and as tokens, whatever white space the messages hold.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}{{ '<|system|>' }}
{%- elif message.role == 'assistant' -%}{{ '<|assistant|>' }}
{%- else -%}{{ '<|user|>' }}
{%- endif -%}
{{- text(message.content) -}}{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

# ----------------------------------------------------------------------------------------------
# What is read from the running Python installation
# ----------------------------------------------------------------------------------------------

SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idle_test idlelib turtledemo lib2to3 distutils "
    "ensurepip encodings macholib pydoc_data __pycache__ msilib".split()
)
SKIPPED_MODULES = frozenset({"antigravity", "this", "sre_compile", "sre_parse", "sre_constants"})
# Files that open with a licence notice of their own are left out, whatever its terms.
OTHER_LICENCE = re.compile(
    r"Permission (is|to use)|Redistribution and use|MIT License|BSD (licen|or )|AS[- ]IS|"
    r"WITHOUT WARRANT",
    re.IGNORECASE,
)
ALIASES = {
    "_collections_abc": "collections.abc", "_pydecimal": "decimal", "_pyio": "io",
    "json.encoder": "json", "json.decoder": "json", "re._parser": "re", "posixpath": "os.path",
    "concurrent.futures._base": "concurrent.futures", "unittest.case": "unittest",
    "concurrent.futures.thread": "concurrent.futures", "unittest.suite": "unittest",
    "concurrent.futures.process": "concurrent.futures", "unittest.runner": "unittest",
    "importlib.metadata.__init__": "importlib.metadata",
}  # fmt: skip
BUILT_IN = (
    "builtins math cmath itertools functools collections time os sys operator struct zlib "
    "binascii bisect heapq datetime array select signal socket gc marshal random "
    "unicodedata atexit errno faulthandler fcntl mmap resource ssl threading queue "
    "contextvars csv hashlib bz2 lzma io re weakref types pickle json decimal"
).split()
POPULAR = frozenset(
    "builtins json os os.path re math itertools functools collections textwrap string random "
    "datetime time pathlib sys argparse subprocess shutil glob tempfile csv contextlib "
    "dataclasses typing enum asyncio threading copy heapq bisect statistics hashlib io pickle "
    "urllib.parse base64 struct operator sqlite3 zipfile collections.abc inspect queue".split()
)
RARE = re.compile(
    r"(tkinter|turtle|mailbox|imaplib|nntplib|pydoc|bdb|xml|wsgiref|multiprocessing)\b"
)


@dataclass(frozen=True)
class Entry:
    """One documented thing: a module, class, function, method or language topic."""

    name: str
    kind: str
    module: str
    signature: str
    text: str
    names: tuple[str, ...] = ()  # what a topic is called in a question
    blocks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def weight(self) -> float:
        if self.kind == "topic":
            return 8.0
        known = 6.0 if self.module in POPULAR else 0.3 if RARE.match(self.module) else 1.0
        return known * {"module": 4.0, "method": 0.6}.get(self.kind, 1.0)


def clean(text: str) -> str:
    """Plain ASCII quotes and light reStructuredText reduced to Markdown-like text."""
    table: dict[str, str | int | None]
    table = {"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "–": "--", "—": "--", "\t": "    "}
    text = text.translate(str.maketrans(table))
    text = re.sub(r":[a-z:]+:`[~!]?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^(.+)\n[=\-*~^\"]{4,}$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def split_blocks(text: str) -> tuple[str, ...]:
    """Paragraphs: prose is put on one line, code and lists keep their lines."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.rstrip().split("\n")
        layout = any(re.match(r"\s|[-*+] |\d+\.|>>>|\$", line) for line in lines) or "::=" in block
        blocks.append("\n".join(lines) if layout else re.sub(r"\s+", " ", block).strip())
    return tuple(block for block in blocks if block.strip())


def make_entry(name: str, kind: str, module: str, signature: str, doc: str) -> Entry | None:
    text = clean(inspect.cleandoc(doc))
    if len(text) < 15 or len(text) > 30_000:
        return None
    signature = signature if len(signature) <= 170 else "(...)"
    return Entry(name, kind, module, signature, text, (), split_blocks(text))


def source_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> str:
    arguments = re.sub(r"\s+", " ", ast.unparse(node.args))
    if method:
        arguments = re.sub(r"^(self|cls)\b(, )?", "", arguments)
    return f"({arguments})"


def walk_definitions(tree: ast.Module, module: str) -> Iterator[Entry | None]:
    """The documented definitions at module level, and the methods of the classes there."""
    prefix = "" if module == "builtins" else module + "."
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            yield make_entry(
                prefix + node.name, "function", module, source_signature(node, False), doc
            )
        elif isinstance(node, ast.ClassDef):
            yield make_entry(prefix + node.name, "class", module, "", ast.get_docstring(node) or "")
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{prefix}{node.name}.{item.name}"
                    doc = ast.get_docstring(item) or ""
                    yield make_entry(name, "method", module, source_signature(item, True), doc)


def module_name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    if parts and parts[0] == "asyncio":
        name = "asyncio"
    return ALIASES.get(name, name)


def source_entries(root: Path) -> Iterator[Entry]:
    """Docstrings taken from the sources of the standard library, without importing them."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        name = module_name(relative)
        source = path.read_text(encoding="utf-8", errors="replace")
        if name in SKIPPED_MODULES or OTHER_LICENCE.search(source[:6000]):
            continue
        tree = ast.parse(source)
        found = [make_entry(name, "module", name, "", ast.get_docstring(tree) or "")]
        yield from filter(None, itertools.chain(found, walk_definitions(tree, name)))


def live_signature(thing: object) -> str:
    try:
        signature = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    signature = re.sub(r"\(\$?(self|cls|type)(, /)?(, )?", "(", signature)
    return signature if " at 0x" not in signature else "(...)"


def live_kind(thing: object) -> str | None:
    if isinstance(thing, type):
        return "class"
    return "function" if inspect.isbuiltin(thing) or inspect.ismethod(thing) else None


def live_entries(module: ModuleType) -> Iterator[Entry]:
    """Docstrings of what is written in C, which has no source to read."""
    name = module.__name__
    prefix = "" if name == "builtins" else name + "."
    for key, thing in sorted(vars(module).items()):
        kind = live_kind(thing)
        home = getattr(thing, "__module__", None) or name
        doc = getattr(thing, "__doc__", None)
        if key.startswith("_") or kind is None or not isinstance(doc, str):
            continue
        if home.split(".")[0].strip("_") not in {name, "builtins", "posix", "socket", "io"}:
            continue
        signature = live_signature(thing) if kind == "function" else ""
        found = [make_entry(prefix + key, kind, name, signature, doc)]
        for attribute, member in sorted(vars(thing).items()) if kind == "class" else ():
            text = getattr(member, "__doc__", None)
            if inspect.isroutine(member) and isinstance(text, str) and attribute[0] != "_":
                method = f"{prefix}{key}.{attribute}"
                found.append(make_entry(method, "method", name, live_signature(member), text))
        yield from filter(None, found)


def topic_entries() -> Iterator[Entry]:
    """The chapters of the language reference that ``help()`` shows."""
    called: dict[str, list[str]] = {}
    for word, target in pydoc.Helper.keywords.items():
        if isinstance(target, tuple):
            called.setdefault(target[0], []).append(f"the {word} statement")
            called[target[0]].append(f"`{word}`")
    for key, raw in sorted(pydoc_topics.topics.items()):
        text = clean(raw)
        title = text.split("\n", 1)[0].replace('"', "")
        names = [title[0].lower() + title[1:] if title.istitle() or " " in title else title]
        names += called.get(key, [])
        body = text.split("\n", 1)[-1].strip()
        yield Entry(key, "topic", "topics", "", body, tuple(names), split_blocks(body))


def load_entries() -> list[Entry]:
    """Every documented thing once, in a fixed order."""
    found: dict[str, Entry] = {}
    live = itertools.chain.from_iterable(
        live_entries(importlib.import_module(name)) for name in BUILT_IN
    )
    sources = source_entries(Path(sysconfig.get_path("stdlib")))
    for entry in itertools.chain(topic_entries(), sources, live):
        found.setdefault(entry.kind + entry.name, entry)
    return list(found.values())


# ----------------------------------------------------------------------------------------------
# Questions and answers
# ----------------------------------------------------------------------------------------------

ASK = (
    "What does {n} do?", "What is {n}?", "How do I use {n}?", "Explain {n}.", "Describe {n}.",
    "Tell me about {n}.", "Can you explain {n}?", "What is {n} for?", "Please explain {n}.",
    "I do not understand {n}.", "How does {n} work?", "When would I use {n}?", "help({n})", "{n}",
    "Could you tell me what {n} does?", "What can I do with {n}?",
)  # fmt: skip
ASK_SHORT = (
    "In one sentence, what does {n} do?", "Give me a short summary of {n}.", "Briefly, what is {n}?"
)  # fmt: skip
ASK_LONG = ("Explain {n} in detail.", "Give me the full documentation of {n}.")
MORE = ("Tell me more.", "Go on.", "Can you say more about it?", "What else should I know?")
SHORTER = ("Can you say that in one sentence?", "Shorter, please.", "Summarize that.")
ARGUMENTS = ("What arguments does it take?", "What are its parameters?", "How is it called?")
WHERE = ("Which module is it in?", "Where do I find it?", "What do I have to import?")
SIBLINGS = ("What else is in {m}?", "What other things does {m} have?", "List more of {m}.")
THANKS = ("Thanks.", "Thank you!", "Thanks, that helps.", "Great, thank you.")
WELCOME = "You are welcome. Ask me about any other part of the Python standard library."

ROLES = (
    "You are a helpful assistant.",
    "You are a helpful assistant for the Python standard library.",
    "You are a concise assistant that answers questions about Python.",
    "You are a Python tutor. Explain what each function does.",
    "You answer questions about the Python language and its library.",
    "You are a documentation assistant.",
    "You are an expert Python programmer who helps beginners.",
)
RULES = (
    "Answer in plain prose.", "Keep your answers short.", "Name the module a function is in.",
    "Use the wording of the documentation.", "Do not invent functions that do not exist.",
    "If you do not know the answer, say so.", "Show the signature first.", "Be polite.",
    "Prefer the standard library to other packages.", "Write code in backquotes.",
    "Never ask for passwords or other secrets.", "Answer only the question that was asked.",
    "Mention the exceptions a function may raise.", "Mention the default values of arguments.",
    "Assume that the reader knows the basics of programming.", "Answer in English.",
    "When a question has several parts, answer them one after the other.",
    "The reader uses a recent version of Python 3.", "Do not repeat the question.",
    "Point out functions that are deprecated.", "Explain terms that a beginner may not know.",
    "When two functions are similar, say how they differ.", "Do not apologize.",
    "Give one example when it helps, and none when it does not.",
    "Paths are given in the style of the operating system the reader uses.",
    "Text is Unicode unless the question says otherwise.",
)  # fmt: skip

# Written for the demo: greetings and the everyday questions that no docstring answers.
HANDMADE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hello!", "Good morning.", "Hey"),
     "Hello! Ask me about a module, a class or a function of the Python standard library."),
    (("Who are you?", "What are you?", "What can you do?", "Introduce yourself."),
     "I am the demo model of radixserve, a very small language model that was trained on the "
     "documentation of the Python standard library. I can tell you about its modules and "
     "functions, but I make mistakes, so check what I say."),
    (("How are you?", "How is it going?"),
     "I am fine, thank you. What would you like to know about Python?"),
    (("What is Python?", "Tell me about Python.", "Explain Python."),
     "Python is a programming language with dynamic types, automatic memory management and a "
     "large standard library. Programs are run by an interpreter, and blocks of code are marked "
     "by indentation."),
    (("How do I read a file line by line?", "How can I read a text file?", "Read a file in Python",
      "How do I loop over the lines of a file?"),
     "Open the file with the built-in function `open()` in a `with` statement and loop over the "
     "file object. Each step of the loop gives one line, with its newline at the end:\n\n"
     "    with open(\"notes.txt\", encoding=\"utf-8\") as file:\n"
     "        for line in file:\n"
     "            print(line.rstrip())\n\n"
     "The file is closed when the block ends, even if an error occurs."),
    (("How do I write to a file?", "How can I save text to a file?", "How do I create a file?"),
     "Open the file for writing with `open()` and call its `write()` method:\n\n"
     "    with open(\"notes.txt\", \"w\", encoding=\"utf-8\") as file:\n"
     "        file.write(\"first line\\n\")\n\n"
     "The mode `\"w\"` replaces a file that exists, and the mode `\"a\"` adds to its end."),
    (("What is a generator?", "Explain generators.", "What are generators?",
      "How do generators work?", "What is a generator function?"),
     "A generator is an iterator that is written as a function. A function whose body has a "
     "`yield` expression is a generator function, and calling it returns a generator. Each call "
     "of `next()` runs the body up to the next `yield`, which gives the value, and the local "
     "variables are kept until the generator is resumed. When the function returns, the "
     "generator raises `StopIteration`."),
    (("What is an iterator?", "Explain iterators.", "What are iterators?"),
     "An iterator is an object that gives the members of a stream of data one at a time. Its "
     "`__next__()` method returns the next item or raises `StopIteration` when there are no more "
     "items, and its `__iter__()` method returns the iterator itself."),
    (("What is a decorator?", "Explain decorators.", "How do decorators work?"),
     "A decorator is a function that takes a function and returns a function in its place. It is "
     "written with `@` on the line before the definition, and is applied once, when the function "
     "is defined. Examples are `functools.cache`, `staticmethod` and `property`."),
    (("What is a context manager?", "Explain context managers."),
     "A context manager is an object that sets up something for a `with` block and cleans up "
     "after it. Its `__enter__()` method is called when the block is entered, and `__exit__()` "
     "when it is left, also after an error. Files and locks are context managers, and "
     "`contextlib.contextmanager` makes one from a generator."),
    (("What is a list comprehension?", "Explain list comprehensions.",
      "How do list comprehensions work?"),
     "A list comprehension makes a list from the items of an iterable, in one expression. For "
     "example, `[n * n for n in range(5) if n % 2]` is the list of the squares of the odd "
     "numbers below five."),
    (("What is the difference between a list and a tuple?", "List or tuple?",
      "How do lists and tuples differ?"),
     "A list is mutable and a tuple is immutable. Items can be added to a list, removed and "
     "replaced, but a tuple stays as it was made, so that it can be a key of a dictionary if its "
     "items are hashable."),
    (("What is a dictionary?", "What is a dict?", "Explain dictionaries."),
     "A dictionary maps keys to values. Keys must be hashable, such as strings, numbers and "
     "tuples of them, and values may be any objects. Dictionaries keep the order in which keys "
     "were inserted. `d[key]` raises `KeyError` if the key is missing, and `d.get(key)` returns "
     "`None` instead."),
    (("What is a set?", "Explain sets."),
     "A set is an unordered collection of hashable objects without duplicates. Sets are used to "
     "test for membership, to remove duplicates, and to compute unions, intersections and "
     "differences."),
    (("How do I sort a list?", "How can I sort a list?", "Sort a list in Python"),
     "Call the `sort()` method of the list to sort it in place, or the built-in function "
     "`sorted()` to get a new sorted list. Both take a `key` function, which computes what items "
     "are compared by, and `reverse=True` for descending order."),
    (("How do I parse JSON?", "How can I read JSON?", "How do I read a JSON file?"),
     "Use the `json` module. `json.loads()` parses a string, and `json.load()` reads a file that "
     "is open for reading. Objects become dictionaries and arrays become lists."),
    (("How do I get the current time?", "How do I get the current date?", "What time is it?"),
     "Call `datetime.datetime.now()` for the local date and time, or `time.time()` for the "
     "seconds since the epoch."),
    (("How do I make a random number?", "How do I generate random numbers?"),
     "Use the `random` module. `random.random()` returns a float from 0 up to 1, "
     "`random.randint(a, b)` an integer from a to b, both included, and `random.choice(seq)` an "
     "item of a sequence."),
    (("How do I run a command?", "How do I run another program?", "How do I start a process?"),
     "Use `subprocess.run()` with a list of the program and its arguments. With "
     "`capture_output=True` and `text=True` the output is found in the `stdout` attribute of the "
     "result, and with `check=True` an exit status other than zero raises an exception."),
    (("How do I list the files in a folder?", "How do I list a directory?"),
     "Call `os.listdir()` for the names in a directory, or loop over "
     "`pathlib.Path(folder).iterdir()`. `glob.glob()` finds the paths that match a pattern."),
    (("How do I copy a file?", "How can I copy files?"),
     "Use `shutil.copy(src, dst)`, which copies the data and the permission bits. "
     "`shutil.copytree()` copies a whole directory."),
    (("How do I delete a file?", "How do I remove a file?"),
     "Call `os.remove(path)` or the `unlink()` method of a `pathlib.Path`. `shutil.rmtree()` "
     "deletes a whole directory."),
    (("How do I handle an exception?", "How do I catch an error?", "What is an exception?",
      "Explain exceptions."),
     "An exception is an error that occurs while a program runs. Put the code that may fail in a "
     "`try` block and the handling in an `except` clause that names the exception. The `else` "
     "clause runs if no exception occurred, and the `finally` clause runs in every case."),
    (("What is a class?", "Explain classes.", "How do I define a class?"),
     "A class is a type that you define, with the `class` statement. It holds the methods of its "
     "instances, and calling it makes a new instance and runs `__init__()`. A class may inherit "
     "from other classes."),
    (("What is a lambda?", "Explain lambda.", "What is a lambda expression?"),
     "A lambda expression makes a small function without a name. `lambda x: x + 1` is a function "
     "that returns its argument plus one. The body is a single expression."),
    (("What is a module?", "Explain modules."),
     "A module is a file of Python code that other code can import. The `import` statement runs "
     "the file once and binds the module object to its name, and the names that the file defines "
     "are attributes of the module."),
    (("What is async?", "What is a coroutine?", "Explain async and await."),
     "A coroutine is a function defined with `async def` that can be suspended. `await` suspends "
     "it until the awaited operation is done, and other tasks run in the meantime. "
     "`asyncio.run()` runs a coroutine in an event loop."),
    (("What is a string?", "Explain strings.", "What is str?"),
     "A string is an immutable sequence of Unicode characters. Strings are written in single or "
     "double quotes, and have methods such as `split()`, `join()`, `strip()` and `replace()`."),
    (("How do I split a string?", "How can I split text?"),
     "Call the `split()` method. `text.split()` splits at white space, and `text.split(\",\")` "
     "splits at commas. `splitlines()` splits at line boundaries."),
    (("How do I join strings?", "How do I concatenate strings?"),
     "Call the `join()` method of the separator with an iterable of strings, such as "
     "`\", \".join(names)`."),
    (("Bye.", "Goodbye.", "That is all."), "Goodbye! Come back when you have another question."),
    (("What is the weather?", "Who won the game?", "Tell me a joke.", "What is the news?"),
     "I do not know that. I only know the documentation of the Python standard library."),
)  # fmt: skip


def first_sentence(entry: Entry) -> str:
    head = re.sub(r"\s+", " ", entry.blocks[0])
    match = re.match(r"(.{15,}?[^. ][.!?])(?=\s[A-Z`\"']|$)", head)
    return match.group(1) if match else head.rstrip(":") + ("" if head.endswith(".") else ".")


def take_blocks(blocks: Sequence[str], limit: int) -> list[str]:
    """The first blocks that fit into a number of characters, at least one."""
    taken: list[str] = []
    for block in blocks:
        if taken and sum(map(len, taken)) + len(block) > limit:
            break
        if "::=" not in block:
            taken.append(block if len(block) < 1500 else block[: block.rfind(" ", 0, 1500)])
    while taken and len(taken) > 1 and taken[-1].endswith(":"):
        taken.pop()
    return taken


def heading(entry: Entry) -> str:
    if entry.kind == "module":
        return f"`{entry.name}` is a module of the Python standard library."
    where = "is a built-in" if entry.module == "builtins" else "is a"
    there = "" if entry.module == "builtins" else f" in the `{entry.module}` module"
    if entry.kind == "method":
        return f"`{entry.name}{entry.signature or '()'}` is a method of `{entry.owner}`."
    signature = entry.signature if entry.kind == "function" else ""
    return f"`{entry.name}{signature}` {where} {entry.kind}{there}."


def answer(entry: Entry, limit: int = 450) -> str:
    body = "\n\n".join(take_blocks(entry.blocks, limit))
    if entry.kind == "topic":
        return body
    return f"{heading(entry)} {body}"


def short_answer(entry: Entry) -> str:
    sentence = first_sentence(entry)
    return sentence if entry.kind == "topic" else f"`{entry.name}`: {sentence}"


NOT_VERBS = frozenset(
    "a an the this if true like same internal helper coroutine replacement identical default see "
    "when for number alias deprecated similar given no not it in on use new".split()
)


def task_question(entry: Entry) -> str | None:
    """'Serialize obj to a string.' becomes 'How do I serialize obj to a string?'"""
    sentence = first_sentence(entry).rstrip(".")
    match = re.match(r"([A-Z][a-z]+) (.{10,90})$", sentence)
    if not match or entry.kind not in {"function", "method"}:
        return None
    verb = "get" if match[1] == "Return" else match[1].lower()
    if verb in NOT_VERBS or verb.endswith(("ing", "s", "ed")):
        return None
    return f"{verb} {match[2]}"


class Chats:
    """Makes conversations from entries, with a random generator of its own."""

    def __init__(self, entries: Sequence[Entry], rng: random.Random) -> None:
        self.rng = rng
        self.entries = [e for e in entries if e.public and e.blocks and take_blocks(e.blocks, 1)]
        self.weights = list(itertools.accumulate(e.weight for e in self.entries))
        self.members: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.kind in {"function", "class"}:
                self.members.setdefault(entry.module, []).append(entry.name)

    def pick(self) -> Entry:
        return self.rng.choices(self.entries, cum_weights=self.weights)[0]

    def spoken_name(self, entry: Entry) -> str:
        """One of the ways in which people write the name of a thing."""
        if entry.kind == "topic":
            return self.rng.choice(entry.names)
        if entry.kind == "module":
            return self.rng.choice(
                (entry.name, f"`{entry.name}`", f"the {entry.name} module", f"module {entry.name}")
            )
        short = entry.name.removeprefix(entry.module + ".")
        forms = [entry.name] * 3 + [f"`{entry.name}`", f"{short} in {entry.module}"]
        if entry.kind != "class":
            forms.append(f"{entry.name}()")
        if len(short) > 5:
            forms.append(short)
        return self.rng.choice(forms)

    def open_turn(self, entry: Entry) -> tuple[str, str]:
        """A question on an entry and its answer."""
        roll = self.rng.random()
        name = self.spoken_name(entry)
        if roll < 0.08:
            return self.rng.choice(ASK_SHORT).format(n=name), short_answer(entry)
        if roll < 0.14:
            return self.rng.choice(ASK_LONG).format(n=name), answer(entry, 1400)
        task = task_question(entry) if roll < 0.34 else None
        if task:
            ask = self.rng.choice(("How do I {t}?", "How can I {t}?", "Which function can {t}?"))
            return ask.format(t=task), f"Use `{entry.name}`. " + answer(entry)
        ask = self.rng.choice(ASK)
        if entry.kind == "topic" and ask.startswith("help"):
            ask = "Explain {n}."
        return ask.format(n=name), answer(entry)

    def follow_up(self, entry: Entry) -> tuple[str, str] | None:
        """A question that only makes sense after the answer on the same entry."""
        rng = self.rng
        kind = rng.choice(("more", "short", "arguments", "where", "siblings"))
        rest = entry.blocks[len(take_blocks(entry.blocks, 450)) :]
        if kind == "more" and take_blocks(rest, 1):
            return rng.choice(MORE), "\n\n".join(take_blocks(rest, 450))
        if kind == "short":
            return rng.choice(SHORTER), short_answer(entry)
        if kind == "arguments" and entry.signature:
            return rng.choice(ARGUMENTS), f"It is called as `{entry.name}{entry.signature}`."
        if kind == "where" and entry.kind in {"function", "class"}:
            if entry.module == "builtins":
                return rng.choice(WHERE), f"`{entry.name}` is built in, so no import is needed."
            return rng.choice(WHERE), f"It is in the `{entry.module}` module."
        names = self.members.get(entry.module, [])
        if kind == "siblings" and len(names) > 2 and entry.module != "builtins":
            some = ", ".join(f"`{name}`" for name in names[:8] if name != entry.name)
            return rng.choice(SIBLINGS).format(m=entry.module), f"`{entry.module}` has {some}."
        return None

    def turns(self, count: int, subjects: Sequence[Entry]) -> list[tuple[str, str]]:
        rng = self.rng
        queue = list(subjects)
        made: list[tuple[str, str]] = []
        entry: Entry | None = None
        while len(made) < count:
            follow = self.follow_up(entry) if entry and rng.random() < 0.45 else None
            if follow:
                made.append(follow)
            elif rng.random() < 0.16:
                questions, reply = rng.choice(HANDMADE)
                made.append((rng.choice(questions), reply))
                entry = None
            else:
                entry = queue.pop() if queue else self.pick()
                made.append(self.open_turn(entry))
        if count > 1 and rng.random() < 0.15:
            made[-1] = (rng.choice(THANKS), WELCOME)
        return made

    def system_prompt(self, size: int) -> tuple[str, list[Entry]]:
        """A system prompt of about ``size`` characters and the entries that it quotes."""
        rng = self.rng
        count = rng.randint(0, 4) if size < 600 else rng.randint(3, len(RULES))
        text = " ".join([rng.choice(ROLES), *rng.sample(RULES, count)])
        quoted: list[Entry] = []
        while len(text) + 150 < size:
            entry = self.pick()
            text += f"\n\nNotes on {self.spoken_name(entry)}:\n{answer(entry, 700)}"
            quoted.append(entry)
        return text[: size + 1200], quoted

    def render(self, longest: int) -> str:
        """One chat of up to roughly ``longest`` characters, in the format of the template."""
        rng = self.rng
        pieces = [BOS]
        subjects: list[Entry] = []
        roll = rng.random()
        if roll < 0.72:
            ceiling = longest if roll < (0.15 if longest < 3000 else 0.35) else 250
            system, quoted = self.system_prompt(rng.randint(60, max(250, ceiling * 2 // 3)))
            subjects = rng.sample(quoted, min(2, len(quoted)))
            pieces.append(f"{SYSTEM}{system}{END}")
        most = 5 if longest < 6000 else 12
        count = 1 if rng.random() < 0.4 else rng.randint(2, most)
        for question, reply in self.turns(count, subjects):
            pieces.append(f"{USER}{question}{END}{ASSISTANT}{reply}{END}")
        return "".join(pieces)


class Documents:
    """Plain documents: runs of entries of one module, as ``help()`` would list them."""

    def __init__(self, entries: Sequence[Entry], rng: random.Random) -> None:
        self.rng = rng
        by_module: dict[str, list[Entry]] = {}
        for entry in entries:
            key = entry.name if entry.kind == "topic" else entry.module
            by_module.setdefault(key, []).append(entry)
        self.modules = list(by_module.values())
        self.weights = list(
            itertools.accumulate(sum(len(e.text) for e in m) ** 0.8 for m in self.modules)
        )

    @staticmethod
    def show(entry: Entry) -> str:
        title = entry.names[0] if entry.names else entry.name + entry.signature
        return f"{title}\n\n{entry.text}"

    def render(self, longest: int) -> str:
        members = self.rng.choices(self.modules, cum_weights=self.weights)[0]
        start = self.rng.randrange(len(members))
        text = ""
        for entry in members[start:]:
            text += ("\n\n" if text else "") + self.show(entry)
            if len(text) > longest:
                break
        if len(text) > longest:
            offset = self.rng.randrange(len(text) - longest + 1) if self.rng.random() < 0.6 else 0
            cut = text.rfind("\n", 0, offset) + 1
            text = text[cut : cut + longest]
        return f"{BOS}{text}{EOS}"


# ----------------------------------------------------------------------------------------------
# Tokens
# ----------------------------------------------------------------------------------------------


def split_entries(entries: Sequence[Entry], seed: int) -> tuple[list[Entry], list[Entry]]:
    """Training entries, and about 3 % of the docstrings that the training never sees."""
    rng = random.Random(seed)
    held = {e for e in entries if e.kind in {"function", "method"} and rng.random() < 0.03}
    return [e for e in entries if e not in held], [e for e in entries if e in held]


def train_tokenizer(entries: Sequence[Entry], vocab: int, seed: int) -> Tokenizer:
    chats = Chats(entries, random.Random(seed))
    plain = (Documents.show(entry) for entry in entries)
    strip = re.compile(r"<\|[a-z]+\|>")
    talk = (strip.sub("\n", chats.render(1500)) for _ in range(4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(plain, talk), trainer)
    return tokenizer


class Stream:
    """An endless stream of packed batches, drawn from chats and documents."""

    def __init__(self, entries: Sequence[Entry], tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.chats = Chats(entries, self.rng)
        self.documents = Documents(entries, self.rng)
        self.pending: list[int] = []

    def batch(self, rows: int, length: int) -> torch.Tensor:
        wanted = rows * length
        longest = int(length * 3.3)
        while len(self.pending) < wanted:
            texts = [
                (self.chats if self.rng.random() < 0.68 else self.documents).render(longest)
                for _ in range(32)
            ]
            for encoded in self.tokenizer.encode_batch(texts):
                self.pending.extend(encoded.ids)
        taken, self.pending = self.pending[:wanted], self.pending[wanted:]
        return torch.tensor(taken, dtype=torch.long).view(rows, length)


def held_out_batches(
    train: Sequence[Entry], held: Sequence[Entry], tokenizer: Tokenizer, seed: int
) -> dict[str, torch.Tensor]:
    """Documents of unseen entries, and unseen chats on seen entries, as rows of 512 tokens."""
    ids: list[int] = []
    for entry in held:
        ids += tokenizer.encode(f"{BOS}{Documents.show(entry)}{EOS}").ids
    rows = min(len(ids) // 512, 48)
    documents = torch.tensor(ids[: rows * 512], dtype=torch.long).view(rows, 512)
    chats = Chats(train, random.Random(seed + 999))
    ids = []
    while len(ids) < 32 * 512:
        ids += tokenizer.encode(chats.render(1500)).ids
    return {
        "unseen docstrings": documents,
        "unseen chats": torch.tensor(ids[: 32 * 512], dtype=torch.long).view(32, 512),
    }


# ----------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Earlier:
    """What the runs that a run continues did; kept in the header of the weights."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    commands: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            note = json.loads((file.metadata() or {}).get("training", "{}"))
        note["commands"] = tuple(note.get("commands", ()))
        return cls(**note)


@dataclass
class Progress:
    """How far a run is, by the step or by the clock, whichever is ahead."""

    steps: int | None
    minutes: float | None
    step: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def total(self, earlier: Earlier) -> Earlier:
        """What all runs up to this one did together."""
        return Earlier(
            earlier.steps + self.step,
            earlier.tokens + self.tokens,
            earlier.minutes + self.elapsed / 60,
            earlier.commands,
        )

    @property
    def share(self) -> float:
        by_step = self.step / self.steps if self.steps else 0.0
        by_time = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_step, by_time))


def batch_shape(share: float) -> tuple[int, int]:
    """Rows and length: short sequences first, the full context at the end."""
    for limit, shape in ((0.72, (8, 512)), (0.84, (4, 1024)), (0.92, (2, 2048))):
        if share < limit:
            return shape
    return (1, CONTEXT)


def learning_rate(progress: Progress, peak: float) -> float:
    warm = min(1.0, (progress.step + 1) / 150)
    return peak * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress.share)))


def make_model(vocab: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(PAD),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, held: dict[str, torch.Tensor]) -> dict[str, float]:
    model.eval()
    losses = {
        name: sum((float(loss_of(model, r)) * len(r) for r in batch.split(8)), 0.0) / len(batch)
        for name, batch in held.items()
    }
    model.train()
    return losses


class Trainer:
    """The loop: steps, reports, and a usable folder every few minutes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        entries = load_entries()
        seed = options.seed
        self.train_entries, held_entries = split_entries(entries, seed)
        self.characters = sum(len(e.text) for e in entries)
        log.info("%d entries, %d characters", len(entries), self.characters)
        self.tokenizer = train_tokenizer(self.train_entries, options.vocab, seed)
        first = seed + 7919 if options.init else seed  # a continued run sees other chats
        self.stream = Stream(self.train_entries, self.tokenizer, first)
        self.held = held_out_batches(self.train_entries, held_entries, self.tokenizer, seed)
        self.model = make_model(options.vocab, seed)
        self.earlier = Earlier()
        if options.init:
            weights = load_file(options.init / "model.safetensors")
            self.model.load_state_dict(weights, strict=False)  # the tied head is not in the file
            self.model.tie_weights()
            self.earlier = Earlier.read(options.init)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        log.info("%d parameters; held out: %s", self.parameters,
                 {name: batch.numel() for name, batch in self.held.items()})  # fmt: skip
        self.run: Any = self.model if options.no_compile else torch.compile(self.model)
        self.optimizer = make_optimizer(self.model, options.lr)
        self.progress = Progress(options.steps, options.minutes)
        self.train_loss = math.nan
        self.losses: dict[str, float] = {}

    def one_step(self) -> float:
        rows, length = batch_shape(self.progress.share)
        rate = learning_rate(self.progress, self.options.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self.run, self.stream.batch(rows, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += rows * length
        return float(loss.detach())

    def report(self) -> None:
        progress = self.progress
        self.losses = evaluate(self.model, self.held)
        log.info(
            "step %d (%.0f %%) tokens %.2fM %.1f min %.0f tok/s train %.3f held out %s",
            progress.step, 100 * progress.share, progress.tokens / 1e6, progress.elapsed / 60,
            progress.tokens / progress.elapsed, self.train_loss,
            {name: round(value, 3) for name, value in self.losses.items()},
        )  # fmt: skip

    def train(self) -> None:
        saved = time.monotonic()
        while self.progress.share < 1.0:
            loss = self.one_step()
            old = loss if math.isnan(self.train_loss) else self.train_loss
            self.train_loss = old + 0.02 * (loss - old)
            if self.progress.step % 25 == 0:
                log.info("step %d train %.3f", self.progress.step, self.train_loss)
            if self.progress.step % 250 == 0:
                self.report()
            if time.monotonic() - saved > 60 * self.options.save_minutes:
                self.save()
                saved = time.monotonic()
        self.save()

    def summary(self) -> Earlier:
        """The training so far, this run included."""
        options = self.options
        limit = f"--steps {options.steps}" if options.steps else f"--minutes {options.minutes:g}"
        command = f"python tools/train_demo.py {limit} --seed {options.seed} --lr {options.lr:g}"
        command += f" --threads {options.threads}"
        if options.init:
            command += " --init radixserve/models/demo"
        total = self.progress.total(self.earlier)
        return replace(total, commands=(*total.commands, command))

    def save(self) -> None:
        self.report()
        write_folder(self, self.options.out)
        log.info("saved %s", self.options.out)


# ----------------------------------------------------------------------------------------------
# The folder
# ----------------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_json(config: LlamaConfig) -> dict[str, object]:
    """The configuration in the classic layout, which every Llama loader reads."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
        "mlp_bias", "attention_dropout", "initializer_range", "bos_token_id", "eos_token_id",
        "pad_token_id",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        **{name: getattr(config, name) for name in names},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_cache": True,
    }


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, most: int = 160) -> str:
    """A greedy completion, for the sample in the model card."""
    ids = tokenizer.encode(prompt).ids
    made: list[int] = []
    stops = {SPECIAL.index(EOS), SPECIAL.index(END)}
    while len(made) < most:
        logits = model(input_ids=torch.tensor([ids + made])).logits
        token = int(logits[0, -1].argmax())
        if token in stops:
            break
        made.append(token)
    return tokenizer.decode(made)


CARD = """\
# The demo model

A Llama of {parameters:,} parameters that ships with radixserve, so that `Runtime("demo")` and the
server work with no download. It was trained from scratch on the documentation that comes with
Python, and writes documentation-like English about the standard library.

It is a toy for trying the engine out and for tests: it is not clever, it is often wrong, it
invents functions and arguments, and it knows nothing but Python's documentation. Do not rely on
what it says.

## Shape

| | |
|---|---|
| architecture | `LlamaForCausalLM`, tied embeddings, {layers} layers, hidden size {hidden} |
| attention | {heads} query heads and {kv} key/value heads of 64 |
| feed-forward | {inner} |
| vocabulary | {vocab:,} byte-level BPE tokens |
| context | {context:,} tokens |
| weights | stored as bfloat16, `dtype` in `config.json` is float32 |

## Chat format

    {bos}{system}You are helpful.{end}{user}What is json?{end}{assistant}

The markers are single tokens with nothing between them; the answer ends with `{end}`. The
rendering of a longer history starts with the rendering of the shorter one, so each turn reuses
the cached prefix of the turn before. The tokenizer adds no token of its own; the template writes
`{bos}`. Both `{eos}` and `{end}` end a generation. The special tokens:

{special}

## Data and licence

The text comes from the Python {python} installation that ran the training, and from nowhere else:
the language topics of `pydoc_data/topics.py` and the docstrings of the standard library
({characters:,} characters; files that open with a licence notice of their own are left out).
Its notice is "{copyright}
All Rights Reserved.", and its licence is the Python Software Foundation License Version 2, which
allows redistribution. About thirty everyday questions and answers, the phrasings of the questions
and the system prompts were written for this model and are part of radixserve. From these the
script forms plain documents and synthetic chats of one to twelve turns, with system prompts of up
to a few thousand tokens. The weights are under the licence of radixserve; passages of the
documentation that the model repeats stay under the licence above.

## Training

    {commands}

AdamW (weight decay 0.1, clipped at 1.0), warm-up and cosine, bfloat16 autocast, batches of 4,096
tokens: rows of 512 for the first 72 % of a run, then rows of 1,024, 2,048 and 4,096.

| | |
|---|---|
| steps | {steps:,} |
| tokens seen | {tokens:,} |
| wall time | {minutes:.0f} minutes on a CPU |
| training loss (running mean) | {train_loss:.3f} |
{losses}

Loss is in nats per token. The docstrings held out are functions and methods that the training
never saw; the chats held out ask about things it did see. How far a run with `--minutes` gets
depends on the speed of the machine; `--steps` does not.

## Samples

Greedy, after the system prompt "{role}":

{samples}
"""


SAMPLE_QUESTIONS = (
    "What does json.dumps do?", "How do I read a file line by line?", "What is random.shuffle?"
)  # fmt: skip


def sample_text(trainer: Trainer, role: str) -> str:
    shown = []
    for question in SAMPLE_QUESTIONS:
        prompt = f"{BOS}{SYSTEM}{role}{END}{USER}{question}{END}{ASSISTANT}"
        reply = complete(trainer.model, trainer.tokenizer, prompt)
        quoted = "\n".join("> " + line if line else ">" for line in reply.split("\n"))
        shown.append(f"**{question}**\n\n{quoted}")
    return "\n\n".join(shown)


def write_card(trainer: Trainer, out: Path) -> None:
    config, total = trainer.model.config, trainer.summary()
    losses = (f"| held-out loss, {name} | {value:.3f} |" for name, value in trainer.losses.items())
    special = "\n".join(f"- `{name}` is {number}" for number, name in enumerate(SPECIAL))
    role = ROLES[1]
    card = CARD.format(
        parameters=trainer.parameters, layers=config.num_hidden_layers, hidden=config.hidden_size,
        heads=config.num_attention_heads, kv=config.num_key_value_heads,
        inner=config.intermediate_size, vocab=config.vocab_size, context=CONTEXT, bos=BOS, eos=EOS,
        system=SYSTEM, user=USER, assistant=ASSISTANT, end=END, special=special,
        python=platform.python_version(), characters=trainer.characters,
        commands="\n    ".join(total.commands),
        steps=total.steps, tokens=total.tokens, minutes=total.minutes,
        train_loss=trainer.train_loss, losses="\n".join(losses),
        role=role, samples=sample_text(trainer, role), copyright=sys.copyright.split("\n")[0],
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")


def write_folder(trainer: Trainer, out: Path) -> None:
    """The files of the model in their final form; each write replaces the one before."""
    out.mkdir(parents=True, exist_ok=True)
    model = trainer.model
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    temporary = out / "model.safetensors.tmp"
    note = json.dumps(asdict(trainer.summary()))
    save_file(weights, temporary, metadata={"format": "pt", "training": note})
    temporary.chmod(0o644)
    temporary.replace(out / "model.safetensors")
    write_json(out / "config.json", config_json(model.config))
    stops = [SPECIAL.index(EOS), SPECIAL.index(END)]
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": SPECIAL.index(BOS),
            "eos_token_id": stops,
            "pad_token_id": SPECIAL.index(PAD),
        },
    )
    write_tokenizer(trainer.tokenizer, out)
    model.eval()
    write_card(trainer, out)
    model.train()


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model of radixserve.")
    default = Path(__file__).resolve().parent.parent / "radixserve" / "models" / "demo"
    parser.add_argument("--out", type=Path, default=default, help="folder to write")
    parser.add_argument("--steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--save-minutes", type=float, default=10, help="time between two saves")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and weights")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary")
    parser.add_argument("--init", type=Path, help="folder of an earlier run to go on from")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    options = parser.parse_args(arguments)
    if not options.steps and not options.minutes:
        options.minutes = 50.0
    return options


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    options = parse_options()
    torch.set_num_threads(options.threads)
    Trainer(options).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
