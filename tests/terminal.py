"""A program in a pseudo-terminal, driven as a person would."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from typing import Self

PATIENCE_S = 120.0
_VARIABLES = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # the test reports no cursor
# The terminal's Ctrl-C is a signal, also where the tests run in the background of a shell, which
# ignores it. In a process of its own: a fork of this one, which has threads, may not run Python.
_TAKE_TERMINAL = """\
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r|\x07")


class Terminal:
    """Runs a command in a terminal of `columns` and 24 lines; a context manager that ends it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80
    ) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, **_VARIABLES, **environment},
            start_new_session=True,
        )
        os.close(slave)
        self.printed = b""
        self._num_read = 0  # bytes before which `wait_for` does not look

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """As from the keyboard; Enter is "\\r", Ctrl-C "\\x03"."""
        os.write(self._master, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal with bracketed paste does."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait_for(self, pattern: str) -> str:
        """What is printed from now, or the last match, up to the end of a match of the regular
        expression; without control sequences. AssertionError after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = _CONTROLS.sub("", self.printed[self._num_read :].decode(errors="replace"))
            if re.search(pattern, text):
                self._num_read = len(self.printed)
                return text
            assert time.monotonic() < deadline, f"no {pattern!r} in {text!r}"
            assert self._read(), f"the program ended without {pattern!r}: {text!r}"

    def exit_code(self) -> int:
        """When it has ended by itself; AssertionError after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.printed[-500:]!r}"
        return self._process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Take what is printed; False at the end."""
        if not select.select([self._master], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # all that had the terminal open have ended
            return False
        self.printed += data
        return bool(data)
