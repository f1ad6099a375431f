"""The texts of the running Python installation: docstrings and language topics."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pydoc
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics as pydoc_topics
from types import ModuleType

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
        entries = [make_entry(name, "module", name, "", ast.get_docstring(tree) or "")]
        yield from filter(None, itertools.chain(entries, walk_definitions(tree, name)))


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
    """Docstrings of functions written in C, which have no source to read."""
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
        entries = [make_entry(prefix + key, kind, name, signature, doc)]
        for attribute, member in sorted(vars(thing).items()) if kind == "class" else ():
            text = getattr(member, "__doc__", None)
            if inspect.isroutine(member) and isinstance(text, str) and attribute[0] != "_":
                method = f"{prefix}{key}.{attribute}"
                entries.append(make_entry(method, "method", name, live_signature(member), text))
        yield from filter(None, entries)


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
    entries: dict[str, Entry] = {}
    live = itertools.chain.from_iterable(
        live_entries(importlib.import_module(name)) for name in BUILT_IN
    )
    sources = source_entries(Path(sysconfig.get_path("stdlib")))
    for entry in itertools.chain(topic_entries(), sources, live):
        entries.setdefault(entry.kind + entry.name, entry)
    return list(entries.values())
