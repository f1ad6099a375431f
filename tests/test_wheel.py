"""What is installed is what is in the tree: packages, the demo model, the kernels' sources.

The types of an editable install are seen by mypy and pyright.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "radixserve": ROOT / "radixserve",
    "radixserve_kernels": ROOT / "kernels/radixserve_kernels",
}
INSTALLED = """
import sys
from pathlib import Path
import radixserve, radixserve_kernels.cpu_library as library
from radixserve import Runtime
from radixserve_kernels.cpu_ops import unsupported_reason
import torch
home = Path(sys.argv[1])
assert Path(radixserve.__file__).is_relative_to(home), radixserve.__file__
assert library.SOURCES.is_relative_to(home)
with Runtime("demo", num_pages=200) as runtime:
    assert runtime.attention_backend == ("torch" if unsupported_reason(torch.float32) else "cpu")
    print(len(runtime.generate([1, 2, 3]).token_ids) > 0)
"""


def files_of_the_tree() -> set[str]:
    """As they must be named in a wheel."""
    found = set()
    for name, folder in SOURCES.items():
        paths = (path for path in folder.rglob("*") if path.is_file())
        found |= {str(name / path.relative_to(folder)) for path in paths}
    return {path for path in found if "__pycache__" not in path and not path.endswith(".pyc")}


def test_every_folder_is_a_package_that_is_listed() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options"]["packages"].split()
    packages = {
        str(Path(path).parent).replace("/", ".")
        for path in files_of_the_tree()
        if path.endswith("__init__.py")
    }
    assert sorted(packages) == listed


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, as far as the Dockerfile copies it to install it."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("tree")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line.startswith("COPY "):
            continue
        *names, target = line.split()[1:]
        folder = tree / Path(target).relative_to("/src")
        for name in names:
            assert f"!{name}" in ignored, name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder, ignore=left_out)
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder)
    return tree


def test_an_installed_copy(tree: Path, tmp_path: Path) -> None:
    """Not from the tree: a wheel, unpacked where nothing else is; the demo model answers."""
    pytest.importorskip("pip")
    command = ["-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "home"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(home)
    assert names == files_of_the_tree()
    run = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(home)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "True\n", run.stderr


BUILD = "import editable_backend, sys; print(editable_backend.build_editable(sys.argv[1]))"
WHERE = """
from importlib.util import find_spec
names = "radixserve radixserve_kernels kernels tools tests".split()
print([name for name in names if find_spec(name)])
"""
SCRIPT = """
from radixserve import Runtime, SamplingParams

with Runtime("demo") as rt:
    out = rt.generate("The json module", SamplingParams(max_tokens=8))
    count: int = out.usage.cached_tokens
    wrong: int = out.text
    out.no_such_attribute
    rate: float = rt.cache_stats()["hit_rate"]
    rt.cache_stats()["no_such_key"]
Runtime("demo", cache="radix", dtype="float32")
Runtime("demo", cache="radish")
"""


@pytest.fixture(scope="module")
def environment(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it but an editable install; returns its Python."""
    wheels, home = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(wheels)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "tools")},
        capture_output=True,
        check=True,
    )
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        recorded = {line.partition(",")[0] for line in archive.read(record).decode().splitlines()}
        assert recorded == set(archive.namelist())
    return home / "bin" / "python"


def test_an_editable_install_has_no_more_than_the_two_packages(
    environment: Path, tree: Path, tmp_path: Path
) -> None:
    """`kernels` above all, which is a folder of the checkout and a package of the index."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [environment, "-c", WHERE], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert done.stdout == "['radixserve', 'radixserve_kernels']\n", done.stderr
    for package in SOURCES:
        assert (tree / ".editable" / package).resolve().is_relative_to(tree.resolve())


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_see_an_editable_install(
    checker: str, environment: Path, tmp_path: Path
) -> None:
    """The four wrong lines of a user's script are errors, the others are not."""
    command = [sys.executable, "-m", checker]
    probe = subprocess.run([*command, "--version"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"{checker} does not run: pip install {checker}")
    option = {"mypy": "--python-executable", "pyright": "--pythonpath"}[checker]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*command, option, str(environment), str(script)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    expected = [(7, '"str"'), (8, "no_such_attribute"), (10, "TypedDict"), (12, "radish")]
    for error, (line, words) in zip(errors, expected, strict=True):
        assert f":{line}:" in error
        assert words in error
