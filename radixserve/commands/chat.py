"""`radixserve chat`: a conversation in the terminal, with forks of it side by side."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.api.tree_view import draw_tree, escape, shorten
from radixserve.commands.flags import (
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    add_sampling_flags,
    given_engine,
    given_sampling,
)
from radixserve.commands.terminal import as_path, format_seconds, make_console, print_escaped
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.chat import ChatSession
    from radixserve.api.runtime import Runtime
    from radixserve.output import Completion

_EPILOG = """\
in the conversation:
  /fork [NAME]   go on in a fork of this conversation; nothing is computed again
  /switch NAME   go to another one
  /undo          take back the last question and its answer
  /tree          the conversations, and the prefix tree that they share
  /stats         tokens and memory
  /save FILE     write this conversation as JSON, with its exact token ids
  /load FILE     go on with one that was saved
  /help          these commands
  /quit          leave, like Ctrl-D; Ctrl-C stops an answer, or leaves
A line that begins with // is sent with one of the two.

examples:
  radixserve chat
  radixserve chat Qwen/Qwen3-0.6B --system "You are brief." --temperature 0.6
  radixserve chat --load yesterday.json
"""
_HELP = _EPILOG.partition("\n\n")[0].partition("\n")[2]
_MAX_NODES = 200


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "chat",
        "talk with a model in the terminal",
        "Talk with a model in the terminal. Every turn computes only what is new.",
        _EPILOG,
    )
    add_model_flag(parser)
    flags = {
        "--system TEXT": "system message at the beginning",
        "--template FILE": "chat template (Jinja) instead of the tokenizer's own; - is standard "
        "input",
        "--load FILE": "go on with a conversation that was saved; - is standard input",
    }
    add_flags(parser, flags)
    add_sampling_flags(parser, defaults={"max_tokens": 512})
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.load is not None and (args.system is not None or args.template is not None):
        raise InvalidRequest("--load brings its own system message and template")
    params, settings = SamplingParams(**given_sampling(args)), given_engine(args)
    template = None if args.template is None else _read_template(args.template)
    from radixserve.api.runtime import Runtime

    with Runtime(args.model, **settings) as runtime:
        if args.load is None:
            chat = runtime.chat(args.system, template=template, params=params)
        else:
            chat = runtime.load_chat(as_path(args.load), params=params)
        with contextlib.closing(ChatTerminal(runtime, chat, params)) as terminal:
            terminal.greet(args.model)
            terminal.talk()
    return 0


class ChatTerminal:
    """Reads lines from standard input; each one is a command or a message."""

    def __init__(self, runtime: Runtime, chat: ChatSession, params: SamplingParams) -> None:
        self._runtime = runtime
        self._params = params
        self._chats = {"main": chat}
        self._origins: dict[str, str] = {}  # {fork: the conversation it was forked from}
        self._name = "main"
        self._reused = self._computed = self._generated = 0
        self._console = make_console()

    def close(self) -> None:
        for chat in self._chats.values():
            chat.close()

    def greet(self, model: str) -> None:
        turns = len(self._chat.history) // 2
        before = f", {turns} turn{'' if turns == 1 else 's'} so far" if turns else ""
        self._note(f"{model}{before}. /help lists the commands, /quit leaves.")

    def talk(self) -> None:
        """Until the end of input, Ctrl-C at the prompt, or /quit."""
        for line in self._lines():
            try:
                self._take(line)
            except (InvalidRequest, OSError) as error:
                self._say(f"{error}", "red")

    # -- a line -------------------------------------------------------------------------------

    def _lines(self) -> Iterator[str]:
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  `input` edits lines with it
        while True:
            try:
                line = input(f"{self._name}> " if is_terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                if is_terminal:
                    self._console.print()
                return
            if line == "/quit":
                return
            if line:
                yield line

    def _take(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            self._answer(line[1:] if line.startswith("//") else line)
            return
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "fork": self._fork,
            "switch": self._switch,
            "undo": self._undo,
            "tree": self._tree,
            "stats": self._stats,
            "save": self._save,
            "load": self._load,
            "help": self._help,
        }
        if name not in commands:
            raise InvalidRequest(f"there is no command /{name}; /help lists them")
        commands[name](rest.strip())

    def _answer(self, text: str) -> None:
        done = None
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                for chunk in self._chat.stream(text):
                    print_escaped(self._console, chunk.text)
                    done = chunk.completion
            except KeyboardInterrupt:
                print_escaped(self._console, " ...")
            finally:
                self._console.print()
        for note in notes:
            self._note(f"{note.message}")
        if done is not None:
            self._count(done)

    def _count(self, done: Completion) -> None:
        usage = done.usage
        self._reused += usage.cached_tokens
        self._computed += usage.computed_tokens
        self._generated += usage.completion_tokens
        cut = ", cut at the limit of tokens" if done.finish_reason == "length" else ""
        self._note(
            f"reused {usage.cached_tokens} + computed {usage.computed_tokens} = "
            f"{usage.prompt_tokens}, first token {format_seconds(done.metrics.ttft_s)}, "
            f"{usage.completion_tokens} in {format_seconds(done.metrics.total_s)}{cut}"
        )

    # -- commands -----------------------------------------------------------------------------

    def _fork(self, name: str) -> None:
        name = name or self._free_name(self._name)
        if name in self._chats or len(name.split()) != 1:
            raise InvalidRequest(f"a fork needs a name of one word that is not taken, not {name!r}")
        (self._chats[name],) = self._chat.fork()
        self._origins[name] = self._name
        self._note(f"{name} is a fork of {self._name}; you are in {name} now")
        self._name = name

    def _switch(self, name: str) -> None:
        if name not in self._chats:
            raise InvalidRequest(f"there is no {name!r}; there are {', '.join(self._chats)}")
        self._name = name
        history = self._chat.history
        last = f", last said: {self._short(history[-1]['content'])}" if history else ""
        self._note(f"you are in {name} now{last}")

    def _undo(self, _: str) -> None:
        question = self._chat.undo()[0]["content"]
        self._note(f"taken back: {self._short(question)}")

    def _tree(self, _: str) -> None:
        for name in self._chats:
            self._note(self._line_about(name))
        tokenizer = self._runtime.tokenizer
        assert tokenizer is not None, "chats need one"
        dump = self._runtime.cache_tree(_MAX_NODES)
        decode = partial(tokenizer.decode, keep_special=True)
        self._console.print(draw_tree(dump, decode, width=self._console.width))

    def _stats(self, _: str) -> None:
        stats = self._runtime.cache_stats()
        prompted = self._reused + self._computed
        share = f" ({100 * self._reused / prompted:.0f} %)" if prompted else ""
        self._note(self._line_about(self._name))
        self._note(
            f"prompts: {prompted:,} tokens, {self._reused:,} reused{share}, "
            f"{self._computed:,} computed; answers: {self._generated:,} tokens"
        )
        self._note(
            f"cache: {stats['pages_tree']:,} of {stats['pages_total']:,} pages of "
            f"{stats['page_size']} used, {stats['evicted_tokens']:,} tokens evicted"
        )

    def _save(self, path: str) -> None:
        self._chat.save(_given(path, "/save FILE"))
        self._note(f"saved: {path}")

    def _load(self, path: str) -> None:
        chat = self._runtime.load_chat(_given(path, "/load FILE"), params=self._params)
        stem = "-".join(Path(path).stem.split()) or "loaded"
        self._name = stem if stem not in self._chats else self._free_name(stem)
        self._chats[self._name] = chat
        self._note(f"you are in {self._name} now: {self._line_about(self._name)}")

    def _help(self, _: str) -> None:
        self._console.print(_HELP, markup=False)

    # -- state and output ---------------------------------------------------------------------

    @property
    def _chat(self) -> ChatSession:
        return self._chats[self._name]

    def _free_name(self, name: str) -> str:
        names = (f"{name}-{number}" for number in itertools.count(2))
        return next(one for one in names if one not in self._chats)

    def _line_about(self, name: str) -> str:
        chat = self._chats[name]
        num_turns = sum(message["role"] == "assistant" for message in chat.history)
        origin = f", fork of {self._origins[name]}" if name in self._origins else ""
        mark = "*" if name == self._name else " "
        return f"{mark} {name}: turns {num_turns}, tokens {len(chat.tokens):,}{origin}"

    def _short(self, content: object) -> str:
        return shorten(escape(str(content)), max(20, self._console.width - 40))

    def _note(self, text: str) -> None:
        self._say(text, "dim")

    def _say(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def _given(path: str, usage: str) -> str:
    if not path:
        raise InvalidRequest(f"a file is missing: {usage}")
    return path


def _read_template(name: str) -> str:
    try:
        return Path(as_path(name)).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text: {error}") from None
