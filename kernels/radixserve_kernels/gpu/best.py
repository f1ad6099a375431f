"""The best token of each row of logits, and the log-probability of a given one.

A program reads a block of the vocabulary, so that few rows keep the whole GPU busy too; a second
kernel puts a row's blocks together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve_kernels.gpu.launch import Launch, kernel, power_of_2, tl

BLOCK = 4_096  # tokens


@kernel()
def block_best_kernel(
    logits_ptr,  # [S, V] float32
    best_ptr,  # [S, blocks] float32: NaN where the block has one
    token_ptr,  # [S, blocks] int32: the first token with the best logit
    vocab_size,
    stride_logits,
    block: tl.constexpr,
):
    """Grid [S, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + token, is_token, float("-inf"))
    best, first = first_best(logits, token, is_token, vocab_size)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + cell, best)
    tl.store(token_ptr + cell, first)


@kernel()
def first_best(values, tokens, is_token, vocab_size):
    """The largest value, or NaN if there is one, and the least of the tokens that have it."""
    is_nan = values != values
    best = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    first = tl.min(tl.where(is_token & (values == best), tokens, vocab_size), 0)
    num_nan = tl.sum(is_nan.to(tl.int32), 0)
    return tl.where(num_nan > 0, float("nan"), best), first


@kernel(varying=("out_ptr", "finite_ptr"))
def row_best_kernel(
    best_ptr,  # [S, blocks]
    token_ptr,
    row_best_ptr,  # [S] float32
    out_ptr,  # [S] int64
    finite_ptr,  # [S] bool
    vocab_size,
    num_blocks,
    block_blocks: tl.constexpr,
):
    """Grid [S]."""
    row = tl.program_id(0)
    block = tl.arange(0, block_blocks)
    is_block = block < num_blocks
    cells = row * num_blocks + block
    values = tl.load(best_ptr + cells, is_block, float("-inf"))
    tokens = tl.load(token_ptr + cells, is_block, vocab_size)
    best, first = first_best(values, tokens, is_block, vocab_size)
    is_finite = tl.abs(best) < float("inf")
    tl.store(row_best_ptr + row, best)
    tl.store(out_ptr + row, tl.where(is_finite, first, 0).to(tl.int64))
    tl.store(finite_ptr + row, is_finite)


@kernel()
def block_sum_kernel(
    logits_ptr,  # [S, V] float32
    best_ptr,  # [S, blocks]
    sum_ptr,  # [S, blocks]: of exp(logit - best)
    vocab_size,
    stride_logits,
    block: tl.constexpr,
):
    """Grid [S, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + token, is_token, float("-inf"))
    best = tl.max(logits, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + cell, best)
    tl.store(sum_ptr + cell, tl.sum(tl.exp(logits - shift), 0))


@kernel(varying=("token_ptr", "out_ptr"))
def logprob_kernel(
    logits_ptr,
    best_ptr,
    sum_ptr,
    token_ptr,  # [S] int64
    out_ptr,  # [S] float32
    num_blocks,
    stride_logits,
    block_blocks: tl.constexpr,
):
    """Grid [S]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, block_blocks)
    is_block = block < num_blocks
    values = tl.load(best_ptr + row * num_blocks + block, is_block, float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + block, is_block, 0.0)
    best = tl.max(values, 0)
    total = tl.sum(sums * tl.exp(values - best), 0)
    logit = tl.load(logits_ptr + row * stride_logits + tl.load(token_ptr + row))
    tl.store(out_ptr + row, logit - best - tl.log(total))


def argmax(logits: Tensor, row_best: Tensor, out: Tensor, finite: Tensor) -> list[Launch]:
    """See `gpu_ops.argmax`: row_best [S] float32, out [S] int64 and finite [S] bool are written."""
    num_rows, vocab_size, num_blocks = *logits.shape, blocks_of(logits)
    best = logits.new_empty((num_rows, num_blocks))
    token = logits.new_empty((num_rows, num_blocks), dtype=torch.int32)
    arguments = {"best_ptr": best, "token_ptr": token, "vocab_size": vocab_size}
    of_blocks = {"logits_ptr": logits, "stride_logits": logits.stride(0), "block": BLOCK}
    of_rows = {
        "row_best_ptr": row_best,
        "out_ptr": out,
        "finite_ptr": finite,
        "num_blocks": num_blocks,
        "block_blocks": power_of_2(num_blocks),
    }
    return [
        Launch(block_best_kernel, (num_rows, num_blocks), arguments | of_blocks, 8),
        Launch(row_best_kernel, (num_rows,), arguments | of_rows, 1),
    ]


def token_logprob(logits: Tensor, token_ids: Tensor, out: Tensor) -> list[Launch]:
    """See `gpu_ops.token_logprob`; `out` [S] float32 is written."""
    num_rows, vocab_size, num_blocks = *logits.shape, blocks_of(logits)
    best, total = logits.new_empty((2, num_rows, num_blocks)).unbind(0)
    arguments = {
        "logits_ptr": logits,
        "best_ptr": best,
        "sum_ptr": total,
        "stride_logits": logits.stride(0),
    }
    of_blocks = {"vocab_size": vocab_size, "block": BLOCK}
    of_rows = {
        "token_ptr": token_ids,
        "out_ptr": out,
        "num_blocks": num_blocks,
        "block_blocks": power_of_2(num_blocks),
    }
    return [
        Launch(block_sum_kernel, (num_rows, num_blocks), arguments | of_blocks, 8),
        Launch(logprob_kernel, (num_rows,), arguments | of_rows, 1),
    ]


def blocks_of(logits: Tensor) -> int:
    """Programs that read a row."""
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must lie dense"
    return -(-logits.shape[1] // BLOCK)
