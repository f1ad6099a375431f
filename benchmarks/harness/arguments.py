"""The command line of a benchmark, by the defaults of its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT: dict[str, Any] = {"json": False, "save": Path}  # a JSON document; a folder for .md, .json
RUN = {"threads": 1, "repeats": int, "quick": False, **REPORT}  # of benchmarks that open engines
REPEATS, QUICK_REPEATS = 3, 1


@dataclass(frozen=True)
class Names:
    """An option that takes some of the `known` names, between commas; `what` they name."""

    what: str
    known: Collection[str]
    default: Sequence[str] | None = None  # None: all


def parse(
    doc: str | None,
    given: Sequence[str] | None = None,
    *,
    required: Collection[str] = (),
    check: Callable[[argparse.Namespace], str] = lambda _: "",
    **options: Any,
) -> argparse.Namespace:
    """An option for each name: a number or a text is its default, False makes a flag, a type takes
    such a value or is None, a list takes several between commas, a tuple holds the choices, the
    default first.

    doc: the command's, which explains them. check: what is wrong with the values, "" for nothing.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in options.items():
        settings: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            settings = {"action": "store_true"}
        elif isinstance(default, type):
            settings = {"type": default, "required": name in required}
        elif isinstance(default, list):
            settings = {"type": _list_of(type(default[0]) if default else int), "default": default}
        elif isinstance(default, tuple):
            settings = {"choices": default, "default": default[0]}
        elif isinstance(default, Names):
            names = default.known if default.default is None else default.default
            settings = {"default": ",".join(names), "metavar": "NAMES"}
        parser.add_argument("--" + name.replace("_", "-"), **settings)
    args = parser.parse_args(given)
    for name, default in options.items():
        if isinstance(default, Names):
            names = [item for item in getattr(args, name).split(",") if item]
            if unknown := sorted(set(names) - set(default.known)):
                known = ", ".join(default.known)
                parser.error(f"no such {default.what}: {', '.join(unknown)}; there are {known}")
            setattr(args, name, names)
    if options.get("repeats") is int and args.repeats is None:
        args.repeats = QUICK_REPEATS if args.quick else REPEATS
    for name in ("threads", "repeats"):
        if isinstance(count := getattr(args, name, None), int) and count < 1:
            parser.error(f"--{name} must be at least 1")
    if complaint := check(args):
        parser.error(complaint)
    return args


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return [kind(item) for item in text.split(",") if item]

    read.__name__ = f"list of {kind.__name__}"  # for argparse's errors
    return read
