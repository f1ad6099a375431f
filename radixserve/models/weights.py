"""Checkpoint folders as `save_pretrained` and the hub write them: config, tensors, end tokens.

Reads tensors; does not know how a model uses them.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.decoder_config import DecoderConfig, read_decoder_config
from radixserve.models.generation_config import read_json
from radixserve.models.names import CONFIG_FILE, TENSORS_READ
from radixserve.models.quantized_checkpoint import ACTIVATION_SCALES, QuantizedScheme, group_parts
from radixserve.models.stated_sizes import check_fields
from radixserve_kernels.quantized import AnyWeight, dense

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
logger = logging.getLogger("radixserve")
_tensors_read = logging.getLogger(TENSORS_READ)

MAX_NAMED = 6  # tensors named in an error message
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_checkpoint(folder: Path) -> Path:
    """The folder of a checkpoint. Raises InvalidRequest if it has no config.json."""
    if not (folder / CONFIG_FILE).is_file():
        raise InvalidRequest(f"{folder} is not a model: it has no {CONFIG_FILE}")
    return folder


def load_config(folder: Path) -> Any:
    """The checkpoint's config, old rope fields normalised: a DecoderConfig, or transformers' own
    for other families and unusual fields. Runs no foreign code.

    Raises ModelNotSupported for counts and sizes that its tensors contradict.
    """
    path = folder / CONFIG_FILE
    raw = read_json(path)
    if "model_type" not in raw:
        raise ModelNotSupported(f"{path} names no model_type")
    check_fields(path, raw, tensor_shapes(folder) if has_tensors(folder) else {})
    config = read_decoder_config(raw)
    return transformers_config(folder) if config is None else config


def transformers_config(folder: Path) -> Any:
    """The checkpoint's config as transformers reads it. Runs no foreign code."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelNotSupported(
            f"transformers cannot read the config of {folder}: {one_line(error)}"
        ) from error


def one_line(error: Exception) -> str:
    """What an error of another library says."""
    return " ".join(str(error).split()) or type(error).__name__


def as_transformers(config: Any) -> Any:
    """transformers' config with the fields of one that was read here."""
    if not isinstance(config, DecoderConfig):
        return config
    from transformers import AutoConfig

    return AutoConfig.for_model(**{k: v for k, v in asdict(config).items() if v is not None})


def architecture_of(config: Any) -> str:
    """The first of config.json's architectures. Raises ModelNotSupported if it names none."""
    names = getattr(config, "architectures", None)
    if not names:
        raise ModelNotSupported("config.json names no architecture")
    return str(names[0])


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


def has_tensors(folder: Path) -> bool:
    """Whether a checkpoint has safetensors files."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a checkpoint's files, from their headers. Raises the errors of
    `tensor_files`, and InvalidRequest for a broken file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(folder):
        file = open_tensors(path)
        shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    return shapes


def open_tensors(path: Path) -> Any:
    """A safetensors file. Raises InvalidRequest if it is none."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{path} is not a safetensors file: {error}") from error


class TensorReader(ABC):
    """Takes a checkpoint's tensors by name, in a dtype, and records what was wrong.

    `take` never raises for a bad tensor, so that `finish` can name all of them at once; it returns
    zeros instead, which are never used. See `TensorSource`.
    """

    def __init__(
        self,
        where: Path,
        names: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_forms: bool = False,
    ) -> None:
        """where: the file or folder that errors name; names: of all its tensors.

        keeps_forms: `take_weight` gives matrices as they are stored, where that is smaller and as
        exact as `dtype`.
        """
        self.num_parameters = 0  # elements taken so far
        self.optional: frozenset[str] = frozenset()  # tensors that a model may lack
        self._where, self._dtype, self._device = where, dtype, device
        self._keeps_forms = keeps_forms
        self._names = frozenset(names)
        self._unused = set(self._names)
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._not_finite: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def skip(self, pattern: str) -> None:
        """Tensors whose whole name matches the regular expression may be left untaken."""
        self._unused = {name for name in self._unused if not re.fullmatch(pattern, name)}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape, converted to the reader's dtype."""
        weight = self.take_weight(name, shape)
        return self._converted(weight if isinstance(weight, Tensor) else weight.dequantize())

    def take_weight(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """The same, or as it is stored, in float16 or fewer bits, where the reader keeps forms."""
        self._unused.discard(name)
        is_asked = self._device.type == "meta"  # for its shape alone
        num_tensors = len(self._names)
        if not is_asked:
            _tensors_read.debug("%d of %d tensors", num_tensors - len(self._unused), num_tensors)
        if name not in self:
            self._missing.append(name)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if is_asked:
            return self._asked(name, shape)
        tensor = self._read_as(name, shape)
        self.num_parameters += math.prod(tensor.shape)
        if tuple(tensor.shape) != shape:
            self._wrong.append(f"{name} is {list(tensor.shape)} and must be {list(shape)}")
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if not isinstance(tensor, Tensor):
            if not all(part is None or is_finite(part) for part in tensor.parts[1:]):
                self._not_finite.append(name)
            return tensor
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            self._wrong.append(f"{name} is {tensor.dtype}: quantized checkpoints cannot be run")
        elif not is_finite(tensor):
            self._not_finite.append(name)
        is_kept = self._keeps_forms and self._dtype == torch.float32
        return tensor if is_kept and tensor.dtype == torch.float16 else self._converted(tensor)

    def _asked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is not read: its shape is compared, where the header has it."""
        stored = self._stored_shape(name)
        if stored is not None and not self._may_be(name, stored, shape):
            self._wrong.append(f"{name} is {list(stored)} and must be {list(shape)}")
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    @abstractmethod
    def _stored_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor as its header has it; None where that tells nothing."""

    def _may_be(self, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor of the header's shape is read as one of `shape`."""
        del name
        return stored == shape

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def finish(self) -> None:
        """Raise ModelNotSupported naming every missing, wrongly shaped or unexpected tensor, and
        warn of those with values that are not finite."""
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
        warn_of_broken_weights(self._where, self._not_finite)

    def _read_as(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """A tensor of the checkpoint, transposed where it is stored so and `shape` shows it."""
        del shape
        return self._read(name)

    @abstractmethod
    def _read(self, name: str) -> AnyWeight:
        """A tensor of the checkpoint, as it is stored."""


class WeightReader(TensorReader):
    """The tensors of a checkpoint folder's safetensors files."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_forms: bool = False,
        rename: Callable[[str], str | None] = str,
        transposable: str | None = None,
        scheme: QuantizedScheme | None = None,
    ) -> None:
        """scheme: of the weights that the checkpoint has quantised.
        rename: a stored name -> that to take it by; None: the tensor is not read.
        transposable: pattern of the names of [E, N, K] that may be stored as [E, K, N]; a stored
        tensor of the asked shape is taken as it is, as in transformers.
        """
        self._transposable = transposable
        num_left = 0
        self._handles: dict[str, Any] = {}  # tensor name -> open file
        self._stored_names: dict[str, str] = {}  # name -> name in its file
        for path in tensor_files(folder):
            handle = open_tensors(path)
            for stored in handle.keys():  # noqa: SIM118 - it is not a dict
                if (name := rename(stored)) is not None:
                    self._handles[name], self._stored_names[name] = handle, stored
                else:
                    num_left += 1
        if device.type != "meta":
            log_other_parts(folder, num_left)
        self._scheme = scheme
        self._parts = {} if scheme is None else group_parts(self._handles, scheme)
        stored = {part for parts in self._parts.values() for part in parts.values()}
        names = (self._handles.keys() - stored) | self._parts.keys()
        super().__init__(folder, names, dtype, device, keeps_forms=keeps_forms)
        if scheme is not None:
            self.skip(ACTIVATION_SCALES)
            self.optional = self._zero_biases(scheme)
            self._unused -= self.optional

    def widened(self) -> dict[str, Tensor]:
        """Every tensor: quantised ones in the reader's dtype, others as they are stored."""
        assert not self._keeps_forms
        return {
            name: self._converted(dense(self._read(name)))
            if name in self._parts
            else self._stored(name)
            for name in sorted(self._unused | self.optional)
        }

    def _zero_biases(self, scheme: QuantizedScheme) -> frozenset[str]:
        """Biases of zeros, which the scheme's tools write beside weights that have none too."""
        if not scheme.has_zero_biases:
            return frozenset()
        biases = {name.removesuffix("weight") + "bias" for name in self._parts}
        return frozenset(name for name in biases & self._names if not self._stored(name).any())

    def _read(self, name: str) -> AnyWeight:
        """A quantised one widened, but where its form is kept."""
        if self._scheme is None or name not in self._parts:
            return self._stored(name)
        parts = {ending: self._stored(part) for ending, part in self._parts[name].items()}
        try:
            weight = self._scheme.read(parts)
        except (KeyError, RuntimeError, ValueError) as error:
            shapes = {self._parts[name][ending]: list(x.shape) for ending, x in parts.items()}
            raise ModelNotSupported(
                f"checkpoint {self._where}: {name} is not stored as {self._scheme.name} stores it "
                f"({shapes}): {error}"
            ) from error
        if isinstance(weight, Tensor) or self._keeps_forms:
            return weight
        return weight.dequantize()

    def _stored_shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._parts:
            return None
        return tuple(self._handles[name].get_slice(self._stored_names[name]).get_shape())

    def _may_be(self, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        if stored == shape:
            return True
        pattern = self._transposable
        is_transposed = len(stored) == 3 and (stored[0], stored[2], stored[1]) == shape
        return is_transposed and pattern is not None and bool(re.fullmatch(pattern, name))

    def _read_as(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        tensor = self._read(name)
        is_fitting = tuple(tensor.shape) == shape or self._transposable is None
        if is_fitting or not re.fullmatch(str(self._transposable), name):
            return tensor
        return dense(tensor).transpose(1, 2)

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(self._stored_names[name])
        return tensor


@contextmanager
def without_load_report() -> Iterator[None]:
    """Without transformers' report of a load, which lists every tensor of the skipped parts, and
    without its progress bar."""
    from transformers.utils import logging as transformers_logging

    of_transformers: Any = transformers_logging  # some of its functions have no types

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    has_bar = of_transformers.is_progress_bar_enabled()
    logger.addFilter(is_other)
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(is_other)
        if has_bar:
            of_transformers.enable_progress_bar()


def log_other_parts(folder: Path, num_tensors: int) -> None:
    """Log how many tensors of a checkpoint were skipped since the text model does not use them."""
    if num_tensors:
        logger.info("%s: %d tensors of parts beside the text model: not read", folder, num_tensors)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass, nothing is allocated."""
    return not tensor.numel() or all(
        math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor)
    )


def warn_of_broken_weights(where: Path, names: Iterable[str]) -> None:
    if listed := _some(names):
        logger.warning(
            "checkpoint %s: values that are not finite in %s: requests that they reach fail",
            where,
            listed,
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
