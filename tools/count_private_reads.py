"""Prints where tests read private names of the packages.

`python tools/count_private_reads.py` prints each place and their number. A private name begins with
one underscore and is defined in `radixserve/` or `kernels/`. Counted are attributes of other
objects, attributes of `self` that no class of the test's file defines, imports, and names in the
strings of `setattr` and the like.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("radixserve", "kernels/radixserve_kernels")
LIMIT = 60  # tests/test_private_reads.py checks it
BY_STRING = {"setattr", "getattr", "delattr", "hasattr", "object"}  # the last one of `patch.object`
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, of every NamedTuple


def is_private(name: str) -> bool:
    is_marked = name.startswith("_") and not name.startswith("__") and len(name) > 1
    return is_marked and name not in OF_TUPLES


def defined_names(tree: ast.AST) -> set[str]:
    """Private functions, classes, module variables and attributes that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


def private_reads(tree: ast.AST, private: set[str]) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each read of a name in `private`."""
    own = defined_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            value = node.value
            is_own = isinstance(value, ast.Name) and value.id in ("self", "cls")
            if not (is_own and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("radixserve"):
            yield from ((node.lineno, a.name) for a in node.names if a.name in private)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for argument in node.args if called in BY_STRING else ():
                if isinstance(argument, ast.Constant) and argument.value in private:
                    yield node.lineno, str(argument.value)


def find() -> list[str]:
    """Returns "file:line: name" for each read in `tests/`."""
    private = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            private |= defined_names(ast.parse(path.read_text()))
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if private.isdisjoint(re.findall(r"\b_\w+", text)):
            continue  # nothing of it needs to be parsed
        reads = sorted(private_reads(ast.parse(text), private))
        found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in reads]
    return found


def main() -> None:
    found = find()
    print(*found, sep="\n")
    print(f"{len(found)} private reads, at most {LIMIT}")


if __name__ == "__main__":
    main()
