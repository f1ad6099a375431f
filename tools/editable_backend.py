"""Setuptools' build backend, with editable installs that type checkers can follow.

The two packages of this project have different parent folders. For an editable install of such a
project, setuptools writes an import hook, which mypy, pyright and editors do not run. With this
backend, `pip install -e .` writes a .pth file with the folder `.editable/`, which contains a link
to each package. The checkout itself is not put on the path, since `import kernels` would then find
the folder of that name, and transformers would take it for the package `kernels` of PyPI.

Wheels and source archives are built by setuptools, as are editable installs on a system without
symbolic links.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all hooks except build_editable

PACKAGES = ("radixserve", "kernels/radixserve_kernels")  # folders, from the root of the checkout
LINKS = Path(".editable")
_HOOK = "__editable__"  # prefix of the names of setuptools' import hook files


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install. Returns its file name. Called in the checkout."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        folder = link_packages(Path.cwd())
    except (OSError, NotImplementedError):
        return name
    replace_hook(Path(wheel_directory, name), folder)
    return name


def link_packages(root: Path) -> Path:
    """Make the folder of links. Returns it. Raises OSError if links cannot be made."""
    folder = root / LINKS
    folder.mkdir(exist_ok=True)
    for package in PACKAGES:
        link = folder / Path(package).name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join(os.pardir, package), target_is_directory=True)
    return folder


def replace_hook(wheel: Path, folder: Path) -> None:
    """Replace setuptools' import hook in a wheel by a .pth file with `folder`."""
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
    """The digest of a file in the format of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"
