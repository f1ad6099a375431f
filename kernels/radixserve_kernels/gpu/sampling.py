"""Samples from filtered distributions without sorting them.

Scaled logits are (logit - row maximum) / temperature <= 0; the bits of -scaled, as an integer,
are a token's key: 0 for the argmax, larger for less likely tokens. A filter is a largest key, found
by bisection: count or sum the tokens up to a key, and halve. If possible not over the whole
vocabulary:

    threshold   which of a few fixed thresholds of the scaled logit is low enough for the filters
    gather      copies the tokens above that threshold, if they are at most MAX_GATHERED
    sample      bisects over those (over all tokens if they are more), sums the rest and inverts the
                distribution; a row without filters needs the threshold sums and one block

Sums are float64 in a fixed order: the same row gives the same token in any batch. Differences from
the torch operations: exp is the GPU's, exact to about 1e-6, and their probabilities are rounded to
float32 once more before they are summed. So the last token that top_p keeps may differ if the sum
comes within about 1e-6 of top_p, and the sampled token may be a neighbour where `uniform` comes
that close to a border between two. Scaled logits, min_p and top_k are exact, and tokens of equal
scaled logits are kept or dropped together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.gpu import argmax
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl
from radixserve_kernels.gpu.threshold_search import (
    BLOCK,
    MAX_GATHERED,
    PARAMETERS,
    STEPS,
    choose_step,
    gather_kernel,
    is_filtered,
    key_of,
    scaled_logits,
    step_floor,
    threshold_kernel,
)


@kernel()
def count_or_mass(values_ptr, end, scaling, limit, norm, is_count, block: tl.constexpr):
    """The number of tokens with keys up to `limit`, or the sum of exp(scaled) / norm; float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, end, block):
        scaled, is_kept = scaled_logits(values_ptr, start, end, scaling, block)
        weights = tl.where(is_count, 1.0, tl.div_rn(tl.exp(scaled), norm))
        weights = tl.where(is_kept & (key_of(scaled) <= limit), weights, 0.0)
        total += tl.sum(weights.to(tl.float64), 0)
    return total


@kernel()
def kept_weights(values_ptr, start, end, scaling, limits, block: tl.constexpr):
    """exp(scaled) of the tokens of a block that pass all filters, float64; zero for the others.

    limits: the largest key, and the least probability with the sum that it is a share of.
    """
    limit, norm, prob_threshold = limits
    scaled, is_kept = scaled_logits(values_ptr, start, end, scaling, block)
    weights = tl.exp(scaled)
    is_kept = is_kept & (key_of(scaled) <= limit) & (tl.div_rn(weights, norm) >= prob_threshold)
    return tl.where(is_kept, weights, 0.0).to(tl.float64)


@kernel()
def point_of(uniform, total):
    """uniform * total, pushed below total where rounding brought it there."""
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.minimum(uniform * total, below)


@kernel(varying=(*PARAMETERS, "uniform_ptr", "out_ptr"))
def sample_kernel(
    logits_ptr,
    row_max_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floor_ptr,
    counts_ptr,
    masses_ptr,
    gathered_ptr,
    token_ptr,
    uniform_ptr,  # [S] float64
    out_ptr,  # [S] int64: the argmax before, the one sampled after
    vocab_size,
    num_blocks,
    stride_logits,
    max_gathered: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
    block_blocks: tl.constexpr,
):
    """Grid [S]. Greedy rows and rows without a finite maximum keep the argmax."""
    row = tl.program_id(0).to(tl.int64)
    row_max = tl.load(row_max_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if (tl.abs(row_max) < float("inf")) & (temperature > 0.0):
        floor = tl.load(floor_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        scaling = (row_max, temperature, floor)
        uniform = tl.load(uniform_ptr + row)
        blocks = tl.arange(0, block_blocks)
        masses_ptr += row * steps * num_blocks
        cells = masses_ptr + (steps - 1) * num_blocks + blocks
        masses = tl.load(cells, blocks < num_blocks, 0.0)
        values_ptr = logits_ptr + row * stride_logits
        end = vocab_size
        is_gathered = False
        limit = tl.full([], 0x7F800000, tl.int32)  # the key of -inf: all tokens
        norm = tl.sum(masses, 0).to(tl.float32)
        prob_threshold = tl.full([], 0.0, tl.float32)
        if is_filtered(top_k, top_p, floor, vocab_size):
            counts_ptr += row * steps * num_blocks
            step, num_tokens = choose_step(
                counts_ptr, masses_ptr, num_blocks, top_k, top_p, vocab_size, steps, block_blocks
            )
            is_gathered = num_tokens <= max_gathered
            if is_gathered:
                values_ptr = gathered_ptr + row * max_gathered
                end = num_tokens
            for number in range(2):  # top_k, then top_p; one loop, so that it is compiled once
                is_top_k = (number == 0) & (top_k > 0) & (top_k < vocab_size)
                if is_top_k | ((number == 1) & (top_p < 1.0)):
                    target = tl.where(is_top_k, top_k.to(tl.float64), top_p)
                    before_step = tl.where(step > 0, key_of(step_floor(step - 1, steps)), -1)
                    low = tl.where(is_top_k, before_step, -1)
                    high = tl.where(is_top_k, key_of(step_floor(step, steps)), limit)
                    while high - low > 1:  # the least key up to which the weights reach the target
                        middle = low + (high - low) // 2
                        reached = count_or_mass(
                            values_ptr, end, scaling, middle, norm, is_top_k, block
                        )
                        high = tl.where(reached >= target, middle, high)
                        low = tl.where(reached >= target, low, middle)
                    if is_top_k:
                        limit = high
                        mass = count_or_mass(values_ptr, end, scaling, limit, 1.0, False, block)
                        norm = mass.to(tl.float32)
                    else:
                        last = -high.to(tl.float32, bitcast=True)
                        prob_threshold = tl.div_rn(tl.exp(last), norm)
            limits = (limit, norm, prob_threshold)
            point = tl.full([], float("inf"), tl.float64)
            first = tl.full([], 0, tl.int32)
            before = tl.full([], 0.0, tl.float64)
            for number in range(2):  # the sum of all, then the block in which the point lies
                mass = tl.full([], 0.0, tl.float64)
                first = first * 0
                before = before * 0.0
                for start in range(0, end, block):
                    weights = kept_weights(values_ptr, start, end, scaling, limits, block)
                    mass += tl.sum(weights, 0)
                    is_past = mass <= point
                    first = tl.where(is_past, start + block, first)
                    before = tl.where(is_past, mass, before)
                if number == 0:
                    point = point_of(uniform, mass)
        else:
            mass_up_to = tl.cumsum(masses, 0)
            point = point_of(uniform, tl.max(mass_up_to, 0))
            is_past = mass_up_to <= point
            first = tl.sum(is_past.to(tl.int32), 0) * block
            before = tl.max(tl.where(is_past, mass_up_to, 0.0), 0)
        weights = kept_weights(
            values_ptr, first, end, scaling, (limit, norm, prob_threshold), block
        )
        within = tl.arange(0, block)
        is_here = (before + tl.cumsum(weights, 0) > point) & (weights > 0.0)
        position = tl.min(tl.where(is_here, within, block), 0)
        final = tl.max(tl.where(weights > 0.0, within, -1), 0)  # where rounding left none
        position = first + tl.where(position < block, position, final)
        token = position
        if is_gathered:
            token = tl.load(token_ptr + row * max_gathered + position)
        tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor,
    finite: Tensor,
) -> list[KernelLaunch]:
    """See `gpu_ops.sample`: out [S] int64 and finite [S] bool are written."""
    num_rows, num_blocks = len(logits), argmax.blocks_of(logits)
    row_max = logits.new_empty(num_rows)
    threshold_shape = (num_rows, STEPS, num_blocks)
    gathered_shape = (num_rows, MAX_GATHERED)
    arguments: dict[str, Any] = {
        "logits_ptr": logits,
        "row_max_ptr": row_max,
        "temperature_ptr": temperature,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "floor_ptr": min_p.log(),
        "counts_ptr": logits.new_empty(threshold_shape, dtype=torch.int32),
        "masses_ptr": logits.new_empty(threshold_shape, dtype=torch.float64),
        "vocab_size": logits.shape[1],
        "num_blocks": num_blocks,
        "stride_logits": logits.stride(0),
        "steps": STEPS,
        "block": BLOCK,
    }
    gathering = arguments | {
        "gathered_ptr": logits.new_empty(gathered_shape),
        "token_ptr": logits.new_empty(gathered_shape, dtype=torch.int32),
        "max_gathered": MAX_GATHERED,
        "block_blocks": power_of_2(num_blocks),
    }
    sampling = gathering | {"uniform_ptr": uniform, "out_ptr": out}
    return [
        *argmax.argmax(logits, row_max, out, finite),
        KernelLaunch(threshold_kernel, (num_rows, num_blocks), arguments, 8),
        KernelLaunch(gather_kernel, (num_rows, num_blocks), gathering, 8),
        KernelLaunch(sample_kernel, (num_rows,), sampling, 8),
    ]
