"""Structured answers of a model on two ranks, which are those of one."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve import Runtime, SamplingParams
from radixserve.runner.cuda_runner import CudaModelRunner
from radixserve.runner.tensor_parallel.runner import TPModelRunner

pytest.importorskip("llguidance")


class OnDevice(Runtime):
    def _make_runner(self, model_path: str) -> Any:
        return TPModelRunner(model_path, self.config, CudaModelRunner)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Runtime, OnDevice])
def test_two_ranks_give_the_answers_of_one(kind: type[Runtime]) -> None:
    forms: list[dict[str, Any]] = [
        {"regex": "[a-c]{2,9}-[0-9]{3}"},
        {"json": {"enum": ["left", {"a": [1, None]}]}},
        {"choice": ["yes", "no"]},
    ]
    params = [
        SamplingParams(max_tokens=40, seed=at, temperature=float(at % 2), structured=form)
        for at, form in enumerate(forms * 3)
    ]
    prompts = ["Once upon a time", "Hello", "One day"] * 3
    with Runtime("demo", num_pages=2_000) as one:
        wanted = [found.token_ids for found in one.generate(prompts, params)]
    with kind(
        "demo", device="cpu", dtype="float32", num_pages=2_000, max_running_requests=8,
        chunked_prefill_size=64, tensor_parallel_size=2,
    ) as rt:  # fmt: skip
        assert [found.token_ids for found in rt.generate(prompts, params)] == wanted
