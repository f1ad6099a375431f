"""Hints through `Runtime`: the answers, what later requests find, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import Hint, HintAnswer, InvalidRequest, Runtime, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.pacing import wait_until

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
PROMPT = [5, 9, 7, *range(20, 57)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def shared_rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=256, max_hint_seconds=60.0) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime) -> Iterator[Runtime]:
    shared_rt.flush_cache()
    yield shared_rt
    shared_rt.check()
    shared_rt.flush_cache()
    stats = shared_rt.cache_stats()
    assert stats["hints"] == stats["pages_pinned"] == stats["pages_locked"] == 0


def cached(rt: Runtime, prompt: Any, namespace: str = "") -> int:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, namespace=namespace)
    return rt.generate(prompt, params).usage.cached_tokens


def test_retain_outlives_a_pool_full_of_others(rt: Runtime) -> None:
    rt.generate(PROMPT, ONE)
    answer = rt.hint("retain", PROMPT, seconds=30)
    assert answer == HintAnswer("retain", "accepted", 40, 40, 30.0, "")
    for at in range(20):
        rt.generate([60 + at] * 40, ONE)
    assert rt.cache_stats()["evicted_tokens"] > 300
    assert cached(rt, PROMPT) == 39


def test_pin_demote_and_a_session(rt: Runtime) -> None:
    rt.submit([PROMPT], ONE, session="agent").get()
    answer = rt.hint("pin", session="agent", seconds=3600)
    assert (answer.answer, answer.tokens_covered, answer.seconds) == ("clipped", 40, 60.0)
    assert rt.cache_stats()["pages_pinned"] == 40
    assert rt.hint("demote", PROMPT).answer == "rejected", "an open session keeps it"
    assert rt.cache_stats()["pages_pinned"] == 0
    assert rt.hint("demote", session="agent").answer == "accepted"
    assert rt.eviction_preview(1)[0]["reason"] == "only closed sessions reached it"
    assert rt.hint("demote", session="agent").answer == "missing"


def test_prefetch_and_share(rt: Runtime) -> None:
    assert rt.hint("retain", PROMPT).answer == "missing"
    assert rt.hint("prefetch", PROMPT).answer in ("accepted", "deferred")
    wait_until(lambda: not rt.cache_stats()["prefetches"])
    assert rt.hint("share", PROMPT).answer == "accepted"
    other = rt.generate([*PROMPT, 3], SamplingParams(temperature=0.0, namespace="b", max_tokens=8))
    assert other.usage.cached_tokens == 40
    rt.flush_cache()
    cold = rt.generate([*PROMPT, 3], SamplingParams(temperature=0.0, namespace="b", max_tokens=8))
    assert cold.usage.cached_tokens == 0
    assert cold.token_ids == other.token_ids


def test_whole_pages_are_copied(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, namespace="b", ignore_eos=True)
    with Runtime(str(folder), num_pages=64, page_size=8) as rt:
        rt.generate(PROMPT[:38], ONE)
        assert rt.hint("share", PROMPT).tokens_covered == 32
        shared = rt.generate(PROMPT, params)
        assert shared.usage.cached_tokens == 32
        rt.flush_cache()
        cold = rt.generate(PROMPT, params)
        assert cold.usage.cached_tokens == 0
        assert cold.token_ids == shared.token_ids
        rt.check()


def test_messages_and_text(rt: Runtime) -> None:
    rt.generate("a few words to keep", ONE)
    assert rt.hint("retain", "a few words to keep").answer == "accepted"


def test_several_at_once_and_for_asyncio(rt: Runtime) -> None:
    rt.generate(PROMPT, ONE)
    ids = rt.tokenize(PROMPT)
    hints = [
        Hint("retain", ids, owner="ann", budget_tokens=10),
        Hint("retain", ids, namespace="b"),
        Hint("pin", None, session="nobody"),
    ]
    answers = rt.apply_hints(hints)
    assert [one.answer for one in answers] == ["clipped", "missing", "missing"]

    async def ask() -> HintAnswer:
        return await rt.ahint("pin", PROMPT, seconds=1)

    assert asyncio.run(ask()).answer == "accepted"
    asyncio.run(rt.aapply_hints([]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verb": "keep"}, "verb must be one of"),
        ({"token_ids": None}, "a prompt or a session"),
        ({"token_ids": [-1]}, "out of range"),
        ({"budget_tokens": -1}, "budget_tokens must be >= 0"),
        ({"owner": 5}, "owner must be a string"),
    ],
)
def test_hints_are_checked(rt: Runtime, fields: dict[str, Any], message: str) -> None:
    made = Hint(**{"verb": "pin", "token_ids": [1, 2], **fields})
    with pytest.raises(InvalidRequest, match=message):
        rt.apply_hints([Hint("pin", None, session="s"), made])
    with pytest.raises(InvalidRequest, match="a hint must be a Hint"):
        rt.apply_hints(["pin"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"verb": "keep"}, "verb must be one of share, prefetch"),
        ({"seconds": -1}, "seconds must be a number >= 0"),
        ({"seconds": "1"}, "seconds must be"),
        ({"verb": "demote", "seconds": 1}, "seconds belong to share, pin, retain"),
        ({"verb": "prefetch", "seconds": 1}, "seconds belong to"),
        ({"verb": "demote", "max_tokens": 1}, "max_tokens does not go with demote"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"session": "a"}, "a prompt or a session"),
        ({"prompt": None}, "a prompt or a session"),
        ({"session": 5}, "session must be a string"),
        ({"prompt": []}, "the prompt is empty"),
        ({"namespace": 5}, "namespace must be a string"),
    ],
)
def test_what_is_refused(rt: Runtime, call: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rt.hint(**{"verb": "retain", "prompt": PROMPT, **call})


def test_with_hash_blocks_only_prefetch_works(folder: Path) -> None:
    with Runtime(str(folder), num_pages=64, cache="hash") as rt:
        assert rt.hint("pin", PROMPT).answer == "rejected"
        assert rt.hint("prefetch", PROMPT).answer == "accepted"
        wait_until(lambda: rt.lookup(np.array(PROMPT)).cached_len == 32)


def test_a_prefetch_that_is_left_does_not_hold_up_the_end(folder: Path) -> None:
    with Runtime(str(folder), num_pages=4096, chunked_prefill_size=1) as rt:
        for at in range(5):
            rt.hint("prefetch", [at] * 500)
        assert rt.generate(PROMPT, ONE).usage.cached_tokens == 0
