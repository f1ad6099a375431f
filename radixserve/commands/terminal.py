"""Common parts of commands: the console, messages typed in it, and numbers as text."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.api.tree_view import escape

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console

PARTS = ("schedule", "prepare", "forward", "sample", "commit")  # of a step's time
_PIPED_WIDTH = 100


def make_console() -> Console:
    """A console on standard output. In a pipe, it has no colours and 100 columns."""
    from rich.console import Console

    fixed = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return Console(highlight=False, soft_wrap=False, width=fixed)


class MessageReader:
    """Reads messages from standard input.

    In a terminal, messages are typed with a line editor, and a pasted text of several lines is one
    message. Otherwise each line is a message.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._session: PromptSession[str] | None = None

    def read(self, prompt: str) -> str:
        """The next message without white space around it. Raises EOFError at the end of input,
        KeyboardInterrupt on Ctrl-C."""
        if not self.is_terminal:
            return input("").strip()
        if self._session is None:
            from prompt_toolkit import PromptSession

            self._session = PromptSession()
        return self._session.prompt(prompt).strip()


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """A context manager in which typed keys, ^C included, are not shown, since they would disturb
    the output. They remain in the input."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    settings = termios.tcgetattr(sys.stdin.fileno())
    quiet = list(settings)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, settings)


def error_line(error: Exception) -> str:
    """An error as one line; an OSError with its file."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())


def print_escaped(console: Console, text: str) -> None:
    """Print a piece of a model's text, with the terminal's control characters as escapes."""
    lines = (escape(line) for line in text.replace("\t", "    ").split("\n"))
    console.print("\n".join(lines), end="", markup=False, soft_wrap=True)


def format_seconds(seconds: float | None) -> str:
    """0.0123 -> "12 ms"."""
    if seconds is None:
        return "none"
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_profile(stats: Mapping[str, Any]) -> str:
    """The milliseconds per step of each part, and of all parts outside the forward pass, as text.

    `stats`: from `Runtime.cache_stats()`. With overlap, the parts add up to more than the time that
    passed.
    """
    steps = int(stats["steps"])
    seconds = {part: stats[f"{part}_s"] for part in PARTS}
    total = sum(seconds.values())
    if not steps or not total:
        return "0 steps"
    each = ", ".join(f"{part} {spent / steps * 1e3:.3f}" for part, spent in seconds.items())
    host, overlapped = total - seconds["forward"], stats.get("overlapped_s", 0.0)
    beside = ""
    if overlapped:
        beside = f", {overlapped / steps * 1e3:.3f} of it overlapped with another step"
    return (
        f"{steps} steps, {total:.3f} s; ms a step: {each}; outside the forward pass "
        f"{host / steps * 1e3:.3f} ({host / total:.1%}){beside}"
    )


def as_path(name: str) -> str:
    """The path of a file that the command line names. For "-", a copy of standard input, which is
    deleted at exit."""
    if name != "-":
        return name
    with tempfile.NamedTemporaryFile(prefix="standard input ", delete=False) as copy:
        atexit.register(Path(copy.name).unlink, missing_ok=True)  # also if reading is interrupted
        copy.write(sys.stdin.buffer.read())
    return copy.name
