"""The argmax of each row of logits, and the log-probability of a given token.

A program reads a block of the vocabulary, so that few rows occupy the whole GPU too; a second
kernel merges a row's blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl

BLOCK = 4_096  # tokens


@kernel()
def block_argmax_kernel(
    logits_ptr,  # [S, V] float32
    block_max_ptr,  # [S, blocks] float32: NaN where the block has one
    token_ptr,  # [S, blocks] int32: the first token with the largest logit
    vocab_size,
    stride_logits,
    block: tl.constexpr,
):
    """Grid [S, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + token, is_token, float("-inf"))
    block_max, first = first_max(logits, token, is_token, vocab_size)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(block_max_ptr + cell, block_max)
    tl.store(token_ptr + cell, first)


@kernel()
def first_max(values, tokens, is_token, vocab_size):
    """The largest value, or NaN if there is one, and the first of the tokens that have it."""
    is_nan = values != values
    largest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    first = tl.min(tl.where(is_token & (values == largest), tokens, vocab_size), 0)
    num_nan = tl.sum(is_nan.to(tl.int32), 0)
    return tl.where(num_nan > 0, float("nan"), largest), first


@kernel(varying=("out_ptr", "finite_ptr"))
def merge_argmax_kernel(
    block_max_ptr,  # [S, blocks]
    token_ptr,
    row_max_ptr,  # [S] float32
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
    values = tl.load(block_max_ptr + cells, is_block, float("-inf"))
    tokens = tl.load(token_ptr + cells, is_block, vocab_size)
    row_max, first = first_max(values, tokens, is_block, vocab_size)
    is_finite = tl.abs(row_max) < float("inf")
    tl.store(row_max_ptr + row, row_max)
    tl.store(out_ptr + row, tl.where(is_finite, first, 0).to(tl.int64))
    tl.store(finite_ptr + row, is_finite)


@kernel()
def block_sum_kernel(
    logits_ptr,  # [S, V] float32
    block_max_ptr,  # [S, blocks]
    sum_ptr,  # [S, blocks]: of exp(logit - block_max)
    vocab_size,
    stride_logits,
    block: tl.constexpr,
):
    """Grid [S, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + token, is_token, float("-inf"))
    block_max = tl.max(logits, 0)
    shift = tl.where(block_max == float("-inf"), 0.0, block_max)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(block_max_ptr + cell, block_max)
    tl.store(sum_ptr + cell, tl.sum(tl.exp(logits - shift), 0))


@kernel(varying=("token_ptr", "out_ptr"))
def logprob_kernel(
    logits_ptr,
    block_max_ptr,
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
    values = tl.load(block_max_ptr + row * num_blocks + block, is_block, float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + block, is_block, 0.0)
    row_max = tl.max(values, 0)
    exp_sum = tl.sum(sums * tl.exp(values - row_max), 0)
    logit = tl.load(logits_ptr + row * stride_logits + tl.load(token_ptr + row))
    tl.store(out_ptr + row, logit - row_max - tl.log(exp_sum))


def argmax(logits: Tensor, row_max: Tensor, out: Tensor, finite: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.argmax`: row_max [S] float32, out [S] int64 and finite [S] bool are written."""
    num_rows, vocab_size, num_blocks = *logits.shape, blocks_of(logits)
    block_max = logits.new_empty((num_rows, num_blocks))
    token = logits.new_empty((num_rows, num_blocks), dtype=torch.int32)
    arguments = {"block_max_ptr": block_max, "token_ptr": token, "vocab_size": vocab_size}
    block_arguments = {"logits_ptr": logits, "stride_logits": logits.stride(0), "block": BLOCK}
    row_arguments = {
        "row_max_ptr": row_max,
        "out_ptr": out,
        "finite_ptr": finite,
        "num_blocks": num_blocks,
        "block_blocks": power_of_2(num_blocks),
    }
    return [
        KernelLaunch(block_argmax_kernel, (num_rows, num_blocks), arguments | block_arguments, 8),
        KernelLaunch(merge_argmax_kernel, (num_rows,), arguments | row_arguments, 1),
    ]


def token_logprob(logits: Tensor, token_ids: Tensor, out: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.token_logprob`; `out` [S] float32 is written."""
    num_rows, vocab_size, num_blocks = *logits.shape, blocks_of(logits)
    block_max, exp_sum = logits.new_empty((2, num_rows, num_blocks)).unbind(0)
    arguments = {
        "logits_ptr": logits,
        "block_max_ptr": block_max,
        "sum_ptr": exp_sum,
        "stride_logits": logits.stride(0),
    }
    block_arguments = {"vocab_size": vocab_size, "block": BLOCK}
    row_arguments = {
        "token_ptr": token_ids,
        "out_ptr": out,
        "num_blocks": num_blocks,
        "block_blocks": power_of_2(num_blocks),
    }
    return [
        KernelLaunch(block_sum_kernel, (num_rows, num_blocks), arguments | block_arguments, 8),
        KernelLaunch(logprob_kernel, (num_rows,), arguments | row_arguments, 1),
    ]


def blocks_of(logits: Tensor) -> int:
    """Programs that read a row."""
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must lie dense"
    return -(-logits.shape[1] // BLOCK)
