"""`RoundingCheck`: names heads whose keys lose much in 8 bits, once, after the first long prompt.

A channel of a head that is far larger than the others decides the scale of its tokens, and the
others are rounded coarsely. What is stored tells: the error of a number follows from its scale, or
from the number itself in fp8, and what a channel says is how much it varies from token to token.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.attention.base import AttentionMetadata, LayersKV
from radixserve_kernels.stored_kv import FP8_MAX, from_stored, split_int8

logger = logging.getLogger("radixserve")

LIMIT = 0.05  # of the rounding error in what the middle channel varies by; see docs/quantization.md
MIN_TOKENS, MAX_TOKENS = 128, 256  # of a row that are looked at
FIRST_TOKEN = 4  # the tokens before it often have keys like no others
UNIFORM = 12**-0.5  # the root mean square of errors between -1/2 and 1/2
FP8_ERROR = 0.0257  # of numbers with three bits of mantissa, in the mean of their sizes
FP8_LEAST = 2.0**-9  # the distance of the smallest ones


class CoarseHead(NamedTuple):
    """A head whose keys are rounded coarsely."""

    layer: int  # among those that store K and V
    head: int
    error: float  # in what the middle channel varies by
    is_cut: bool  # some numbers are as large as the dtype allows


class RoundingCheck:
    """`note` a step's rows, and `look` when the step was computed, until `is_done`."""

    def __init__(self, layers: list[LayersKV], page_size: int, *, scales_last: bool) -> None:
        """layers: of a pool in 8 bits, those whose pages are the rows' own."""
        self.is_done = False
        self._layers, self._page_size, self._scales_last = layers, page_size, scales_last
        self._slots: IntArray | None = None

    def note(self, host: AttentionMetadata) -> None:
        """Take the longest row, if it has MIN_TOKENS."""
        row = int(host.seq_lens.argmax())
        length = int(host.seq_lens[row])
        if self._slots is None and length >= MIN_TOKENS:
            places = np.arange(max(FIRST_TOKEN, length - MAX_TOKENS), length)
            pages = host.page_tables[row][places // self._page_size].astype(np.int64)
            self._slots = pages * self._page_size + places % self._page_size

    def look(self) -> None:
        """Log one warning if a head of the row's keys is rounded coarsely. Some tens of
        milliseconds, once."""
        if self._slots is None:
            return
        slots, self._slots, self.is_done = self._slots, None, True
        heads = [head for layers in self._layers for head in self._coarse_heads(layers, slots)]
        if not heads:
            return
        worst = max(heads, key=lambda head: (head.is_cut, head.error))
        reason = f"by {worst.error:.0%} of what they vary by from token to token"
        if worst.is_cut:
            reason = f"to {FP8_MAX:.0f} where they are larger"
        others = f", and those of {len(heads) - 1} other heads coarsely" if len(heads) > 1 else ""
        logger.warning(
            "the keys of layer %d, head %d are rounded %s%s: answers may change; "
            'kv_dtype="auto" stores them as they are',
            *(worst.layer, worst.head, reason, others),
        )

    def _coarse_heads(self, layers: LayersKV, slots: IntArray) -> list[CoarseHead]:
        index = torch.from_numpy(slots)
        heads: list[CoarseHead] = []
        for kv, layer in zip(layers.kv, layers.layers, strict=True):
            keys = kv[0].flatten(0, 1)
            rows = keys[index.to(keys.device)].cpu()
            errors, is_cut = key_errors(rows, scales_last=self._scales_last)
            for head in ((errors > LIMIT) | is_cut).nonzero()[:, 0].tolist():
                heads.append(CoarseHead(layer, head, float(errors[head]), bool(is_cut[head])))
        return heads


def key_errors(rows: Tensor, *, scales_last: bool) -> tuple[Tensor, Tensor]:
    """Of each head of stored keys [n, Hkv, W] the rounding error of its middle channel, in what
    that varies by over the n tokens: [Hkv] float32. And whether numbers were cut off: [Hkv]."""
    keys = from_stored(rows, torch.float32, scales_last=scales_last)
    if rows.dtype == torch.int8:
        _, scales = split_int8(rows, scales_last=scales_last)
        error = (
            scales.float().square().mean(0).sqrt()[:, None] * UNIFORM
        )  # the same of all channels
        is_cut = torch.zeros(keys.shape[1], dtype=torch.bool)
    else:
        error = (keys.square().mean(0) * FP8_ERROR**2 + (FP8_LEAST * UNIFORM) ** 2).sqrt()
        is_cut = (keys.abs() >= FP8_MAX).any(2).any(0)
    errors = (error / keys.std(0)).median(-1).values
    return errors.nan_to_num(nan=0.0, posinf=math.inf), is_cut
