"""The help of every command, as a file: `python -m tests.help_pages` writes it at 80 columns."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from radixserve.cli import main

GOLDEN = Path(__file__).parent / "help-pages.txt"
COMMANDS = (
    *("demo", "chat", "generate", "serve", "pull", "list", "rm", "replay", "verify", "cache"),
    "info",
)


def help_pages() -> str:
    """`radixserve --help`, then --help and --help-all of each command."""
    pages = [["--help"]]
    for command in COMMANDS:
        pages += [[command, "--help"], [command, "--help-all"]]
    return "\n".join(f"$ radixserve {' '.join(page)}\n{_page(page)}" for page in pages)


def _page(arguments: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(arguments)
    return printed.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    GOLDEN.write_text(help_pages())
