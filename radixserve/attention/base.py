"""What an attention backend is given and what it owes: `ForwardBatch`, `AttentionBackend`.

Knows token slots and pages; nothing of requests, models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from radixserve_kernels.host_index import HostIndex as HostIndex
from radixserve_kernels.host_index import IndexArray as IndexArray


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows, laid end to end: T new tokens of R sequences.

    The names qo_indptr, kv_indptr, kv_indices and last_page_len mean what they mean in FlashInfer.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, page_id * page_size + offset of each new token
    logits_indices: Tensor  # [S] int64, ascending: the token after which each sampled row draws
    host: HostIndex
    page_size: int

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def kv_indices(self) -> Tensor:
        """[total pages] int32, host.kv_indices on the device: made when it is asked for."""
        return torch.from_numpy(self.host.kv_indices).to(self.input_ids.device)


class AttentionBackend(Protocol):
    """Paged causal attention over the pool's K and V.

    A backend is made for one pool and borrows its tensors: only `run` writes to them, only to the
    slots of the batch's new tokens, and nobody else may write between `plan` and the last `run`,
    except a model that stores K and V itself and then calls `attend`.
    One thread; one plan at a time.

    Cost: `plan` is the only place for work that grows with the number of rows in Python or numpy;
    `run` may take a number of tensor operations that grows with the K and V read, not with rows.
    """

    name: str
    kv: Tensor  # [L, 2, num_pages, P, Hkv, D]

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for `batch`; once a step, before the first `attend` or `run`."""
        ...

    def attend(self, q: Tensor, layer: int, scale: float | None = None) -> Tensor:
        """Attend causally by position; K and V of the new tokens are in their slots already.

        q [T, Hq, D]; returns [T, Hq, D]. `scale` multiplies the scores and is 1 / sqrt(D) when
        None. Once a layer, in any order of layers.
        """
        ...

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None = None
    ) -> Tensor:
        """Store k, v [T, Hkv, D] in the new tokens' slots, then `attend`."""
        ...


def kv_view(kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's K and V by slot, each [num_slots, Hkv, D], of kv [L, 2, num_pages, P, Hkv, D]."""
    shape = (-1, *kv.shape[-2:])
    return kv[layer, 0].view(shape), kv[layer, 1].view(shape)


def check_dtype(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype can be attended over."""
    return dtype in (torch.float32, torch.bfloat16)
