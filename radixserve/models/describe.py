"""What a model is, from its config alone: no weight is read or made."""

from __future__ import annotations

from dataclasses import replace

import torch

from radixserve.models.base import ModelInfo
from radixserve.models.decoder import read_decoder
from radixserve.models.source import ModelSource


def describe(source: ModelSource, dtype: torch.dtype) -> ModelInfo:
    """The info of a model of a native family. Raises ModelNotSupported for others.

    It is loaded onto the device "meta", where tensors have shapes and no memory.
    """
    shapes = replace(source, path=None, gguf=None)
    info = read_decoder(shapes, dtype, torch.device("meta"), lambda _: None).info
    return replace(info, eos_ids=source.eos_ids())
