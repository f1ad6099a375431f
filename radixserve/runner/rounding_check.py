"""`RoundingCheck`: warns once of heads whose keys lose much in 8 bits, after the first long prompt.

A channel that is far larger than the others of its head decides the scale, so the others are
rounded coarsely. The check reads stored keys: a number's rounding error follows from its scale, or
in fp8 from the number itself. It compares this error with the channel's standard deviation over
tokens.
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

# Largest rounding error over standard deviation, of the median channel; see docs/quantization.md
LIMIT = 0.05
MIN_TOKENS, MAX_TOKENS = 128, 256  # of a row that are read
FIRST_TOKEN = 4  # the tokens before it often have keys unlike all others
UNIFORM = 12**-0.5  # root mean square of errors between -1/2 and 1/2
FP8_ERROR = 0.0257  # relative root mean square error of float8_e4m3fn, three bits of mantissa
FP8_LEAST = 2.0**-9  # distance of its smallest numbers


class CoarseHead(NamedTuple):
    """A head whose keys are rounded coarsely."""

    layer: int  # among those that store K and V
    head: int
    error: float  # rounding error over standard deviation, of the median channel
    is_cut: bool  # some numbers are as large as the dtype allows


class RoundingCheck:
    """Call `note` with each step's rows and `warn` when the step was computed, until that returns
    True."""

    def __init__(self, layers: list[LayersKV], page_size: int, *, scales_last: bool) -> None:
        """layers: of a pool in 8 bits, those whose pages are the rows' own."""
        self._layers, self._page_size, self._scales_last = layers, page_size, scales_last
        self._slots: IntArray | None = None

    def note(self, host: AttentionMetadata) -> None:
        """Take the longest row, if it has MIN_TOKENS."""
        row = int(host.seq_lens.argmax())
        length = int(host.seq_lens[row])
        if self._slots is None and length >= MIN_TOKENS:
            positions = np.arange(max(FIRST_TOKEN, length - MAX_TOKENS), length)
            pages = host.page_tables[row][positions // self._page_size].astype(np.int64)
            self._slots = pages * self._page_size + positions % self._page_size

    def warn(self) -> bool:
        """Check the row that `note` took, and log one warning if keys of a head are rounded
        coarsely. Returns whether there was such a row: the check is over. Takes some tens of
        milliseconds."""
        slots = self._slots
        if slots is None:
            return False
        heads = [head for layers in self._layers for head in self._coarse_heads(layers, slots)]
        if not heads:
            return True
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
        return True

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
    """Returns, for stored keys [n, Hkv, W], each head's median over channels of rounding error over
    standard deviation over tokens, [Hkv] float32, and whether its numbers were clipped, [Hkv]."""
    keys = from_stored(rows, torch.float32, scales_last=scales_last)
    if rows.dtype == torch.int8:
        _, scales = split_int8(rows, scales_last=scales_last)
        rms_scale = scales.float().square().mean(0).sqrt()  # [Hkv], the same for all channels
        error = rms_scale[:, None] * UNIFORM
        is_cut = torch.zeros(keys.shape[1], dtype=torch.bool)
    else:
        error = (keys.square().mean(0) * FP8_ERROR**2 + (FP8_LEAST * UNIFORM) ** 2).sqrt()
        is_cut = (keys.abs() >= FP8_MAX).any(2).any(0)
    errors = (error / keys.std(0)).median(-1).values
    return errors.nan_to_num(nan=0.0, posinf=math.inf), is_cut
