"""Random rows of steps for tests: sequences that grow, share, lose and change pages."""

from __future__ import annotations

import numpy as np

from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest

SPEC = SampleSpec(SamplingParams(temperature=0.0), 0, 1, np.zeros(1, np.int32), ())


def random_rows(
    generator: np.random.Generator, page_size: int, num_rows: int, *, are_decodes: bool = False
) -> list[ScheduledRequest]:
    """Rows of any mix; of one token each, all drawn from, if they are decodes."""
    rows = []
    for at in range(num_rows):
        start = int(generator.integers(0, 40))
        num_new = 1 if are_decodes or generator.random() < 0.4 else int(generator.integers(1, 30))
        num_pages = -(-(start + num_new) // page_size)
        draws = are_decodes or generator.random() < 0.6
        targets = None
        if not are_decodes and generator.random() < 0.3 and num_new > draws:
            count = int(generator.integers(1, num_new - draws + 1))
            targets = generator.integers(0, 50, count).astype(np.int32)
        rows.append(
            ScheduledRequest(
                request_id=f"r{at}",
                token_ids=generator.integers(0, 50, num_new).astype(np.int32),
                start=start,
                page_ids=generator.integers(0, 99, num_pages).astype(np.int32),
                sample=SPEC if draws else None,
                logprob_targets=targets,
            )
        )
    return rows
