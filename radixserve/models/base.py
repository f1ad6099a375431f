"""The interface of models: `ModelInfo` and `LanguageModel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model's sizes, in tokens, heads or features."""

    architecture: str  # as in config.json, "LlamaForCausalLM"
    is_native: bool  # runs in decoder.py or cpu_decoder.py, not through transformers' code
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int  # rows of the output head
    max_positions: int
    eos_ids: tuple[int, ...]  # ascending; of generation_config.json and config.json
    dtype: torch.dtype
    num_parameters: int  # tied ones once

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class LanguageModel(ABC):
    """A decoder that keeps its K and V in the attention backend it is handed.

    Holds weights only: nothing changes in it between calls.
    """

    info: ModelInfo
    can_capture: ClassVar[bool] = False  # whether a CUDA graph can be made of `forward`

    @abstractmethod
    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Logits [S, V] float32 after each of `batch.logits_indices`; `backend` is planned."""
