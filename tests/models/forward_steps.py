"""Steps of a model without a scheduler."""

from __future__ import annotations

import random

import numpy as np

from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest

VOCAB = 101
SAMPLED = SampleSpec(SamplingParams(), 0, 1, np.ones(1, np.int32), ())


def forward_steps(
    seed: int, page_size: int, num_pages: int = 1_500, vocab: int = VOCAB
) -> list[list[ScheduledRequest]]:
    """Chunks and decodes of sequences that fork off each other, mixed; some sample, some score."""
    rng = random.Random(seed)
    unused = iter(rng.sample(range(num_pages), num_pages))
    sequences: list[tuple[list[int], list[int]]] = []  # pages, and [tokens computed]
    plan = []
    for _ in range(9):
        if len(sequences) < 6:
            pages, done = [], 0
            if sequences and rng.random() < 0.6:
                other, (num_done,) = rng.choice(sequences)
                whole = rng.randint(0, num_done // page_size)
                pages, done = other[:whole], whole * page_size
            sequences.append((pages, [done]))
        rows = []
        for number, (pages, at) in enumerate(sequences):
            if rng.random() < 0.2 and rows:
                continue
            count = rng.choice([1, 1, 1, rng.randint(2, 9), rng.randint(20, 70)])
            while len(pages) * page_size < at[0] + count:
                pages.append(next(unused))
            ids = np.array([rng.randrange(vocab) for _ in range(count)], np.int32)
            used = np.array(pages[: -(-(at[0] + count) // page_size)], np.int32)
            sample = SAMPLED if rng.random() < 0.7 or number == 0 else None
            targets = ids[:2] if count > 2 and rng.random() < 0.3 else None
            rows.append(ScheduledRequest(f"r{number}", ids, at[0], used, sample, targets))
            at[0] += count
        rng.shuffle(rows)
        if not any(row.sample or row.logprob_targets is not None for row in rows):
            rows[0] = rows[0]._replace(sample=SAMPLED)
        plan.append(rows)
    return plan
