"""Activated adapters read the model's K/V before their invocation, to the exact token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from radixserve import BeamParams, InvalidRequest, Runtime, search
from tests.adapters.peft_adapters import applied, greedy, make_adapter
from tests.adapters.test_adapters import COUNT, params, prompt_of
from tests.checkpoints import load_reference, make_checkpoint

INVOCATION = [250, 7, 251]
ANSWER = 5


class Case(NamedTuple):
    folder: Path
    adapter: Path
    model: Any


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("activated")
    checkpoint = make_checkpoint(folder / "model", "llama")
    model = load_reference(checkpoint)
    adapter = make_adapter(folder / "judge", model, 1, alora_invocation_tokens=INVOCATION)
    return Case(checkpoint, adapter, model)


@pytest.fixture(scope="module", params=[1, 16])
def shared(request: pytest.FixtureRequest, case: Case) -> Iterator[Runtime]:
    adapters = {"judge": str(case.adapter)}
    with Runtime(
        str(case.folder), num_pages=2048, page_size=request.param, adapters=adapters
    ) as rt:
        yield rt


@pytest.fixture
def rt(shared: Runtime) -> Iterator[Runtime]:
    shared.flush_cache()
    yield shared
    shared.check()


def test_it_computes_from_the_last_invocation_on(rt: Runtime, case: Case) -> None:
    prompt = [*prompt_of(1, 20), *INVOCATION, *prompt_of(2, 11), *INVOCATION, *prompt_of(3, 4)]
    out = rt.generate(prompt, params("judge"))
    with applied(case.model, case.adapter, start=34):
        tokens, logprobs = greedy(case.model, prompt, COUNT)
    assert out.token_ids == tokens
    assert out.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert rt.lookup(prompt).cached_len == 34
    assert rt.lookup(prompt, adapter="judge").cached_len == len(prompt) - 1
    again = rt.generate(prompt, params("judge"))
    assert again.usage.cached_tokens == len(prompt) - 1
    assert again.logprobs == out.logprobs


def test_without_an_invocation_it_is_the_model(rt: Runtime) -> None:
    prompt = prompt_of(1, 30)
    plain = rt.generate(prompt, params())
    out = rt.generate(prompt, params("judge"))
    assert out.usage.cached_tokens == 29
    assert out.logprobs == plain.logprobs


def test_chats_of_eight_turns(rt: Runtime, case: Case) -> None:
    history: list[int] = []
    judged = []
    for turn in range(8):
        history += prompt_of(turn, 9 + turn)
        history += rt.generate(history, params(max_tokens=ANSWER)).token_ids
        prompt = [*history, *INVOCATION]
        out = rt.generate(prompt, params("judge"))
        # The answer's last token is the first that was not computed.
        assert out.usage.computed_tokens == len(INVOCATION) + 1
        judged.append((prompt, out))
    for prompt, out in judged:
        rt.flush_cache()
        cold = rt.generate(prompt, params("judge"))
        assert cold.usage.cached_tokens == 0
        assert (cold.token_ids, cold.logprobs) == (out.token_ids, out.logprobs)
    with applied(case.model, case.adapter, start=len(prompt) - len(INVOCATION)):
        assert greedy(case.model, prompt, COUNT)[0] == out.token_ids


def test_mixed_in_a_batch_and_preempted(case: Case) -> None:
    prompts = [[*prompt_of(seed, 15 + seed), *INVOCATION, *prompt_of(9, seed)] for seed in range(6)]
    each = [params("judge" if seed % 2 else "", max_tokens=24) for seed in range(6)]
    found = []
    for num_pages in (2048, 120):
        settings: dict[str, Any] = {"num_pages": num_pages, "adapters": {"judge": case.adapter}}
        with Runtime(str(case.folder), chunked_prefill_size=7, **settings) as rt:
            found.append([out.logprobs for out in rt.generate(prompts, each)])
            preemptions = rt.cache_stats()["preemptions"]
            rt.check()
    assert preemptions > 0
    assert found[0] == found[1]


def test_several_samples_scores_branches_and_chats(rt: Runtime, case: Case) -> None:
    prompt = [*prompt_of(4, 25), *INVOCATION]
    one, two = rt.generate(prompt, params("judge", n=2, temperature=0.7, seed=1))
    assert two.usage.cached_tokens == len(prompt) - 1
    alone = rt.generate(prompt, params("judge", temperature=0.7, seed=2))
    assert alone.token_ids == two.token_ids
    (yes, _) = rt.score(prompt, [[1], [2, 3]], adapter="judge")
    with applied(case.model, case.adapter, start=25):
        from tests.checkpoints import all_logprobs

        assert yes.logprob == pytest.approx(
            float(all_logprobs(case.model, prompt)[-1, 1]), abs=1e-4
        )
    with rt.branch(prompt, adapter="judge") as branch:
        answer = branch.generate(params(max_tokens=3))
        assert answer.token_ids == rt.generate(prompt, params("judge")).token_ids[:3]
    assert one.token_ids


def test_a_branch_and_its_params_agree(rt: Runtime) -> None:
    """Params name the branch's adapter and namespace, one of them, or none."""
    prompt = [*prompt_of(4, 25), *INVOCATION]
    wanted = rt.generate(prompt, params("judge")).token_ids
    with rt.branch(prompt, adapter="judge", namespace="acme") as branch:
        for adapter, namespace in (("", ""), ("judge", ""), ("", "acme"), ("judge", "acme")):
            (kid,) = branch.fork()
            assert kid.generate(params(adapter, namespace=namespace)).token_ids == wanted
        with pytest.raises(InvalidRequest, match="in namespace 'acme', not 'other'"):
            branch.generate(params("judge", namespace="other"))
    with (
        rt.branch(prompt) as branch,
        pytest.raises(InvalidRequest, match="of the model alone, not"),
    ):
        branch.generate(params("judge"))
    best = search.best_of(rt, prompt, 2, lambda out: len(out.token_ids), params("judge"))
    assert best[0].completion.token_ids == wanted


@pytest.mark.parametrize("page_size", [1, 16])
def test_branches_keep_what_their_forks_computed(case: Case, page_size: int) -> None:
    settings = {"num_pages": 512 // page_size, "page_size": page_size}
    adapters = {"judge": str(case.adapter)}
    with Runtime(str(case.folder), adapters=adapters, **settings) as rt:
        with rt.branch([*INVOCATION, *prompt_of(1, 93)], adapter="judge") as root:
            (kid,) = root.fork()
            kid.generate(params())
            kid.release()
            for seed in range(3, 12):
                rt.generate(prompt_of(seed, 120), params())
            assert root.cached_len >= 95
            rt.check()
            rt.unload_adapter("judge")
            (kid,) = root.fork()
            root.truncate(5)
            kid.release()
        assert rt.cache_stats()["sessions"] == 0


def test_kept_scores_are_its_own(rt: Runtime, case: Case) -> None:
    from tests.checkpoints import all_logprobs

    prompt = [*prompt_of(4, 30), *INVOCATION, *prompt_of(5, 3)]
    own, base = (params(name, max_tokens=1, prompt_logprobs=1) for name in ("judge", ""))
    with applied(case.model, case.adapter, start=30):
        rows = all_logprobs(case.model, prompt)
    wanted = [float(rows[at, token]) for at, token in enumerate(prompt[1:])]
    rt.generate(prompt, base)
    judged = rt.generate(prompt, own)
    assert judged.prompt_logprobs is not None
    assert judged.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    again = rt.generate(prompt, own)
    assert (again.usage.computed_tokens, again.prompt_logprobs) == (1, judged.prompt_logprobs)
    (score,) = rt.score(prompt[:33], [prompt[33:]], adapter="judge")
    assert (score.usage.computed_tokens, score.logprobs) == (1, judged.prompt_logprobs[33:])
    rt.flush_cache()
    _, beside = rt.generate([prompt, prompt], [base, own])
    assert beside.prompt_logprobs == judged.prompt_logprobs


def test_beam_searches(case: Case, tmp_path: Path) -> None:
    plain = make_adapter(tmp_path / "plain", case.model, 1)  # the same weights
    adapters = {"judge": str(case.adapter), "plain": str(plain)}
    own: dict[str, Any] = {"logprobs": None, "max_tokens": 8}
    with Runtime(str(case.folder), num_pages=2048, page_size=4, adapters=adapters) as rt:
        prompt = [*INVOCATION, *prompt_of(4, 25)]
        beams, wanted = (
            rt.beam_search(prompt, beams=BeamParams(width=3), params=params(name, **own))
            for name in ("judge", "plain")
        )
        assert [(out.token_ids, out.score) for out in beams] == [
            (out.token_ids, out.score) for out in wanted
        ]
        prompt = [*prompt_of(4, 25), *INVOCATION]
        summed = BeamParams(width=3, length_penalty=0.0)
        for out in rt.beam_search(prompt, beams=summed, params=params("judge", **own)):
            (score,) = rt.score(prompt, [out.token_ids], adapter="judge")
            assert out.score == pytest.approx(score.logprob, abs=1e-4)
        rt.check()


def test_penalties_and_drafts_see_the_tokens_themselves(case: Case) -> None:
    prompt = [*prompt_of(4, 25), *INVOCATION, *prompt_of(5, 5)]
    settings: dict[str, Any] = {"num_pages": 512, "adapters": {"judge": case.adapter}}
    penalties = {"repetition_penalty": 1.7, "max_tokens": 12}
    with Runtime(str(case.folder), **settings) as rt:
        wanted = rt.generate(prompt, params("judge", **penalties))
    with Runtime(str(case.folder), max_draft_tokens=4, **settings) as rt:
        judged = rt.generate(prompt, params("judge", **penalties))
        plain = [rt.generate(prompt, params(max_tokens=12)).logprobs for _ in range(2)]
    assert judged.token_ids == wanted.token_ids
    assert plain[0] == plain[1]
    counts = np.array(wanted.logprobs)
    assert np.isfinite(counts).all()


def test_a_store_has_the_models_part(case: Case, tmp_path: Path) -> None:
    prompt = [*prompt_of(4, 200), *INVOCATION]
    settings: dict[str, Any] = {
        "num_pages": 1024,
        "adapters": {"judge": case.adapter},
        "kv_store": str(tmp_path),
        "kv_store_write": "finish",
    }
    outs = []
    for _ in range(2):
        with Runtime(str(case.folder), **settings) as rt:
            outs.append(rt.generate(prompt, params("judge")))
    assert outs[0].usage.cached_tokens == 0
    assert outs[1].usage.loaded_tokens == 200
    assert outs[1].logprobs == outs[0].logprobs
