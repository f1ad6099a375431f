"""`CommandParser`: argparse with --help and --help-all, filled text, and errors of two lines."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from radixserve.checks import suggestion

MAX_WIDTH = 100  # columns of a help page


class CommandParser(argparse.ArgumentParser):
    """A parser that does not accept abbreviated options.

    --help leaves out options that were marked with `mark_rare`; --help-all lists all. An error does
    not print the usage, but names the wrong option or command, and a similar one.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**{**options, "allow_abbrev": False})
        self._rare: list[argparse.Action] = []
        self._help_all = self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )

    def mark_rare(self, actions: Iterable[argparse.Action]) -> None:
        """List options only in --help-all."""
        self._rare += actions
        self._help_all.help = f"show {len(self._rare)} more options and exit"

    def format_help(self) -> str:
        """The page of --help."""
        helps = [action.help for action in self._rare]
        for action in self._rare:
            action.help = argparse.SUPPRESS
        try:
            return self.format_full_help()
        finally:
            for action, text in zip(self._rare, helps, strict=True):
                action.help = text

    def format_full_help(self) -> str:
        """The page of --help-all. The usage has positional arguments only."""
        if self._subparsers is None:
            names = [self._positional(action) for action in self._get_positional_actions()]
            self.usage = " ".join(["%(prog)s [OPTIONS]", *names])
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is not None:
            if self._subparsers is None:  # the parser of a command
                self._check_options(args)
            else:
                self._check_command(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what is possible\n")

    @staticmethod
    def _positional(action: argparse.Action) -> str:
        name = str(action.metavar or action.dest)
        suffix = " ..." if action.nargs in ("+", "*") else ""
        return f"[{name}]{suffix}" if action.nargs in ("?", "*") else name + suffix

    def _check_options(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for arg in args:
            if arg == "--":
                return
            name = arg.partition("=")[0]
            if name.startswith("--") and name not in known:
                self.error(f"unknown option {name}{suggestion(name, known)}")

    def _check_command(self, args: Sequence[str]) -> None:
        assert self._subparsers is not None
        (commands,) = self._subparsers._group_actions
        name = next((arg for arg in args if not arg.startswith("-")), None)
        assert commands.choices is not None
        if name is not None and name not in commands.choices:
            names = list(commands.choices)
            hint = suggestion(name, names)
            self.error(f"there is no command {name!r}{hint}; commands: {', '.join(names)}")


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width. A paragraph with an indented line is kept as it
    is."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (
            part
            if re.search("^ ", part, re.MULTILINE)
            else "\n".join(self._split_lines(part, width))
            for part in text.strip("\n").split("\n\n")
        )
        return textwrap.indent("\n\n".join(paragraphs), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Split a text into lines between words only, so that options and settings stay whole."""
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


class _HelpAll(argparse.Action):
    """Prints the page with all options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser.format_full_help(), end="")
        parser.exit()
