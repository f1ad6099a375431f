"""Applies grammars' bitmasks to rows of logits."""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.argmax import BLOCK, blocks_of
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, tl


@kernel(varying=("logits_ptr", "bitmask_ptr", "rows_ptr", "stride_bitmask"))
def forbid_kernel(
    logits_ptr,  # [S, V] float32
    bitmask_ptr,  # [m, words] int32: bit t % 32 of word t // 32 allows token t
    rows_ptr,  # [m] int64: the row of the logits of each mask
    vocab_size,
    stride_logits,
    stride_bitmask,
    block: tl.constexpr,
):
    """Grid [m, blocks]."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    word = tl.load(bitmask_ptr + mask * stride_bitmask + token // 32, is_token, -1)
    is_forbidden = is_token & (((word >> (token % 32)) & 1) == 0)
    cells = logits_ptr + row * stride_logits + token
    tl.store(cells, tl.full((block,), float("-inf"), tl.float32), is_forbidden)


def forbid_(logits: Tensor, bitmask: Tensor, rows: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.forbid_`."""
    num_masks, vocab_size = len(bitmask), logits.shape[1]
    arguments = {
        "logits_ptr": logits,
        "bitmask_ptr": bitmask,
        "rows_ptr": rows,
        "vocab_size": vocab_size,
        "stride_logits": logits.stride(0),
        "stride_bitmask": bitmask.stride(0),
        "block": BLOCK,
    }
    return [KernelLaunch(forbid_kernel, (num_masks, blocks_of(logits)), arguments, 8)]
