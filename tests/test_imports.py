"""The direction of imports, read from the sources: down only, type-only ones included."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.count_imports import (
    LIMITS,
    MOST_LINES_WITH_WORDS,
    PLUG_POINTS,
    closure,
    lines_with_words,
)

ROOT = Path(__file__).parent.parent

# From the ground up. A module may import from its own floor and from those below.
FLOORS = [
    ["radixserve._version", "radixserve.errors", "radixserve.arrays", "radixserve.daemon_call"],
    ["radixserve.checks", "radixserve.gguf_file"],
    ["radixserve.cache", "radixserve.sampling_fields", "radixserve.sampling_defaults"],
    ["radixserve.config", "radixserve.structured_outputs"],
    ["radixserve.picture"],
    ["radixserve.request"],
    ["radixserve.schedule", "radixserve.logits_digest", "radixserve.token_marks"],
    ["radixserve.output", "radixserve.reports"],
    ["radixserve.completion", "radixserve.decisions"],
    ["radixserve.cache_layers", "radixserve.retention", "radixserve_kernels"],
    ["radixserve.attention"],
    ["radixserve.scheduler", "radixserve.models", "radixserve.grammar"],
    [
        "radixserve.admission_policies",
        "radixserve.beams",
        "radixserve.runner",
        "radixserve.scores",
        "radixserve.tenants",
        "radixserve.text",
    ],
    ["radixserve.engine"],
    [
        "radixserve.adapters",
        "radixserve.advice",
        "radixserve.drafts",
        "radixserve.epochs",
        "radixserve.hints",
        "radixserve.images",
        "radixserve.kv_events",
        "radixserve.spans",
        "radixserve.store",
    ],
    ["radixserve.api"],
    ["radixserve.recipes"],
    ["radixserve"],  # the face, which names everything below it
    ["radixserve.fleet"],
    ["radixserve.replay"],
    ["radixserve.server"],
    ["radixserve.commands", "radixserve.cli", "radixserve.__main__"],
]
CONTROL_PLANE = (
    "radixserve.admission_policies",
    "radixserve.beams",
    "radixserve.cache",
    "radixserve.cache_layers",
    "radixserve.hints",
    "radixserve.retention",
    "radixserve.scheduler",
    "radixserve.scores",
    "radixserve.tenants",
    "radixserve.fleet.tree_router",
    "radixserve.fleet.token_index",
    "radixserve.fleet.index_node",
    "radixserve.fleet.autoscaling",
)
SATELLITES = (
    "adapters",
    "admission_policies",
    "advice",
    "beams",
    "cache_layers",
    "drafts",
    "engine.trace_recorder",
    "epochs",
    "hints",
    "images",
    "kv_events",
    "retention",
    "scores",
    "spans",
    "store",
    "tenants",
)
WORKERS = ("radixserve.runner", "radixserve.models", "radixserve.attention", "radixserve_kernels")
LIGHT = {"numpy", "sortedcontainers"}  # what the control plane may import from elsewhere
LAZY = {"xxhash"}  # what it may import inside a function, where somebody asks for it


def modules() -> dict[str, Path]:
    found = {}
    for base in (ROOT, ROOT / "kernels"):
        for package in ("radixserve", "radixserve_kernels"):
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports(name: str, *, at_load: bool = False) -> set[str]:
    """Every module that `name` imports anywhere, in functions and for types only too.

    With `at_load` those in functions are left out.
    """
    found = set()
    nodes: list[ast.AST] = [ast.parse(MODULES[name].read_text())]
    while nodes:
        node = nodes.pop()
        if not at_load or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            known = inner & set(MODULES)
            found |= known or {node.module}
    return found


def belongs(name: str, package: str) -> bool:
    return name == package or (package != "radixserve" and name.startswith(package + "."))


def floor(name: str) -> int:
    for level, packages in enumerate(FLOORS):
        if any(belongs(name, package) for package in packages):
            return level
    raise AssertionError(f"{name} has no floor: add it to FLOORS")


def ours(name: str) -> set[str]:
    packages = ("radixserve", "radixserve_kernels")
    return {other for other in imports(name) if other.split(".")[0] in packages}


def test_imports_go_down_only() -> None:
    for name in MODULES:
        for other in ours(name):
            assert floor(other) <= floor(name), f"{name} imports {other}, which lies above it"


def test_the_rooms_of_the_server_import_down_only() -> None:
    server = "radixserve.server"
    rooms = [f"{server}.{room}" for room in ("wire", "answer", "gate", "prompt", "turn", "routes")]
    for level, room in enumerate(rooms):
        for name in (name for name in MODULES if belongs(name, room)):
            above = {o for o in ours(name) if any(belongs(o, p) for p in rooms[level + 1 :])}
            assert not above, f"{name} imports {above}, which lie above it"


def test_there_is_no_ring() -> None:
    TopologicalSorter({name: ours(name) - {name} for name in MODULES}).prepare()


def test_the_engine_imports_none_of_its_extensions() -> None:
    """Nor a policy or a layer: neither directly nor through others, types included."""
    reached, new = set[str](), {"radixserve.engine.engine", "radixserve.engine.engine_thread"}
    while new:
        reached |= new
        new = {other for name in new for other in ours(name) if other in MODULES} - reached
    satellites = [f"radixserve.{name}" for name in SATELLITES]
    for name in reached:
        assert not any(belongs(name, satellite) for satellite in satellites), name


def test_the_core_names_features_only_where_they_plug_in() -> None:
    found = lines_with_words()
    assert found.keys() <= PLUG_POINTS.keys(), found
    assert sum(map(len, found.values())) <= MOST_LINES_WITH_WORDS, found


def test_recipes_are_programs_over_the_api() -> None:
    """They import the API, records and checks, and touch no private attribute of another object."""
    records = floor("radixserve.decisions")
    for name in (name for name in MODULES if belongs(name, "radixserve.recipes")):
        for other in ours(name):
            allowed = ("radixserve.api", "radixserve.recipes", "radixserve.text")
            is_open = any(belongs(other, package) for package in allowed)
            assert is_open or floor(other) <= records, f"{name} imports {other}"
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not any(alias.name.startswith("_") for alias in node.names), name
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert is_own, f"{name}:{node.lineno} reads {node.attr}"


def test_control_plane_and_workers_do_not_import_each_other() -> None:
    for name in MODULES:
        for mine, theirs in ((CONTROL_PLANE, WORKERS), (WORKERS, CONTROL_PLANE)):
            if any(belongs(name, package) for package in mine):
                crossing = {o for o in ours(name) if any(belongs(o, p) for p in theirs)}
                assert not crossing, f"{name} imports {crossing}"


def test_kernels_do_not_import_radixserve() -> None:
    for name in MODULES:
        if belongs(name, "radixserve_kernels"):
            assert not any(
                belongs(o, "radixserve") or o.startswith("radixserve.") for o in ours(name)
            )


def test_the_control_plane_needs_only_numpy_and_sortedcontainers() -> None:
    standard = sys.stdlib_module_names
    for name in MODULES:
        if any(belongs(name, package) for package in CONTROL_PLANE):
            for at_load, allowed in ((True, LIGHT), (False, LIGHT | LAZY)):
                tops = {other.split(".")[0] for other in imports(name, at_load=at_load)}
                foreign = tops - standard - {"radixserve"}
                assert foreign <= allowed, f"{name} imports {foreign - allowed}"


def test_the_control_plane_imports_with_torch_blocked() -> None:
    code = """
import sys
for blocked in ("torch", "transformers", "safetensors", "tqdm", "rich", "tokenizers", "xxhash"):
    sys.modules[blocked] = None
import radixserve
from radixserve.cache import HashBlockCache, RadixCache
from radixserve.scheduler import Scheduler
from radixserve import SamplingParams, EngineConfig, RadixServeError, Completion
import radixserve.engine.engine
Scheduler(RadixCache(10))
Scheduler(HashBlockCache(10))
assert radixserve.__version__
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_cache_runs_where_numpy_and_sortedcontainers_are_all_that_is_installed() -> None:
    """The README's example of the cache as a library."""
    section = (
        (ROOT / "README.md").read_text().split("\n## The cache as a library\n")[1].split("\n## ")[0]
    )
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    code = f"""
import sys
allowed = sys.stdlib_module_names | {{"radixserve", "numpy", "sortedcontainers"}}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
{example}
cache.check()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_replay_needs_no_torch() -> None:
    for name in MODULES:
        if belongs(name, "radixserve.replay"):
            crossing = {o for o in ours(name) if any(belongs(o, p) for p in WORKERS)}
            assert not crossing, f"{name} imports {crossing}"
    code = """
import sys
for blocked in ("torch", "transformers", "safetensors", "tqdm", "matplotlib", "tokenizers"):
    sys.modules[blocked] = None
import radixserve.replay, radixserve.engine.trace_recorder, radixserve.replay.plots
from radixserve.cli import main
try:
    main(["replay", "--help"])
except SystemExit as leaving:
    assert not leaving.code
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_face_is_sorted_and_complete() -> None:
    import radixserve

    assert radixserve.__all__ == sorted(radixserve.__all__)
    for name in radixserve.__all__:
        assert getattr(radixserve, name) is not None
    assert set(radixserve.__all__) <= set(dir(radixserve))


def test_there_is_no_package_called_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    picture = subprocess.run(
        [sys.executable, "tools/draw_architecture.py", "--output", "-"],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    drawn = (ROOT / "docs" / "img" / "architecture.svg").read_text()
    assert picture == drawn, "run python tools/draw_architecture.py"


def test_files_named_in_the_architecture_page_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([\w/]+\.(?:py|h|md))`", text))
    kernels = ROOT / "kernels" / "radixserve_kernels" / "cpu"
    homes = (ROOT, ROOT / "radixserve", kernels)
    missing = {name for name in names if not any((home / name).exists() for home in homes)}
    assert not missing


@pytest.mark.parametrize("module", LIMITS)
def test_the_core_loads_few_lines(module: str) -> None:
    """The tool's own limits: what plugs into the core is not loaded with it."""
    assert closure(module).num_lines <= LIMITS[module]


def test_the_cache_loads_nothing_but_itself_and_the_ground() -> None:
    allowed = {"radixserve", "_version", "arrays", "cache", "checks", "errors"}
    loaded = closure("radixserve.cache").modules
    others = {name for name in loaded if name.split(".")[:2][-1] not in allowed}
    assert not others
    assert not any(".hash" in name for name in loaded)
