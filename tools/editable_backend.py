"""Setuptools' build backend, with editable installs that type checkers can follow.

The two packages of this project lie under two roots. Setuptools installs such a project editable by
an import hook, which neither mypy nor pyright nor an editor runs. Here `pip install -e .` writes a
.pth file with one folder, `.editable/`, which holds a link to each package. The checkout itself
is never put on the path: `import kernels` would then find the folder of that name, which
transformers takes for the package `kernels` of the index.

Wheels and source archives are setuptools' own. On a system without symbolic links, so is an
editable install.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all hooks but the one below

PACKAGES = ("radixserve", "kernels/radixserve_kernels")  # folders, from the root of the checkout
LINKS = Path(".editable")
_HOOK = "__editable__"  # how the names of setuptools' own files begin


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install; returns its file name. Runs in the checkout."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        folder = link_packages(Path.cwd())
    except (OSError, NotImplementedError):
        return name
    replace_hook(Path(wheel_directory, name), folder)
    return name


def link_packages(root: Path) -> Path:
    """Make the folder of links; returns it. Raises OSError where links cannot be made."""
    folder = root / LINKS
    folder.mkdir(exist_ok=True)
    for package in PACKAGES:
        link = folder / Path(package).name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join(os.pardir, package), target_is_directory=True)
    return folder


def replace_hook(wheel: Path, folder: Path) -> None:
    """Put a .pth file with `folder` into a wheel in place of setuptools' import hook."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    kept = {
        name: data for name, data in files.items() if name != record and not name.startswith(_HOOK)
    }
    kept["radixserve.pth"] = f"{folder}\n".encode()
    lines = [f"{name},{_digest(data)},{len(data)}\n" for name, data in kept.items()]
    kept[record] = "".join([*lines, f"{record},,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in kept.items():
            archive.writestr(name, data)


def _digest(data: bytes) -> str:
    """As a wheel's RECORD has it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"
