"""Several decode steps in one schedule: who can take them together, and what becomes of them.

A step's work on the host is done once for all of them. That pays where steps are short, and changes
no token: rows draw their best tokens, nobody who waits could have started, nobody has to be told
anything before the last one, and none follows one that may have ended a request.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixserve.cache import PrefixCache
from radixserve.scheduler.job import Job
from radixserve.scheduler.plan import StepPlan


def count_steps(running: Iterable[Job], most: int, cache: PrefixCache) -> int:
    """How many steps, up to `most`, all of these can take together: 1 where somebody needs more of
    a step than its best token, or there is no room. O(running)."""
    sequences = []
    for job in running:
        sequence, request, length = job.sequence, job.request, len(job.tokens)
        if job.plain_spec is None or job.first_token_at is None or job.followers:
            return 1
        if request.params.stop or sequence is None or sequence.committed_len != length - 1:
            return 1
        left = min(job.num_prompt + request.params.max_tokens, request.max_len) - length
        if left < most:
            if left < 2:
                return 1
            most = left
        sequences.append(sequence)
    num_pages = sum(sequence.pages_wanted(most) for sequence in sequences)
    return most if sequences and num_pages <= cache.num_available else 1


def plan_steps(plan: StepPlan, running: Iterable[Job], num_steps: int) -> None:
    """A row of each; `count_steps` has said that they can."""
    plan.num_steps = num_steps
    for job in running:
        sequence, length = job.sequence, len(job.tokens)
        assert sequence is not None
        sequence.extend(job.tokens.view(length - 1), num_steps - 1)
        plan.add_steps(job)


def note_steps(job: Job, token_ids: tuple[int, ...]) -> None:
    """One step has computed the job's last token, each further one the token that the one before it
    drew; their K/V is published."""
    tokens, sequence = job.tokens, job.sequence
    assert sequence is not None
    first = len(tokens)
    tokens.extend(token_ids)
    end = len(tokens) - 1  # nothing has computed the last one
    if end > first:
        sequence.settle(tokens.view(first, end))
    sequence.commit(end)


def give_back_rest(job: Job) -> None:
    """Fewer steps were taken than there is room for, and the request goes on."""
    assert job.sequence is not None
    if job.sequence.length > len(job.tokens) - 1:
        job.sequence.truncate(len(job.tokens) - 1)
