"""Prints what the core's packages load: modules and lines by import, and words of features.

`python tools/count_imports.py` prints a row for each of `LIMITS`: the modules and lines of ours
that a fresh Python loads with it, and the lines that it may load. `--words` prints each line of the
core's files that names a feature, after the plug point that the file defines for it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

LIMITS = {  # lines that may be loaded; tests/test_imports.py checks them
    "radixserve.cache": 5_500,
    "radixserve.scheduler": 9_000,
    "radixserve.engine.engine": 10_500,
}
CORE = ("cache/*.py", "cache/radix/*.py", "scheduler/*.py", "engine/engine.py", "schedule.py")
# Beginnings of words. "Stored" is the field's word for a cached page, "store" a feature.
WORDS = ("beam", "tenant", "pric", "hint", "lease", "window", "checkpoint", "connector")
WORDS += (r"stores?(?![a-z])",)
PLUG_POINTS = {  # files that may name features, and what they define
    "cache/namespace.py": "the key of all that shares K/V; its first field is the tenant",
    "cache/lookup.py": "the reasons of a miss, those of layers beside K/V too; what a store has",
    "cache/stats.py": "the figures of a retention policy",
    "cache/snapshot.py": "the owners of pages that a snapshot shows",
    "cache/interface.py": "`open_session`, whose sessions may have leases",
    "cache/radix/radix_cache.py": "`open_session`",
    "cache/radix/retention.py": "`RetentionPolicy`",
    "scheduler/sessions.py": "sessions by name",
    "engine/engine.py": "`open_session`",
    "schedule.py": "columns of a step for layers beside K/V, and candidates of beams",
}
MOST_LINES_WITH_WORDS = 56  # in all of them; tests/test_imports.py checks it
_LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
for name, module in sorted(sys.modules.items()):
    is_ours = name.split(".")[0] in ("radixserve", "radixserve_kernels")
    if is_ours and getattr(module, "__file__", None):
        print(name, module.__file__)
"""


class Closure(NamedTuple):
    """What importing a module loads of this repository."""

    modules: dict[str, Path]

    @property
    def num_lines(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.modules.values())


def closure(module: str) -> Closure:
    """Import a module in a new process and read what was loaded."""
    command = [sys.executable, "-c", _LOADED, module]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = (line.split(" ", 1) for line in printed.splitlines())
    return Closure({name: Path(path) for name, path in rows})


def lines_with_words() -> dict[str, list[str]]:
    """Returns "number: text" of the lines that have one of `WORDS`, by file of the core."""
    pattern = re.compile("|".join(rf"(?<![a-z]){word}" for word in WORDS), re.IGNORECASE)
    package, found = ROOT / "radixserve", dict[str, list[str]]()
    for path in sorted(path for glob in CORE for path in package.glob(glob)):
        lines = enumerate(path.read_text().splitlines(), 1)
        if named := [f"{number}: {line.strip()}" for number, line in lines if pattern.search(line)]:
            found[str(path.relative_to(package))] = named
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--words", action="store_true", help="print lines that name features")
    parser.add_argument("--list", action="store_true", help="print the modules that are loaded")
    args = parser.parse_args()
    for module, limit in LIMITS.items():
        loaded = closure(module)
        print(
            f"{module:28} {len(loaded.modules):4} modules {loaded.num_lines:7,} lines <= {limit:,}"
        )
        if args.list:
            for name, path in loaded.modules.items():
                print(f"  {name:50} {len(path.read_text().splitlines()):6,}")
    for name, lines in lines_with_words().items() if args.words else ():
        print(f"\n{name}: {PLUG_POINTS.get(name, 'NO PLUG POINT')}", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
