"""radixserve as a contender: `Runtime` and nothing below it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine_contenders import Answer, Job, Unavailable

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.commands.terminal import PARTS

BLOCK = 16  # tokens a page of the hash cache


class Ours:
    """See `Contender`. Settings are the defaults but for the size of the cache."""

    def __init__(self, job: Job, cache: str) -> None:
        page_size = BLOCK if cache == "hash" else 1
        most = job.workload.num_requests + job.num_tokens // page_size + 64
        try:
            self._runtime = Runtime(
                job.folder, dtype=job.dtype, cache=cache, page_size=page_size, num_pages=most
            )
        except InvalidRequest as error:
            raise Unavailable(str(error)) from error
        self._params = SamplingParams(
            max_tokens=job.workload.num_new, temperature=0.0, ignore_eos=True
        )
        self.num_prefilled = 0

    def serve(self, prompts: list[list[int]], sessions: Sequence[int]) -> list[Answer]:  # noqa: ARG002
        """Times are the Runtime's own, which begin when the engine's thread has the request; what
        the calls take beyond them is added to each, so that none is too short."""
        start = time.perf_counter()
        outs = self._runtime.generate(prompts, self._params, progress=False)
        beyond = time.perf_counter() - start - max(out.metrics.total_s for out in outs)
        self.num_prefilled += sum(out.usage.computed_tokens for out in outs)
        return [Answer(out.token_ids, out.metrics.ttft_s + beyond) for out in outs]

    def reset(self) -> None:
        self._runtime.flush_cache()
        self.num_prefilled = 0

    def stats(self) -> dict[str, float]:
        told = self._runtime.cache_stats()
        return {name: told[name] for name in ("steps", *(f"{part}_s" for part in PARTS))}

    def close(self) -> None:
        self._runtime.close()
