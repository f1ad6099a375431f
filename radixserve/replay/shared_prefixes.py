"""`SharedPrefixes`: how much prompts have in common, without a cache: blocks and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Ints, Trace

BLOCK_SIZE = 16  # of vLLM


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """What prompts have in common. A block is a full one of a prompt, together with all before it.

    distinct_blocks     different blocks of all prompts
    shared_blocks       those of them that are in two prompts or more
    mean_shared_prefix  mean over the prompts of the leading tokens that another one begins with,
                        earlier or later
    mean_unique         mean of the other tokens of a prompt
    mean_reusable       mean over the requests of the part of a prompt, 0.0 to 1.0, that an
                        unlimited cache reuses
    """

    block_size: int
    distinct_blocks: int
    shared_blocks: int
    mean_shared_prefix: float
    mean_unique: float
    mean_reusable: float


def shared_prefixes(trace: Trace, paths: PathTable, block_size: int = BLOCK_SIZE) -> SharedPrefixes:
    """Count what the prompts of a trace have in common. O(segments on all paths).

    A prompt contains a segment of its path wholly or, if that begins with the prompt's last token,
    only its first token.
    """
    num_whole = np.zeros(len(paths.lengths), np.int64)  # by segment: prompts that contain it
    num_first = np.zeros(len(paths.lengths), np.int64)  # and its first token
    ends = paths.starts + paths.lengths
    for request in range(len(paths)):
        path, num_prompt = paths.path(request), trace.num_prompt[request]
        begun = path[paths.starts[path] < num_prompt]
        num_first[begun] += 1
        num_whole[begun[ends[begun] <= num_prompt]] += 1
    prefixes = np.zeros(len(paths), np.int64)
    for request in range(len(paths)):
        path, num_prompt = paths.path(request), trace.num_prompt[request]
        begun = path[paths.starts[path] < num_prompt]
        is_whole = ends[begun] <= num_prompt
        in_others = np.where(is_whole, num_whole[begun], num_first[begun]) > 1
        sizes = np.where(is_whole, paths.lengths[begun], 1)
        # A segment may be in another prompt with its first token only.
        sizes = np.where(in_others, sizes, np.minimum(sizes, num_first[begun] > 1))
        prefixes[request] = sizes.sum()
    firsts = (paths.starts + 1) % block_size == 0
    inner = _num_ends(ends, block_size) - _num_ends(paths.starts + 1, block_size)
    return SharedPrefixes(
        block_size,
        _count(inner, num_whole, 1) + _count(firsts, num_first, 1),
        _count(inner, num_whole, 2) + _count(firsts, num_first, 2),
        float(prefixes.mean()),
        float((trace.num_prompt - prefixes).mean()),
        float((paths.reusable / trace.num_prompt).mean()),
    )


def _num_ends(positions: Ints, block_size: int) -> Ints:
    """The number of blocks that end at or before each position."""
    return positions // block_size


def _count(blocks: np.ndarray, num_prompts: Ints, least: int) -> int:
    """The blocks in segments that at least so many prompts contain."""
    return int(blocks[num_prompts >= least].sum())
