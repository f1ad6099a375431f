"""`CommandParser`: argparse with errors of two lines, which name an unknown option first."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Options are given in full; an error does not print the usage, which --help does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is not None and self._subparsers is None:  # those of a command
            self._check_names(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what is possible\n")

    def _check_names(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for one in args:
            if one == "--":
                return
            name = one.partition("=")[0]
            if name.startswith("--") and name not in known:
                similar = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {similar[0]}?" if similar else ""
                self.error(f"unknown option {name}{hint}")
