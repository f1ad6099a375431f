"""`radixserve chat`: conversations in the terminal, and forks of them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.api.tree_view import draw_tree, escape, shorten
from radixserve.checks import suggestion
from radixserve.commands.chat_pictures import picture_file, said, take_pictures
from radixserve.commands.chat_saves import SavedChats
from radixserve.commands.flags import (
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    add_sampling_flags,
    given_engine,
    given_sampling,
)
from radixserve.commands.terminal import (
    MessageReader,
    as_path,
    error_line,
    format_seconds,
    make_console,
    print_escaped,
    without_echo,
)
from radixserve.errors import InvalidRequest, RequestFailed
from radixserve.request import SamplingParams
from radixserve.text.picture_parts import shown_text

if TYPE_CHECKING:
    from rich.console import Console

    from radixserve.api.chat import ChatSession
    from radixserve.api.runtime import Runtime
    from radixserve.completion import Chunk, Completion
    from radixserve.picture import Picture

_EPILOG = """\
in the conversation:
  /fork [NAME]   go on in a fork of this conversation; nothing is computed again
  /switch NAME   go to another one
  /undo          take back the last question and its answer
  /tree          the conversations, and the prefix tree that they share
  /stats         tokens and memory
  /save FILE     write this conversation as JSON, with its exact token ids
  /load FILE     go on with one that was saved
  /image FILE    send a picture with the next message; a path in a message, as of a file that
                 is dropped on the terminal, does the same
  /resume [N]    list the conversations that were saved by themselves; go on with the Nth
  /help          these commands
  /quit          leave, like Ctrl-D
Ctrl-C stops an answer and keeps what was said; at the prompt the second one leaves.
A pasted text of several lines is one message. A line that begins with // is sent with one of
the two. In a terminal, conversations are saved after every answer, the last 100 of a model, in
~/.local/state/radixserve/chats; --no-save keeps nothing.

examples:
  radixserve chat
  radixserve chat Qwen/Qwen3-0.6B --system "You are brief." --temperature 0.6
  radixserve chat --resume
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
        "--resume": "go on with the last conversation with this model",
        "--no-save": "do not save conversations",
        "--plain": "show answers as they come, without markdown",
    }
    add_flags(parser, flags)
    add_sampling_flags(parser, defaults={"max_tokens": 512})
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.load is not None and args.resume:
        raise InvalidRequest("give --load or --resume, not both")
    if (args.load or args.resume) and (args.system is not None or args.template is not None):
        flag = "--resume" if args.resume else "--load"
        raise InvalidRequest(f"{flag} brings its own system message and template")
    sampling, settings = given_sampling(args), given_engine(args)
    SamplingParams(**sampling)  # checks them before a model is loaded
    template = None if args.template is None else _read_template(args.template)
    saves = SavedChats(args.model)
    resumed = saves.numbered("1").path if args.resume else None
    console = make_console()
    with contextlib.ExitStack() as stack:
        from radixserve.api.progress import loading_bar

        with without_echo(), loading_bar(args.model):
            from radixserve.api.runtime import Runtime

            runtime = stack.enter_context(Runtime(args.model, **settings))
        params = runtime.sampling_params(**sampling)
        path = resumed if args.load is None else as_path(args.load)
        if path is None:
            chat = runtime.chat(args.system, template=template, params=params)
        else:
            chat = runtime.load_chat(path, params=params)
        options = TerminalOptions(
            console, saves, saves_by_itself=not args.no_save, is_plain=args.plain
        )
        with contextlib.closing(ChatTerminal(runtime, chat, params, options)) as terminal:
            terminal.greet(args.model, resumed)
            terminal.talk()
    return 0


@dataclass(frozen=True, slots=True)
class TerminalOptions:
    """Where a chat is shown and saved."""

    console: Console
    saves: SavedChats
    saves_by_itself: bool  # save after every answer, if messages are typed in a terminal
    is_plain: bool  # print answers as they are, without markdown, as in a pipe


class ChatTerminal:
    """Reads messages from standard input. A message is a command, or the model answers it."""

    def __init__(
        self, runtime: Runtime, chat: ChatSession, params: SamplingParams, options: TerminalOptions
    ) -> None:
        self._runtime = runtime
        self._params = params
        self._console, self._saves = options.console, options.saves
        self._reader = MessageReader()
        self._renders_markdown = self._console.is_terminal and not options.is_plain
        self._saves_by_itself = self._reader.is_terminal and options.saves_by_itself
        self._chats = {"main": chat}
        self._origins: dict[str, str] = {}  # {fork: the conversation that it was forked from}
        self._files: dict[str, Path] = {}  # {conversation: the file in which it is saved}
        self._name = "main"  # of the current conversation
        self._pictures: list[Picture] = []  # that go with the next message

    def close(self) -> None:
        for chat in self._chats.values():
            chat.close()

    def greet(self, model: str, resumed: Path | None = None) -> None:
        """Print the first line. `resumed`: the file of the saved conversation that is continued."""
        if resumed is not None:
            self._files[self._name] = resumed
        turns = len(self._chat.history) // 2
        before = f", {turns} turn{'' if turns == 1 else 's'} so far" if turns else ""
        more = ""
        if self._reader.is_terminal and not turns and self._saves.listed():
            more = " /resume lists earlier conversations."
        self._note(f"{model}{before}. /help lists the commands, /quit leaves.{more}")

    def talk(self) -> None:
        """Handle messages until the end of input, the second Ctrl-C at the prompt, or /quit."""
        for message in self._messages():
            try:
                self._take(message)
            except (InvalidRequest, RequestFailed, OSError) as error:
                self._say(error_line(error), "red")
            except KeyboardInterrupt:  # during a command; `_answer` handles its own
                self._note("stopped")
        if self._files:
            self._note("saved: `radixserve chat --resume` goes on with the last conversation")

    # -- a message ----------------------------------------------------------------------------

    def _messages(self) -> Iterator[str]:
        was_interrupted = False
        while True:
            try:
                message = self._reader.read(f"{self._name}> ")
            except (EOFError, KeyboardInterrupt) as ending:
                if isinstance(ending, EOFError) or was_interrupted:
                    return
                was_interrupted = True
                self._note("Ctrl-C again leaves")
                continue
            was_interrupted = False
            if message == "/quit":
                return
            if message:
                yield message

    def _take(self, message: str) -> None:
        named: list[Path] = []
        if not self._runtime.no_pictures:
            named, message = take_pictures(message)
        is_command = message.startswith("/") and "\n" not in message and not named
        if not is_command or message.startswith("//"):
            if self._reader.is_terminal and "\n" in message:
                self._note(f"({1 + message.count(chr(10)):,} lines as one message)")
            self._answer(self._said(named, message.removeprefix("/") if is_command else message))
            return
        name, _, rest = message[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "fork": self._fork,
            "switch": self._switch,
            "undo": self._undo,
            "tree": self._tree,
            "stats": self._stats,
            "save": self._save,
            "load": self._load,
            "image": self._image,
            "resume": self._resume,
            "help": self._help,
        }
        if name not in commands:
            similar = suggestion(f"/{name}", [f"/{known}" for known in commands])
            raise InvalidRequest(f"there is no command /{name}{similar}; /help lists them")
        commands[name](rest.strip())

    def _said(self, named: list[Path], text: str) -> str | dict[str, Any]:
        """A message with the pictures that belong to it. Raises InvalidRequest for a file that is
        not a picture; those of before stay."""
        pictures = [*self._pictures, *map(self._read_picture, named)]
        if not pictures:
            return text
        self._pictures = []
        parts: list[dict[str, Any]] = [{"type": "image", "image": one} for one in pictures]
        if text:
            parts.append({"type": "text", "text": text})
        return {"role": "user", "content": parts}

    def _read_picture(self, path: Path) -> Picture:
        pictures = self._runtime.pictures
        assert pictures is not None, "the model takes pictures"
        picture = pictures.read_part({"type": "image", "path": str(path)})
        self._note(
            f"picture: {path.name}, {picture.size[0]} x {picture.size[1]}, "
            f"{picture.num_rows} tokens, {picture.digest.hex()[:8]}"
        )
        return picture

    def _answer(self, text: str | dict[str, Any]) -> None:
        done, num_tokens, is_stopped = None, 0, False
        show = self._show_markdown if self._renders_markdown else self._show_plain
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                with one_interrupt(), without_echo():
                    for chunk in show(text):
                        num_tokens += len(chunk.token_ids)
                        done = chunk.completion
            except KeyboardInterrupt:
                is_stopped = True
        for note in notes:
            self._note(f"{note.message}")
        if done is not None:
            self._note_usage(done)
        elif is_stopped and num_tokens:
            self._note(f"stopped: the {num_tokens} tokens so far are kept; /undo takes them back")
        elif is_stopped:
            self._note("stopped before the first token: the message is taken back")
        self._autosave()

    def _show_plain(self, text: str | dict[str, Any]) -> Iterator[Chunk]:
        """Print the answer as it is. Yields each chunk after it was printed."""
        try:
            with contextlib.closing(self._chat.stream(text)) as chunks:
                for chunk in chunks:
                    print_escaped(self._console, chunk.text)
                    yield chunk
        except KeyboardInterrupt:
            print_escaped(self._console, " ...")
            raise
        finally:
            self._console.print()

    def _show_markdown(self, text: str | dict[str, Any]) -> Iterator[Chunk]:
        """Show the answer as markdown. Yields its chunks."""
        from radixserve.commands.chat_answer import AnswerView

        with (
            AnswerView(self._console, self._prefill_progress(text)) as view,
            contextlib.closing(self._chat.stream(text)) as chunks,
        ):
            for chunk in chunks:
                view.add(chunk.text)
                yield chunk

    def _prefill_progress(self, text: str | dict[str, Any]) -> Callable[[], str]:
        """A function that returns, for the user, how much of the prompt has been computed."""
        tokenizer, tokens = self._runtime.tokenizer, self._chat.tokens
        assert tokenizer is not None, "chats need one"
        if len(tokens):
            cached = self._runtime.lookup(tokens, self._params.namespace).cached_len
            new = [text if isinstance(text, str) else said(text["content"])]
        else:
            cached = 0
            new = [said(message["content"]) for message in self._chat.history]
            new.append(text if isinstance(text, str) else said(text["content"]))
        total = len(tokens) - cached + sum(len(tokenizer.encode(part)) for part in new)
        before = self._runtime.status().stats["prefilled_tokens"]
        began_at = time.monotonic()

        def progress() -> str:
            computed = self._runtime.status().stats["prefilled_tokens"] - before
            if not computed:
                return f"reading {total:,} tokens"
            rate = computed / (time.monotonic() - began_at)
            return f"reading {min(computed, total):,} of {total:,} tokens, {rate:,.0f} tokens/s"

        return progress

    def _note_usage(self, done: Completion) -> None:
        usage, metrics = done.usage, done.metrics
        cut = "cut at " if done.finish_reason == "length" else ""
        decode_s = metrics.total_s - (metrics.ttft_s or 0)
        rate = ""
        if usage.completion_tokens > 1 and decode_s > 0:
            rate = f", {(usage.completion_tokens - 1) / decode_s:.0f}/s"
        self._note(
            f"reused {usage.cached_tokens} + computed {usage.computed_tokens} = "
            f"{usage.prompt_tokens}, first token {format_seconds(metrics.ttft_s)}, "
            f"{cut}{usage.completion_tokens} tokens{rate}",
            no_wrap=True,
        )

    def _autosave(self) -> None:
        """Save the conversation in its own file. An error is printed once and ends autosaving."""
        if not self._saves_by_itself:
            return
        try:
            if self._name not in self._files:
                if not len(self._chat.tokens):
                    return
                self._files[self._name] = self._saves.new_path()
            self._saves.save(self._chat, self._files[self._name])
        except (OSError, InvalidRequest) as error:  # a chat with pictures is not JSON
            self._saves_by_itself = False
            self._files.clear()
            self._say(f"conversations are not saved: {error_line(error)}", "red")

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
            problem = f"there is no {name!r}" if name else "a name is missing: /switch NAME"
            raise InvalidRequest(f"{problem}; there are {', '.join(self._chats)}")
        self._name = name
        history = self._chat.history
        last = f", last said: {self._short(history[-1]['content'])}" if history else ""
        self._note(f"you are in {name} now{last}")

    def _undo(self, _: str) -> None:
        question = self._chat.undo()[0]["content"]
        self._note(f"taken back: {self._short(question)}")
        self._autosave()

    def _tree(self, _: str) -> None:
        for name in self._chats:
            self._note(self._line_about(name))
        tokenizer = self._runtime.tokenizer
        assert tokenizer is not None, "chats need one"
        dump = self._runtime.cache_tree(_MAX_NODES)
        decode = partial(tokenizer.decode, keep_special=True)
        show = partial(shown_text, decode=decode, pictures=self._runtime.pictures)
        self._console.print(draw_tree(dump, show, width=self._console.width))

    def _stats(self, _: str) -> None:
        stats = self._runtime.cache_stats()  # of the engine, so that stopped answers count too
        reused, computed = stats["reused_tokens"], stats["computed_tokens"]
        share = f" ({100 * reused / (reused + computed):.0f} %)" if reused + computed else ""
        self._note(self._line_about(self._name))
        self._note(
            f"prompts: {reused + computed:,} tokens, {reused:,} reused{share}, "
            f"{computed:,} computed; answers: {stats['generated_tokens']:,} tokens"
        )
        self._note(
            f"cache: {stats['pages_tree']:,} of {stats['pages_total']:,} pages of "
            f"{stats['page_size']} used, {stats['evicted_tokens']:,} tokens evicted"
        )

    def _save(self, path: str) -> None:
        self._chat.save(_given(path, "/save FILE"))
        self._note(f"saved: {path}")

    def _load(self, path: str) -> None:
        self._open(Path(_given(path, "/load FILE")))

    def _image(self, name: str) -> None:
        if self._runtime.no_pictures:
            raise InvalidRequest(self._runtime.no_pictures)
        path = picture_file(_given(name, "/image FILE")) or Path(name).expanduser()
        self._pictures.append(self._read_picture(path))

    def _resume(self, number: str) -> None:
        if number:
            path = self._saves.numbered(number).path
            if path in self._files.values():
                raise InvalidRequest("that conversation is open: /tree lists those, /switch NAME")
            self._files[self._open(path)] = path
            return
        listed = self._saves.listed()
        if not listed:
            self._note("no conversation with this model is saved")
        for index, saved in enumerate(listed, 1):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.saved_at))
            turns = f"{saved.num_turns} turn{'' if saved.num_turns == 1 else 's'}"
            self._note(f"{index:3}  {when}, {turns}: {self._short(saved.question)}")

    def _open(self, path: Path) -> str:
        """Open a saved conversation and switch to it. Returns its name here."""
        chat = self._runtime.load_chat(path, params=self._params)
        stem = "-".join(path.stem.split()) or "loaded"
        self._name = stem if stem not in self._chats else self._free_name(stem)
        self._chats[self._name] = chat
        self._note(f"you are in {self._name} now: {self._line_about(self._name)}")
        return self._name

    def _help(self, _: str) -> None:
        self._console.print(_HELP, markup=False)

    # -- state and output ---------------------------------------------------------------------

    @property
    def _chat(self) -> ChatSession:
        return self._chats[self._name]

    def _free_name(self, name: str) -> str:
        names = (f"{name}-{number}" for number in itertools.count(2))
        return next(free_name for free_name in names if free_name not in self._chats)

    def _line_about(self, name: str) -> str:
        chat = self._chats[name]
        num_turns = sum(message["role"] == "assistant" for message in chat.history)
        origin = f", fork of {self._origins[name]}" if name in self._origins else ""
        mark = "*" if name == self._name else " "
        return f"{mark} {name}: turns {num_turns}, tokens {len(chat.tokens):,}{origin}"

    def _short(self, content: object) -> str:
        return shorten(escape(said(content)), max(20, self._console.width - 40))

    def _note(self, text: str, *, no_wrap: bool = False) -> None:
        self._say(text, "dim", no_wrap=no_wrap)

    def _say(self, text: str, style: str, *, no_wrap: bool = False) -> None:
        """Print a line. In a terminal it wraps between words or, with `no_wrap`, is cut at the
        edge; in a pipe it is printed whole."""
        whole = not self._console.is_terminal
        layout: Any = {"no_wrap": no_wrap, "overflow": "ellipsis" if no_wrap else "fold"}
        if whole:
            layout = {"soft_wrap": True}
        self._console.print(text, style=style, markup=False, **layout)


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """A context manager in which the first Ctrl-C raises KeyboardInterrupt and later ones are
    ignored. In other threads than the main one, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _given(path: str, usage: str) -> str:
    if not path:
        raise InvalidRequest(f"a file is missing: {usage}")
    return path


def _read_template(name: str) -> str:
    try:
        return Path(as_path(name)).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text: {error}") from None
