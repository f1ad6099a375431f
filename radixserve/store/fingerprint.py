"""The fingerprint of what computes K/V: the weights, and every setting that changes a bit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_CACHE = "fingerprints.json"  # of files, by path, size and time of change: large ones take seconds
_WEIGHTS = (".safetensors", ".bin", ".gguf")


def model_fingerprint(
    model: Path | None, name: str, settings: Mapping[str, object], cache_folder: Path
) -> str:
    """32 hexadecimal digits. Equal for equal weights wherever they lie.

    model     a checkpoint's folder or a GGUF file; None: `name` says all of it
    settings  what else decides the K/V: JSON values
    """
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(json.dumps(settings, sort_keys=True).encode())
    if model is None:
        hasher.update(name.encode())
        return hasher.hexdigest()
    files = [model] if model.is_file() else _files_of(model)
    known = _read_cache(cache_folder)
    for path in files:
        status = path.stat()
        times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
        key = f"{path.resolve()}:{status.st_ino}:{status.st_size}:{times}"
        if key not in known:
            with open(path, "rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        hasher.update(f"{path.name if model.is_dir() else ''}={known[key]}\n".encode())
    _write_cache(cache_folder, known)
    return hasher.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    """The config and the weights of a checkpoint."""
    files = [path for path in folder.iterdir() if path.suffix in _WEIGHTS]
    return sorted([*files, *folder.glob("config.json")])


def _read_cache(folder: Path) -> dict[str, str]:
    try:
        known = json.loads((folder / _CACHE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_cache(folder: Path, known: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as work:  # also removed where that fails
            file = Path(work, _CACHE)
            file.touch(0o600)
            file.write_text(json.dumps(known))
            os.replace(file, folder / _CACHE)
