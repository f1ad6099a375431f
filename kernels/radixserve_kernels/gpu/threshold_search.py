"""The threshold that is low enough for the filters of each row, and the tokens above it.

Scaled logits are (logit - row maximum) / temperature <= 0. The tokens above each of a few fixed
thresholds are counted and summed, block by block of the vocabulary; those above the first threshold
that suffices are gathered in vocabulary order, if they are at most MAX_GATHERED. See `sampling`.
"""

from __future__ import annotations

from radixserve_kernels.gpu import argmax
from radixserve_kernels.gpu.launch import kernel, tl

BLOCK = argmax.BLOCK  # tokens at a time
STEPS = 8  # thresholds: see `step_floor`
MAX_GATHERED = 4_096
PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "floor_ptr")  # of each row


@kernel()
def step_floor(step, steps: tl.constexpr):
    """The least scaled logit of a step: -0.5, -2, -4.5, -8 ... and -inf for the last one."""
    height = step + 1.0
    return tl.where(step == steps - 1, float("-inf"), -0.5 * height * height)


@kernel()
def scaled_logits(values_ptr, start, end, scaling, block: tl.constexpr):
    """A block's scaled logits, and which are kept: those before `end` and not below min_p's floor.

    scaling: the row's maximum, its temperature and its floor.
    """
    row_max, temperature, floor = scaling
    position = start + tl.arange(0, block)
    values = tl.load(values_ptr + position, position < end, float("-inf"))
    scaled = tl.div_rn(values - row_max, temperature)
    return scaled, (position < end) & (scaled >= floor)


@kernel()
def key_of(scaled):
    """0 for the argmax; larger for less likely ones."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@kernel()
def is_filtered(top_k, top_p, floor, vocab_size):
    """Whether a row leaves tokens out."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (floor > float("-inf"))


@kernel()
def choose_step(
    counts_ptr,  # [steps, blocks] of this row
    masses_ptr,
    num_blocks,
    top_k,
    top_p,
    vocab_size,
    steps: tl.constexpr,
    block_blocks: tl.constexpr,
):
    """The first step whose tokens are enough for the filters, and how many tokens it has.

    top_p has a margin: the bisection divides, sums and rounds in another order.
    """
    block = tl.arange(0, block_blocks)
    is_block = block < num_blocks
    last = (steps - 1) * num_blocks + block
    total = tl.sum(tl.load(masses_ptr + last, is_block, 0.0), 0)
    wanted = tl.where(top_p < 1.0, top_p * total * 1.00001, total * 2.0)
    is_top_k = (top_k > 0) & (top_k < vocab_size)
    chosen = tl.full([], steps - 1, tl.int32)
    num_tokens = tl.sum(tl.load(counts_ptr + last, is_block, 0), 0)
    for down in tl.static_range(1, steps):
        step = steps - 1 - down
        count = tl.sum(tl.load(counts_ptr + step * num_blocks + block, is_block, 0), 0)
        mass = tl.sum(tl.load(masses_ptr + step * num_blocks + block, is_block, 0.0), 0)
        is_enough = tl.where(is_top_k, count >= top_k, mass >= wanted)
        chosen = tl.where(is_enough, step, chosen)
        num_tokens = tl.where(is_enough, count, num_tokens)
    return chosen, num_tokens


@kernel(varying=PARAMETERS)
def threshold_kernel(
    logits_ptr,  # [S, V] float32
    row_max_ptr,  # [S] float32
    temperature_ptr,  # [S] float32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] float64
    floor_ptr,  # [S] float32: log(min_p)
    counts_ptr,  # [S, steps, blocks] int32
    masses_ptr,  # [S, steps, blocks] float64
    vocab_size,
    num_blocks,
    stride_logits,
    steps: tl.constexpr,
    block: tl.constexpr,
):
    """Grid [S, blocks]. Of rows without filters only the last step is written."""
    row = tl.program_id(0).to(tl.int64)
    block_id = tl.program_id(1)
    row_max = tl.load(row_max_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if (tl.abs(row_max) < float("inf")) & (temperature > 0.0):
        floor = tl.load(floor_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        values_ptr = logits_ptr + row * stride_logits
        scaling = (row_max, temperature, floor)
        scaled, is_kept = scaled_logits(values_ptr, block_id * block, vocab_size, scaling, block)
        weights = tl.where(is_kept, tl.exp(scaled), 0.0).to(tl.float64)
        cells = row * steps * num_blocks + block_id
        last = cells + (steps - 1) * num_blocks
        tl.store(counts_ptr + last, tl.sum(is_kept.to(tl.int32), 0))
        tl.store(masses_ptr + last, tl.sum(weights, 0))
        if is_filtered(top_k, top_p, floor, vocab_size):
            for step in range(steps - 1):
                is_above = is_kept & (scaled >= step_floor(step, steps))
                tl.store(counts_ptr + cells + step * num_blocks, tl.sum(is_above.to(tl.int32), 0))
                mass = tl.sum(tl.where(is_above, weights, 0.0), 0)
                tl.store(masses_ptr + cells + step * num_blocks, mass)


@kernel(varying=PARAMETERS)
def gather_kernel(
    logits_ptr,
    row_max_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floor_ptr,
    counts_ptr,
    masses_ptr,
    gathered_ptr,  # [S, max_gathered] float32: logits
    token_ptr,  # [S, max_gathered] int32
    vocab_size,
    num_blocks,
    stride_logits,
    max_gathered: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
    block_blocks: tl.constexpr,
):
    """Grid [S, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    block_id = tl.program_id(1)
    row_max = tl.load(row_max_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    floor = tl.load(floor_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_sampled = (tl.abs(row_max) < float("inf")) & (temperature > 0.0)
    if is_sampled & is_filtered(top_k, top_p, floor, vocab_size):
        counts_ptr += row * steps * num_blocks
        masses_ptr += row * steps * num_blocks
        step, num_tokens = choose_step(
            counts_ptr, masses_ptr, num_blocks, top_k, top_p, vocab_size, steps, block_blocks
        )
        num_above = tl.load(counts_ptr + step * num_blocks + block_id)
        if (num_tokens <= max_gathered) & (num_above > 0):
            blocks = tl.arange(0, block_blocks)
            counts = tl.load(counts_ptr + step * num_blocks + blocks, blocks < block_id, 0)
            values_ptr = logits_ptr + row * stride_logits
            scaling = (row_max, temperature, floor)
            start = block_id * block
            scaled, is_kept = scaled_logits(values_ptr, start, vocab_size, scaling, block)
            is_kept = is_kept & (scaled >= step_floor(step, steps))
            token = start + tl.arange(0, block)
            values = tl.load(values_ptr + token, is_kept, 0.0)
            position = tl.sum(counts, 0) + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            cells = row * max_gathered + position
            tl.store(gathered_ptr + cells, values, mask=is_kept)
            tl.store(token_ptr + cells, token, mask=is_kept)
