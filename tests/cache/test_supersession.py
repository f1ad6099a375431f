"""What a session has left behind goes first; what it comes back to stays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixserve.cache import CacheSequence, RadixCache
from radixserve.retention.sessions import RadixSession
from tests.cache.test_sessions import Clock, block, serve

SYSTEM = block(1, 50)


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(1_000, clock=Clock())


def cached(cache: RadixCache, tokens: list[int]) -> int:
    return cache.lookup(tokens).cached_len


@pytest.mark.parametrize("is_named", [False, True])
def test_after_a_compaction_other_prompts_stay(cache: RadixCache, is_named: bool) -> None:
    """The dead branch of 349 tokens goes, and both prompts in use stay."""
    session = cache.open_session("agent") if is_named else None
    live = block(2, 200), block(3, 200)
    serve(cache, SYSTEM + block(7))
    serve(cache, SYSTEM + block(4, 349), session)
    for prompt in live:
        serve(cache, prompt)
    serve(cache, SYSTEM + block(5, 100), session)  # a short history instead of the long one
    serve(cache, block(6, 400))  # there is room for 91
    assert [cached(cache, prompt) for prompt in live] == [199, 199]
    assert cached(cache, SYSTEM + block(5, 100)) == 149
    assert cache.stats()["superseded_tokens"] == 349 * is_named


KINDS = {  # what a session's prompt was, and what the next one is
    "compaction": (SYSTEM + block(2, 80), SYSTEM + block(3)),
    "thoughts dropped": (SYSTEM + block(2) + block(3, 70), SYSTEM + block(2) + block(4)),
    "an edited turn": (SYSTEM + block(2) + block(3) + block(4), SYSTEM + block(5)),
    "a regenerated turn": (SYSTEM + block(2) + block(3, 30), SYSTEM + block(2)),
    "other tools": (block(1) + block(2, 90), block(1) + block(3, 90)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_each_kind_of_past_loses_its_lease_and_goes_first(kind: str, page_size: int) -> None:
    before, after = KINDS[kind]
    cache = RadixCache(1_008 // page_size, page_size, clock=Clock())
    chat = cache.open_session("chat")
    common = next((i for i, pair in enumerate(zip(before, after, strict=False))
                   if pair[0] != pair[1]), min(len(before), len(after)))  # fmt: skip
    serve(cache, block(9, 48))
    serve(cache, before, chat)
    with cache.acquire(after, session=chat) as sequence:
        num_past = len(before) - common
        assert cache.stats()["superseded_tokens"] == num_past
        sequence.extend(after[sequence.cached_len :])
        sequence.commit(len(after))
    cache.check()
    (lease,) = cache.stats()["leases"]
    assert lease["tokens"] <= len(after) + page_size
    first, *_ = cache.eviction_preview()
    assert first["reason"] == "superseded: its session went on without it"
    (space,) = cache.dump()["namespaces"].values()
    assert "superseded" in str(space)
    cache.evict(num_past - num_past % page_size)
    cache.check()
    assert cached(cache, block(9, 48)) == 47
    assert cached(cache, after) == len(after) - 1


def test_only_what_the_session_alone_used_is_its_past(cache: RadixCache) -> None:
    chat, other = cache.open_session("chat"), cache.open_session("other")
    serve(cache, SYSTEM + block(2) + block(3), chat)
    serve(cache, SYSTEM + block(2) + block(4), other)
    serve(cache, SYSTEM + block(5) + block(6), chat)
    serve(cache, SYSTEM + block(5) + block(7))  # without a session
    serve(cache, SYSTEM + block(8), chat)
    assert cache.stats()["superseded_tokens"] == 20  # blocks 3 and 6
    assert cache.stats()["pages_closed"] == 20
    assert [lease["session"] for lease in cache.stats()["leases"]] == ["other", "chat"]


def test_a_prompt_that_shares_nothing_leaves_nothing_behind(cache: RadixCache) -> None:
    chat = cache.open_session("chat")
    serve(cache, block(1, 80), chat)
    serve(cache, block(2, 80), chat)
    assert cache.stats()["superseded_tokens"] == 0
    assert len(cache.stats()["leases"]) == 2


def test_the_deepest_end_is_left_and_others_stay(cache: RadixCache) -> None:
    """Sub-agents of one kind follow each other: each leaves the one before, not the caller."""
    chat = cache.open_session("chat")
    serve(cache, SYSTEM + block(2, 80), chat)
    serve(cache, block(5) + block(6), chat)  # shares nothing with the caller
    serve(cache, block(5) + block(7), chat)
    assert cache.stats()["superseded_tokens"] == 10
    assert sorted(lease["tokens"] for lease in cache.stats()["leases"]) == [20, 130]


def test_requests_at_work_together_are_not_each_others_past(cache: RadixCache) -> None:
    """Sub-agents in parallel: also those that wait while another one ends."""
    chat = cache.open_session("chat")
    prompts = [SYSTEM + block(number) for number in (2, 3, 4)]
    watches = [cache.watch(np.asarray(prompt, np.int32)) for prompt in prompts]
    for watch, prompt in zip(watches, prompts, strict=True):
        sequence, _ = cache.acquire_watched(watch, session=chat)
        sequence.extend(prompt[sequence.cached_len :])
        sequence.commit(len(prompt))
        sequence.release()
        watch.close()
        cache.check()
    assert cache.stats()["superseded_tokens"] == 0
    assert len(cache.stats()["leases"]) == 3
    serve(cache, SYSTEM + block(5), chat)  # sent when all of them had ended
    assert cache.stats()["superseded_tokens"] == 30


def run_agent(cache: RadixCache, session: RadixSession, number: int) -> list[int]:
    """A session whose sub-agent takes two turns, then it goes on itself. Returns its prompt."""
    caller, sub = SYSTEM + block(10 * number, 100), SYSTEM[:30] + block(10 * number + 1, 60)
    serve(cache, caller, session)
    serve(cache, sub, session)
    serve(cache, sub + block(10 * number + 2), session)
    caller = caller + block(10 * number + 3)
    assert serve(cache, caller, session) == 150
    return caller


def test_where_sessions_come_back_is_learned(cache: RadixCache) -> None:
    """By the prefix before the parting, for all sessions; compactions part elsewhere."""
    first = cache.open_session("first")
    run_agent(cache, first, 2)
    left = cache.stats()["superseded_tokens"]
    assert left == 120  # its own tokens, once: they were still cached when it came back
    second = cache.open_session("second")
    caller = run_agent(cache, second, 3)
    assert cache.stats()["superseded_tokens"] == left
    serve(cache, SYSTEM + block(99), second)
    assert cache.stats()["superseded_tokens"] == left + len(caller) - 50


def test_what_sessions_stop_coming_back_to_is_past_again(cache: RadixCache) -> None:
    chat = cache.open_session("chat")
    run_agent(cache, chat, 2)
    for number in range(6):
        with cache.open_session(f"{number}") as session:
            serve(cache, SYSTEM + block(40 + number, 20), session)
            serve(cache, SYSTEM[:30] + block(50 + number, 20), session)
    before = cache.stats()["superseded_tokens"]
    with cache.open_session("last") as session:
        serve(cache, SYSTEM + block(60, 20), session)
        serve(cache, SYSTEM[:30] + block(61, 20), session)
        assert cache.stats()["superseded_tokens"] > before


def test_a_session_that_comes_back_opens_its_past_again(cache: RadixCache) -> None:
    chat = cache.open_session("chat")
    before = SYSTEM + block(2, 80)
    serve(cache, before, chat)
    serve(cache, SYSTEM + block(3), chat)
    assert cache.stats()["pages_closed"] == 80
    assert serve(cache, before + block(4), chat) == 130
    assert cache.stats()["pages_closed"] == 0
    (space,) = cache.dump()["namespaces"].values()
    assert "superseded" not in str(space)


def test_claims_leave_nothing_behind(cache: RadixCache) -> None:
    chat = cache.open_session("chat")
    serve(cache, SYSTEM + block(2, 80), chat)
    cache.acquire(SYSTEM, session=chat, allow_full=True).release()
    assert cache.stats()["superseded_tokens"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions(seed: int) -> None:
    """Sessions go on, edit, come back and work in parallel; an audit after each step."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 3, 16])
    cache = RadixCache(600 // page_size, page_size, clock=Clock())
    sessions = [cache.open_session(f"s{number}") for number in range(4)]
    texts = [[SYSTEM[: rng.choice([20, 50])]] for _ in sessions]
    at_work: list[CacheSequence] = []
    for step in range(150):
        number = rng.randrange(4)
        if not sessions[number].is_open:
            sessions[number] = cache.open_session(f"s{number}")
        base = rng.choice(texts[number])
        kept = rng.choice([len(base), len(base), rng.randint(1, len(base))])
        text = base[: min(kept, 90)] + block(100 + step, rng.randint(1, 30))
        sequence = cache.acquire(text, session=sessions[number])
        cache.check()
        sequence.extend(text[sequence.cached_len :])
        sequence.commit(rng.choice([len(text), sequence.cached_len]))
        at_work.append(sequence)
        cache.check()
        while len(at_work) > rng.randrange(4):
            at_work.pop(rng.randrange(len(at_work))).release()
        texts[number] = [*texts[number][-4:], text]
        if rng.random() < 0.05:
            sessions[number].close()
        if rng.random() < 0.02:
            cache.reset()
        cache.check()
    assert cache.stats()["superseded_tokens"] > 0
