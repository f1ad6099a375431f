"""What is installed is what is in the tree: packages, the demo model, the kernels' sources."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
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


def test_an_installed_copy(tmp_path: Path) -> None:
    """Not from the tree: a wheel, unpacked where nothing else is; the demo model answers."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("radixserve", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
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
