"""Checkpoint folders as `save_pretrained` and the hub write them: config, tensors, end tokens.

Reads; knows nothing of what a model does with its tensors.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixserve.errors import InvalidRequest, ModelNotSupported

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMED = 6  # tensors named in an error message
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_checkpoint(model_path: str) -> Path:
    """The folder of a checkpoint: `model_path` itself, or the hub id's snapshot.

    Raises InvalidRequest if there is none or it has no config.json.
    """
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        folder = _download(model_path)
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"{folder} is not a model: it has no config.json")
    return folder


def _download(model_id: str) -> Path:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_id) or model_id.startswith("."):
        raise InvalidRequest(f"{model_id!r} is neither a folder nor a hub id such as 'owner/name'")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequest(
            f"{model_id!r} is not a folder, and the hub has no model of that name "
            f"or cannot be reached: {reason}"
        ) from error


def load_config(folder: Path) -> Any:
    """The checkpoint's transformers config, old rope fields normalised. Runs no foreign code."""
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    if "model_type" not in raw:
        raise ModelNotSupported(f"{folder / 'config.json'} names no model_type")
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelNotSupported(
            f"transformers cannot read the config of model type {raw['model_type']!r}: {error}"
        ) from error


def architecture_of(config: Any) -> str:
    """The first of config.json's architectures. Raises ModelNotSupported if it names none."""
    names = getattr(config, "architectures", None)
    if not names:
        raise ModelNotSupported("config.json names no architecture")
    return str(names[0])


def read_eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens of generation_config.json, or of config.json where it names none; ascending."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    found = {int(i) for i in (ids if isinstance(ids, list | tuple) else (ids,))}
    return tuple(sorted(i for i in found if i >= 0))


def choose_dtype(asked: str, config: Any, device: torch.device) -> torch.dtype:
    """The asked dtype; "auto" is the checkpoint's own, and on a CPU float32 for float16."""
    own = getattr(config, "dtype", None)
    name = str(own).removeprefix("torch.") if asked == "auto" else asked
    if name in ("float16", "half") and device.type != "cpu":
        return torch.float16
    if name in ("None", "float16", "half", "float64"):
        return torch.float32
    if name not in _DTYPES:
        raise ModelNotSupported(
            f"the checkpoint's dtype {name} cannot be run; ask for float32 or bfloat16"
        )
    return _DTYPES[name]


def check_sliding_window(config: Any) -> None:
    """Raise ModelNotSupported if any layer may not attend to all earlier positions.

    A window that holds every position the model has is none.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            raise ModelNotSupported(f"layers of type {', '.join(others)} (full attention only)")
        return
    is_used = bool(window) and getattr(config, "use_sliding_window", True)
    if is_used and window < config.max_position_embeddings:
        raise ModelNotSupported(f"sliding window attention over {window} positions")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InvalidRequest if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path} must hold a JSON object")
    return data


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index if it has one.

    Raises ModelNotSupported if there are none, or only pickled weights; InvalidRequest if the index
    names a file that is not there.
    """
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise InvalidRequest(f"{INDEX_FILE} names files that are missing: {missing or 'none'}")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ModelNotSupported(
            f"{folder} has pickled weights only (.bin); convert them to safetensors, for example "
            "with transformers' save_pretrained"
        )
    raise ModelNotSupported(f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}")


class TensorReader(ABC):
    """Takes a checkpoint's tensors by name, in a dtype, and records what was wrong.

    `take` never raises for a bad tensor, so that `finish` can name all of them at once; it returns
    zeros instead, which are never used. See `TensorSource`.
    """

    def __init__(
        self, where: Path, names: Iterable[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """where: the file or folder that errors name; names: of all its tensors."""
        self.num_parameters = 0  # elements taken so far
        self._where, self._dtype, self._device = where, dtype, device
        self._names = frozenset(names)
        self._unused = set(self._names)
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def skip(self, pattern: str) -> None:
        """Tensors whose whole name matches the regular expression may be left untaken."""
        self._unused = {name for name in self._unused if not re.fullmatch(pattern, name)}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape, converted to the reader's dtype."""
        self._unused.discard(name)
        if name not in self:
            self._missing.append(name)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        tensor = self._read(name)
        self.num_parameters += tensor.numel()
        if tuple(tensor.shape) != shape:
            self._wrong.append(f"{name} is {list(tensor.shape)} and must be {list(shape)}")
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            self._wrong.append(f"{name} is {tensor.dtype}: quantized checkpoints cannot be run")
        return tensor.to(self._device, self._dtype)

    def finish(self) -> None:
        """Raise ModelNotSupported naming every missing, wrongly shaped or unexpected tensor."""
        complaints = [
            f"{what}: {_some(names)}"
            for what, names in (
                ("missing tensors", self._missing),
                ("wrong tensors", self._wrong),
                ("unexpected tensors", sorted(self._unused)),
            )
            if names
        ]
        if complaints:
            raise ModelNotSupported(f"checkpoint {self._where}: {'; '.join(complaints)}")

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """A tensor of the checkpoint, as it is stored."""


class WeightReader(TensorReader):
    """The tensors of a checkpoint folder's safetensors files."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._handles: dict[str, Any] = {}  # tensor name -> open file
        for path in tensor_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise InvalidRequest(f"{path} is not a safetensors file: {error}") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        super().__init__(folder, self._handles, dtype, device)

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
