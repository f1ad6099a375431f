"""Schedules to run before the first real one: kernels are compiled, and memory needs are seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest, SchedulerOutput

_SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
_GREEDY = SamplingParams(temperature=0.0)


def num_profile_pages(chunked_prefill_size: int, max_running_requests: int, page_size: int) -> int:
    """Pages that `profile_schedules` write to."""
    return -(-chunked_prefill_size // page_size) + 2 * max_running_requests


def profile_schedules(
    chunked_prefill_size: int, max_running_requests: int, longest: int, page_size: int
) -> Iterator[SchedulerOutput]:
    """The largest step first, chunks and decodes together, then small ones of each kind.

    longest: most tokens of one row. Of `num_profile_pages` pages no two rows use the same.
    """
    num_chunks = min(-(-chunked_prefill_size // longest), max_running_requests)
    chunks = [min(longest, chunked_prefill_size - at * longest) for at in range(num_chunks)]
    ones = [1] * (max_running_requests - num_chunks)
    first = _schedule(0, chunks + ones, page_size, _SAMPLED)
    last_page = (
        num_profile_pages(chunked_prefill_size, max_running_requests, page_size) - 1
    )  # no row's
    yield replace(first, cow_copies=np.array([[0, last_page, 1]], np.int32))
    for step, (lengths, params) in enumerate(
        (
            ([min(16, *chunks)], _GREEDY),
            ([1], _GREEDY),
            ([1], _SAMPLED),
            ([1] * max_running_requests, _GREEDY),
        ),
        1,
    ):
        yield _schedule(step, lengths, page_size, params)


def _schedule(
    step: int, lengths: list[int], page_size: int, params: SamplingParams
) -> SchedulerOutput:
    rows, first = [], 0
    for at, length in enumerate(lengths):
        num_pages = -(-length // page_size)
        rows.append(
            ScheduledRequest(
                request_id=f"trial {at}",
                token_ids=np.zeros(length, np.int32),
                start=0,
                page_ids=np.arange(first, first + num_pages, dtype=np.int32),
                sample=SampleSpec(params, at, 1, np.zeros(1, np.int32), ()),
            )
        )
        first += num_pages
    num_decodes = lengths.count(1)
    copies = np.empty((0, 3), np.int32)
    return SchedulerOutput(step, tuple(rows), copies, sum(lengths) - num_decodes, num_decodes)
