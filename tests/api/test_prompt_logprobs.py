"""Log-probabilities of the prompt against transformers, with the cache cold, warm and off."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from radixserve import Completion, InvalidRequest, Runtime, SamplingParams
from tests.checkpoints import all_logprobs, load_reference, make_checkpoint
from tests.pacing import held, until

PROMPT = list(range(5, 45))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prompts"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_reference(folder)


def params(num_top: int | None = 2, **fields: Any) -> SamplingParams:
    fields = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(prompt_logprobs=num_top, **fields)


def check(model: Any, prompt: list[int], out: Completion, num_top: int = 2) -> None:
    table = all_logprobs(model, prompt)
    own = [float(table[at, token]) for at, token in enumerate(prompt[1:])]
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert out.prompt_logprobs[1:] == pytest.approx(own, abs=TOLERANCE)
    assert out.prompt_ranks is not None
    assert out.prompt_ranks[0] is None
    for at, (rank, logprob) in enumerate(zip(out.prompt_ranks[1:], own, strict=True)):
        assert rank is not None
        num_above = [int((table[at] > logprob + off).sum()) for off in (TOLERANCE, -TOLERANCE)]
        assert num_above[0] < rank <= num_above[1] + 1
    if not num_top:
        assert out.prompt_top_logprobs is None
        return
    assert out.prompt_top_logprobs is not None
    assert out.prompt_top_logprobs[0] is None
    assert len(out.prompt_top_logprobs) == len(prompt)
    for at, top in enumerate(out.prompt_top_logprobs[1:]):
        assert top is not None
        best = table[at].topk(num_top)
        assert list(top.values()) == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert all(float(table[at, t]) == pytest.approx(v, abs=TOLERANCE) for t, v in top.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"page_size": 1, "chunked_prefill_size": 3},
        {"page_size": 16, "chunked_prefill_size": 7},
        {"page_size": 2, "cache": "off"},
        {"page_size": 16, "cache": "hash"},
    ],
    ids=str,
)
def test_cold_and_warm(folder: Path, model: Any, settings: dict[str, Any]) -> None:
    size = settings["page_size"]
    with Runtime(str(folder), num_pages=640 // size, **settings) as rt:
        plain = rt.generate(PROMPT, params(None, logprobs=0))
        assert plain.prompt_logprobs is None
        for num_top in (2, 0):
            out = rt.generate(PROMPT, params(num_top, logprobs=0))
            check(model, PROMPT, out, num_top)
            assert out.token_ids == plain.token_ids
            assert out.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)
            is_read = not num_top and "cache" not in settings  # the first one kept the scores
            assert out.usage.computed_tokens == (1 if is_read else len(PROMPT))
        rt.check()
        assert rt.cache_stats()["sequences"] == 0


def test_beside_others_in_a_small_pool(folder: Path, model: Any) -> None:
    rng = random.Random(0)
    prompts = [PROMPT[: rng.randint(1, 40)] + [rng.randrange(256) for _ in range(9)]
               for _ in range(12)]  # fmt: skip
    settings: Any = {"chunked_prefill_size": 16, "max_running_requests": 6, "admission": "greedy"}
    with Runtime(str(folder), num_pages=130, **settings) as rt:
        alone = [rt.generate(prompt, params(None, max_tokens=20)).token_ids for prompt in prompts]
        mixed = [params(3 if at % 2 else None, max_tokens=20) for at in range(len(prompts))]

        async def run() -> list[Any]:
            searches = [rt.abeam_search(prompt, 3, 6) for prompt in prompts[:3]]
            return await asyncio.gather(rt.agenerate(prompts, mixed), *searches)

        outs = asyncio.run(run())[0]
        for at, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            assert out.token_ids == alone[at]
            if at % 2:
                check(model, prompt, out, 3)
            else:
                assert out.prompt_logprobs is None
        assert rt.cache_stats()["preemptions"] > 0
        rt.check()


def test_several_completions(folder: Path, model: Any) -> None:
    with Runtime(str(folder), num_pages=400) as rt:
        for num_computed, fields in ((len(PROMPT), {"n": 3}), (1, {"n": 2, "best_of": 4})):
            before = rt.cache_stats()["prefilled_tokens"]
            outs = rt.generate(PROMPT, params(temperature=1.0, seed=3, **fields))
            prefilled = rt.cache_stats()["prefilled_tokens"] - before
            assert prefilled == num_computed + params(**fields).num_samples - 1
            for out in outs:
                check(model, PROMPT, out)
        rt.check()


def test_streams_and_short_prompts(folder: Path, model: Any) -> None:
    with Runtime(str(folder), num_pages=400) as rt:
        *_, last = rt.stream(PROMPT, params())
        assert last.completion is not None
        check(model, PROMPT, last.completion)
        out = rt.generate([7], params())
        assert out.prompt_logprobs == out.prompt_top_logprobs == [None]
        check(model, [7, 8], rt.generate([7, 8], params()))


def test_an_aborted_one_says_what_it_knows(folder: Path) -> None:
    with Runtime(str(folder), num_pages=600, chunked_prefill_size=1) as rt:

        async def main() -> Completion:
            task = asyncio.ensure_future(
                rt.agenerate(PROMPT * 8, params(max_tokens=100), request_id="mine")
            )
            await until(lambda: rt.cache_stats()["running"] == 1)
            rt.abort("mine")
            return await task

        with held(rt):
            out = asyncio.run(main())
        assert out.finish_reason == "abort"
        assert out.prompt_logprobs is not None
        assert len(out.prompt_logprobs) == len(PROMPT) * 8
        rt.check()


def test_wrong_ones() -> None:
    for value in (-1, 2**20 + 1, True, "2"):
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]
