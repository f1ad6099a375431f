"""Where a model comes from: a checkpoint in a folder, or a known size with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from radixserve.models.random_weights import RandomWeights
from radixserve.models.sizes import size_config
from radixserve.models.weights import WeightReader, find_checkpoint, load_config, read_eos_ids

RANDOM = "random:"  # begins the name of a size in sizes.py


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
    folder: Path | None  # of the checkpoint; None where weights are random: no tokenizer either
    seed: int = 0  # of random weights

    def tensors(self, dtype: torch.dtype, device: torch.device) -> TensorSource:
        """Its weights. Raises ModelNotSupported or InvalidRequest for a broken checkpoint."""
        if self.folder is not None:
            return WeightReader(self.folder, dtype, device)
        return RandomWeights(self.seed, self.config.initializer_range, dtype, device)

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending; none where weights are random."""
        return () if self.folder is None else read_eos_ids(self.folder, self.config)


def find_model(model_path: str, seed: int = 0) -> ModelSource:
    """The model that `model_path` names: a folder, a hub id, or "random:" and a name of sizes.py.

    `seed` is that of random weights. Raises InvalidRequest if there is no such model,
    ModelNotSupported if its config cannot be read.
    """
    if model_path.startswith(RANDOM):
        return ModelSource(size_config(model_path.removeprefix(RANDOM)), None, seed)
    return checkpoint(find_checkpoint(model_path))


def checkpoint(folder: Path) -> ModelSource:
    """The checkpoint in a folder."""
    return ModelSource(load_config(folder), folder)
