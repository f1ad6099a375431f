"""Draws docs/img/architecture.svg: the packages of radixserve and the imports between them.

    python tools/draw_architecture.py [--output FILE]      # - is standard output

Packages and arrows are read from the sources, type-only imports included. The text of a package is
the first sentence of its docstring. A package is drawn above all packages that it imports, the
control plane on the left, the workers on the right. Imports of the records do not have an arrow,
nor do those that a longer path of arrows implies.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "docs" / "img" / "architecture.svg"
RECORDS = "records"  # the modules directly under radixserve/, which packages share
GROUND = "ground"  # those that the cache needs, too
_GROUND_MODULES = ("arrays", "checks", "errors")
KERNELS = "radixserve_kernels"
ORDER = (  # from left to right within a layer
    *(
        "commands",
        "server",
        "replay",
        "fleet",
        "recipes",
        "api",
        "kv_events",
        "adapters",
        "advice",
        "drafts",
        "epochs",
        "spans",
        "images",
        "engine",
        "admission_policies",
        "beams",
        "tenants",
        "hints",
        "scheduler",
        "cache",
        "cache_layers",
        "retention",
        "scores",
        "store",
        "text",
    ),
    *("runner", "models", "grammar", "attention", RECORDS, GROUND, KERNELS),
)
_CONTROL_PLANE = (
    *(
        "admission_policies",
        "beams",
        "tenants",
        "hints",
        "scheduler",
        "cache",
        "cache_layers",
        "retention",
        "scores",
        "store",
    ),
)
COLOURS = {
    **dict.fromkeys(_CONTROL_PLANE, "#dcebd8"),
    **dict.fromkeys(("runner", "models", "attention", KERNELS), "#d9e5f6"),
}
BOX_WIDTH, BOX_HEIGHT, GAP, LAYER = 270, 64, 36, 112  # pixels
LETTERS = 44  # characters of a line in a box


def package_of(module: str) -> str | None:
    """The box of a module; None for modules of other packages, for `radixserve` itself, and for
    the entry points."""
    first, _, rest = module.partition(".")
    if first == KERNELS:
        return KERNELS
    if first != "radixserve" or rest.split(".")[0] in ("", "cli", "__main__"):
        return None
    name = rest.split(".")[0]
    if name in _GROUND_MODULES:
        return GROUND
    return name if (ROOT / "radixserve" / name).is_dir() else RECORDS


def imported_modules(path: Path) -> Iterator[str]:
    """The modules that a file imports, in functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "radixserve":
            yield from (f"radixserve.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def read_imports() -> dict[str, set[str]]:
    """For each package, the packages that it imports."""
    imports: dict[str, set[str]] = {}
    for base in (ROOT, ROOT / "kernels"):
        for path in sorted((base).glob("radixserve*/**/*.py")):
            module = ".".join(path.relative_to(base).with_suffix("").parts)
            package = package_of(module)
            if package is not None and not module.endswith("__init__"):
                others = {package_of(name) for name in imported_modules(path)} - {None, package}
                imports.setdefault(package, set()).update(
                    other for other in others if other is not None
                )
    return imports


def purpose(package: str) -> str:
    """The first sentence of a package's docstring."""
    if package == RECORDS:
        return "config, request, schedule, output, decisions"
    if package == GROUND:
        return "arrays, checks, errors"
    folder = ROOT / "kernels" if package == KERNELS else ROOT / "radixserve"
    text = ast.get_docstring(ast.parse((folder / package / "__init__.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("`", "")


def layers(imports: dict[str, set[str]]) -> list[list[str]]:
    """Rows of packages from the top down; each package is above all that it imports."""
    level: dict[str, int] = {}
    for package in TopologicalSorter(imports).static_order():
        level[package] = 1 + max((level[other] for other in imports.get(package, ())), default=-1)
    rows = [
        [package for package in ORDER if level.get(package) == number]
        for number in range(max(level.values()) + 1)
    ]
    return rows[::-1]


def needed(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports to draw: without those that a longer path implies, and without those of the
    records and the ground."""
    below: dict[str, set[str]] = {}
    for package in TopologicalSorter(imports).static_order():
        direct = imports.get(package, ())
        below[package] = set().union(*(below[other] | {other} for other in direct))
    return [
        (package, other)
        for package, others in sorted(imports.items())
        for other in sorted(others - {RECORDS, GROUND})
        if not any(other in below[package_between] for package_between in others)
    ]


def svg() -> str:
    """The picture as text."""
    imports = read_imports()
    rows = layers(imports)
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) + GAP
    height = len(rows) * LAYER + GAP
    place = {}
    for level_number, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        for number, package in enumerate(row):
            place[package] = left + number * (BOX_WIDTH + GAP), GAP / 2 + level_number * LAYER
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" rx="8" fill="white"/>',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>',
    ]
    for package, other in needed(imports):
        (x, y), (to_x, to_y) = place[package], place[other]
        start, end = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2
        parts.append(
            f'<path d="M{start:.0f} {y + BOX_HEIGHT:.0f} C{start:.0f} {y + BOX_HEIGHT + 30:.0f} '
            f'{end:.0f} {to_y - 30:.0f} {end:.0f} {to_y:.0f}" fill="none" stroke="#667" '
            'stroke-width="1.3" marker-end="url(#head)"/>'
        )
    for package, (x, y) in place.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{COLOURS.get(package, "#f2f2ee")}" stroke="#456"/>'
            f'<text x="{x + 10:.0f}" y="{y + 20:.0f}" font-size="13" font-weight="bold">'
            f"{escape(package)}</text>"
        )
        for number, line in enumerate(wrap(purpose(package), LETTERS)[:2]):
            top = y + 38 + 15 * number
            parts.append(f'<text x="{x + 10:.0f}" y="{top:.0f}" fill="#333">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if str(args.output) == "-":
        print(svg(), end="")
    else:
        args.output.write_text(svg())


if __name__ == "__main__":
    main()
