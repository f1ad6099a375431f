"""Models with recurrent layers: parity with transformers, exact counts, branches, preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve.errors import InvalidRequest
from tests.checkpoints import make_model
from tests.models.causal_models import tiny_config
from tests.runner.on_device import DeviceRuntime

FAMILIES = ("lfm2", "falcon_h1", "qwen3_next")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RNG = np.random.default_rng(7)
PROMPT = RNG.integers(3, 250, 100).tolist()
INTERVAL = 32


Make = Callable[..., Runtime]
DEVICE: dict[str, Any] = {"device": "cpu", "max_running_requests": 64}
MAKERS: dict[str, Make] = {
    "cpu": Runtime,
    "device": partial(DeviceRuntime, **DEVICE),
    "device, transformers' code": partial(
        DeviceRuntime, overlap=False, model_impl="transformers", **DEVICE
    ),
}  # the last two are the path of a CUDA device, over CPU tensors


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    def make_runtime(model: Any, **settings: Any) -> Runtime:
        options = {"num_pages": 600, "chunked_prefill_size": 40, "checkpoint_interval": INTERVAL}
        return MAKERS[request.param](str(model.folder), **{**options, **settings})

    return make_runtime


def save(family: str, folder: Path) -> Any:
    torch.manual_seed(3)
    model = make_model(tiny_config(family))
    model.folder = folder
    model.save_pretrained(folder)
    return model


@pytest.fixture
def rt(model: Any, make: Make) -> Iterator[Runtime]:
    with make(model) as runtime:
        yield runtime
        runtime.check()


def on_some(shift: int, families: Sequence[str] = FAMILIES) -> pytest.MarkDecorator:
    """Parametrizes a test so that each family runs on one of MAKERS; others are long runs."""
    found = []
    for family, maker in product(families, MAKERS):
        is_short = (families.index(family) + list(MAKERS).index(maker)) % len(MAKERS) == shift
        found.append(pytest.param(family, maker, marks=() if is_short else pytest.mark.long))
    return pytest.mark.parametrize(("model", "make"), found, indirect=True)


@torch.inference_mode()
def check(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Each token is as likely as the best one that the model itself finds, without a cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    table = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    own = table.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float((table.max(-1).values - own).max()) <= 1e-4


def ask(rt: Runtime, prompt: list[int], params: SamplingParams = GREEDY) -> Any:
    return rt.generate([prompt], params)[0]


def test_answers_and_counts(model: Any, rt: Runtime) -> None:
    cold = ask(rt, PROMPT)
    check(model, PROMPT, cold.token_ids)
    assert (cold.usage.cached_tokens, cold.usage.computed_tokens) == (0, len(PROMPT))
    warm = ask(rt, PROMPT)
    assert warm.token_ids == cold.token_ids
    assert (warm.usage.cached_tokens, warm.usage.computed_tokens) == (len(PROMPT) - 1, 1)
    # It goes on from the end of the answer, whose last token has no keys and values yet.
    longer = [*PROMPT, *cold.token_ids, 5, 6, 7]
    more = ask(rt, longer)
    check(model, longer, more.token_ids)
    assert more.usage.cached_tokens == len(PROMPT) + 11
    # Where a prompt leaves the path, the deepest checkpoint before counts.
    other = [*PROMPT[:70], *PROMPT[:9]]
    found = rt.lookup(other)
    assert (found.cached_len, found.reason) == (2 * INTERVAL, "no_checkpoint")
    branched = ask(rt, other)
    check(model, other, branched.token_ids)
    assert branched.usage.cached_tokens == 2 * INTERVAL


@on_some(0)
def test_an_answer_that_ends_at_a_token(model: Any, rt: Runtime) -> None:
    """It is continued from its end, though the step after it may have been launched by then."""
    answer = ask(rt, PROMPT).token_ids
    assert answer is not None
    rt.flush_cache()
    at = next(at for at in range(4, 12) if answer[at] not in answer[:at])
    stop = [answer[at]]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=stop, ignore_eos=True)
    out = ask(rt, PROMPT, params)
    assert out.finish_reason == "stop"
    longer = [*PROMPT, *answer[: at + 1], 5, 6, 7]
    more = ask(rt, longer)
    check(model, longer, more.token_ids)
    assert more.usage.cached_tokens == len(PROMPT) + at


@on_some(1)
def test_requests_together_and_cache_off(model: Any, rt: Runtime, make: Make) -> None:
    prompts = [[*PROMPT[: 60 + 7 * at], at + 3, at + 4] for at in range(6)]
    for prompt, one in zip(prompts, rt.generate(prompts, GREEDY), strict=True):
        check(model, prompt, one.token_ids)
    with make(model, cache="off") as off:
        for prompt, one in zip(prompts, off.generate(prompts, GREEDY), strict=True):
            check(model, prompt, one.token_ids)
        assert off.cache_stats()["reused_tokens"] == 0


@on_some(0, ("jamba", "nemotron_h"))
def test_mixers_that_treat_single_tokens_otherwise(model: Any, rt: Runtime, make: Make) -> None:
    test_answers_and_counts(model, rt)
    test_requests_together_and_cache_off(model, rt, make)


@on_some(2)
def test_branches_and_samples(model: Any, rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        root.generate(GREEDY)
        kids = root.fork(2)
        kids[0].extend([9, 10])
        kids[1].extend([11])
        for kid in kids:
            tokens = [int(token) for token in kid.tokens]
            check(model, tokens, kid.generate(GREEDY).token_ids)
            kid.truncate(len(PROMPT) - 5)
            tokens = [int(token) for token in kid.tokens]
            check(model, tokens, kid.generate(GREEDY).token_ids)
            kid.release()
    four = SamplingParams(temperature=0.9, max_tokens=8, n=4, seed=2, ignore_eos=True)
    cold, warm = rt.generate([PROMPT[:50]], four)[0], rt.generate([PROMPT[:50]], four)[0]
    assert [one.token_ids for one in cold] == [one.token_ids for one in warm]


@on_some(1)
def test_a_small_pool_preempts_and_evicts(model: Any, make: Make) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [RNG.integers(3, 250, 50).tolist() for _ in range(8)]
    settings = {"num_pages": 180, "num_states": 12, "max_running_requests": 6}
    with make(model, admission="greedy", **settings) as rt:
        found = rt.generate(prompts, params)
        for prompt, one in zip(prompts, found, strict=True):
            check(model, prompt, one.token_ids)
            usage = one.usage
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens == 50
        assert rt.cache_stats()["preemptions"] > 0
        assert rt.memory.states_bytes == 12 * rt.model.state_bytes > 0
        rt.check()


def test_the_hash_cache_refuses(model: Any, make: Make) -> None:
    with pytest.raises(InvalidRequest, match="keeps no states"):
        make(model, cache="hash")
