"""Weights that change under adapters, stores, drafts and kept scores: whose K/V is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from radixserve import Completion, Runtime, SamplingParams
from tests.adapters.peft_adapters import make_adapter
from tests.adapters.test_activated import INVOCATION
from tests.adapters.test_adapters import params, prompt_of
from tests.checkpoints import load_reference, make_checkpoint

PROMPT = prompt_of(1, 40)
JUDGED = [*PROMPT, *INVOCATION]


class Case(NamedTuple):
    first: str
    second: str  # the same model with other weights
    adapters: dict[str, str]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("epochs")
    first, second = (
        make_checkpoint(root / f"model{seed}", "llama", seed=seed) for seed in range(2)
    )
    model = load_reference(first)
    sql = make_adapter(root / "sql", model, 1)
    judge = make_adapter(root / "judge", model, 2, alora_invocation_tokens=INVOCATION)
    return Case(str(first), str(second), {"sql": str(sql), "judge": str(judge)})


def answers(rt: Runtime) -> list[Completion]:
    """Of the model, an adapter and an activated one, one after the other."""
    asked = ((PROMPT, ""), (PROMPT, "sql"), (JUDGED, "judge"))
    return [rt.generate(prompt, params(name)) for prompt, name in asked]


def bits(outs: list[Completion]) -> list[Any]:
    return [(out.token_ids, out.logprobs) for out in outs]


@pytest.mark.parametrize("settings", [{}, {"page_size": 16}, {"dtype": "bfloat16"}])
def test_an_update_changes_the_base_under_adapters(case: Case, settings: dict[str, Any]) -> None:
    settings = {"num_pages": 1024, "adapters": case.adapters, **settings}
    with Runtime(case.second, **settings) as other:
        wanted = answers(other)
    with Runtime(case.first, **settings) as rt:
        old = answers(rt)
        rt.update_weights(case.second)
        assert rt.lookup(PROMPT, adapter="sql")[:2] == (0, "epoch")
        assert rt.lookup(JUDGED, adapter="judge")[:2] == (0, "epoch")
        new = answers(rt)
        assert bits(new) == bits(wanted)
        assert bits(new) != bits(old)
        assert [out.usage.cached_tokens for out in new] == [0, 0, len(PROMPT)]
        assert all(out.miss is not None and out.miss.reason == "epoch" for out in new[:2])
        rt.update_weights(case.first)
        again = answers(rt)
        assert bits(again) == bits(old)
        assert [out.usage.cached_tokens for out in again] == [39, 39, 42]
        rt.unload_adapter("sql")
        assert all("\0sql" not in str(name) for name in rt.cache_tree()["namespaces"])
        rt.check()
        rt.update_weights(case.second)  # it left that epoch, too
        assert all("\0sql" not in str(name) for name in rt.cache_tree()["namespaces"])
        rt.check()


@pytest.mark.parametrize("kv", ["recompute", "stale"])
def test_open_requests_of_adapters_continue(case: Case, kv: Any) -> None:
    settings: dict[str, Any] = {"num_pages": 2048, "adapters": case.adapters}
    long: dict[str, Any] = {"max_tokens": 200}
    for prompt, name in ((PROMPT, "sql"), (JUDGED, "judge")):
        with Runtime(case.first, **settings) as rt:
            chunks = rt.stream(prompt, params(name, **long))
            for _ in range(3):
                next(chunks)
            rt.update_weights(case.second, kv=kv)
            *_, last = chunks
            out = last.completion
            assert out is not None
            assert [one.kv for one in out.weight_epochs] == ["computed", kv]
            num_old = out.weight_epochs[0].end
            more = prompt + out.token_ids[:num_old]
            found = rt.lookup([*prompt, *out.token_ids], adapter=name).cached_len
            assert found == (len(prompt) + 199 if kv == "recompute" else 0)
            rest = rt.generate(more, params(name, max_tokens=200 - num_old))
            rt.check()
        if kv == "recompute":
            assert rest.token_ids == out.token_ids[num_old:]
            assert out.logprobs is not None
            assert rest.logprobs == out.logprobs[num_old:]


def test_a_flush_of_a_tenant_drops_all_that_is_its(case: Case) -> None:
    with Runtime(case.first, num_pages=2048, adapters=case.adapters) as rt:
        for folder in (case.second, case.first):
            rt.update_weights(folder)
            for namespace in ("acme", "acme/salt", "other"):
                rt.generate(PROMPT, params(namespace=namespace))
                rt.generate(PROMPT, params("sql", namespace=namespace))
        rt.flush_cache("acme")
        for folder in (case.first, case.second):
            rt.update_weights(folder)
            for name in ("", "sql"):
                assert rt.lookup(PROMPT, "acme", adapter=name).cached_len == 0
                assert rt.lookup(PROMPT, "acme/salt", adapter=name).cached_len == 0
                assert rt.lookup(PROMPT, "other", adapter=name).cached_len == 39
        rt.check()


def test_a_miss_names_the_adapter(case: Case) -> None:
    with Runtime(case.first, num_pages=1024, adapters=case.adapters) as rt:
        rt.generate(JUDGED, params("sql"))
        assert rt.lookup(JUDGED).reason == "adapter"
        rt.generate(JUDGED, params())
        found = rt.lookup(JUDGED, adapter="judge", compare_namespaces=False)
        assert found[:3] == (len(PROMPT), "adapter", len(PROMPT))
        out = rt.generate(JUDGED, params("judge"))
        assert out.miss is not None
        assert out.miss[:5] == (len(PROMPT), "adapter", len(PROMPT), None, None)
        found = rt.lookup([*JUDGED, 3, 4], adapter="judge")
        assert found.reason == "diverged"
        assert (found.expected, found.found) == (out.token_ids[0], 3)  # without marks


def test_the_store_follows_weights_and_adapters(case: Case, tmp_path: Path) -> None:
    prompt = PROMPT * 5
    settings: dict[str, Any] = {
        "num_pages": 2048,
        "adapters": case.adapters,
        "kv_store": str(tmp_path),
        "kv_store_write": "finish",
    }
    with Runtime(case.first, **settings) as rt:
        old = rt.generate(prompt, params("sql", namespace="acme"))
        rt.generate(prompt, params(namespace="acme/salt"))
        assert wait_for_writes(rt) >= 2 * len(prompt)
        rt.update_weights(case.second)
        new = rt.generate(prompt, params("sql", namespace="acme"))
        assert new.usage.loaded_tokens == 0
    for folder, wanted in ((case.second, new), (case.first, old)):
        with Runtime(folder, **settings) as rt:
            out = rt.generate(prompt, params("sql", namespace="acme"))
            assert out.usage.loaded_tokens == len(prompt) - 1
            assert bits([out]) == bits([wanted])
    with Runtime(case.first, **settings) as rt:
        rt.update_weights(case.second)
        rt.flush_cache("acme")  # of both weights, of the adapter and below the salt
    for folder in (case.first, case.second):
        with Runtime(folder, **settings) as rt:
            for own in (params("sql", namespace="acme"), params(namespace="acme/salt")):
                assert rt.generate(prompt, own).usage.loaded_tokens == 0


def wait_for_writes(rt: Runtime) -> int:
    from tests.pacing import wait_until

    def written() -> int:
        stats: Any = rt.cache_stats()
        return int(stats["kv_store"]["written_tokens"])

    before = -1
    wait_until(lambda: written() >= 400)
    while (now := written()) != before:
        before = now
    return now


def test_drafts_of_old_weights_change_nothing(case: Case) -> None:
    """The text of an old epoch is guessed from at most; what is accepted is the new weights'."""
    long = params(max_tokens=60)
    repeated = PROMPT * 3
    with Runtime(case.second, num_pages=2048) as other:
        wanted = other.generate(repeated, long)
    with Runtime(case.first, num_pages=2048, max_draft_tokens=8) as rt:
        old = [rt.generate(repeated, long) for _ in range(2)]
        assert bits(old[:1]) == bits(old[1:])
        rt.update_weights(case.second)
        new = [rt.generate(repeated, long) for _ in range(2)]
        assert bits(new) == bits([wanted] * 2)
        rt.update_weights(case.first)
        assert bits([rt.generate(repeated, long)]) == bits(old[:1])
        chunks = rt.stream([7, *repeated], params(max_tokens=150))
        for _ in range(3):
            next(chunks)
        rt.update_weights(case.second)
        *_, last = chunks
        assert last.completion is not None
        num_old = last.completion.weight_epochs[0].end
        head = [7, *repeated, *last.completion.token_ids[:num_old]]
        rest = rt.generate(head, params(max_tokens=150 - num_old))
        assert rest.token_ids == last.completion.token_ids[num_old:]
        rt.check()


def test_scores_leave_with_their_tokens_in_each_epoch(case: Case) -> None:
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with Runtime(case.first, num_pages=120) as rt:
        old = rt.generate(PROMPT, scored)
        rt.update_weights(case.second)
        new = rt.generate(PROMPT, scored)
        assert new.usage.computed_tokens == len(PROMPT)
        rt.update_weights(case.first)
        again = rt.generate(PROMPT, scored)
        assert (again.usage.computed_tokens, again.prompt_logprobs) == (1, old.prompt_logprobs)
        for seed in range(2, 6):  # evicts all of both epochs
            rt.generate(prompt_of(seed, 60), params())
        assert rt.cache_stats()["old_epoch_pages"] == 0
        for folder, wanted in ((case.second, new), (case.first, old)):
            rt.update_weights(folder)
            found = rt.generate(PROMPT, scored)
            assert found.usage.computed_tokens == len(PROMPT)
            assert found.prompt_logprobs == wanted.prompt_logprobs
        rt.check()
