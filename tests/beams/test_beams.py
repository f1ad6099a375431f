"""Beam searches through the real scheduler and cache: exact answers, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
from collections import Counter

import numpy as np
import pytest

from radixserve.arrays import IntArray
from radixserve.beams.scorer import best_continuations
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.request import BeamParams
from radixserve.schedule import Candidates
from tests.beams.beam_reference import StoppedBeams, search
from tests.scheduler.fake import Driver, counters, fake_logprobs, prefix_hashes, random_prompt

PROMPT = list(range(2, 35))  # 33 tokens


def table(tokens: list[int]) -> np.ndarray:
    return fake_logprobs(prefix_hashes(tokens)[-1])


def stops_at_threes(before: IntArray, token_id: int) -> bool:
    """A "stop string" of two tokens."""
    return token_id % 7 == 3 and int(before[-1]) % 3 == 0


def stops_mostly(before: IntArray, token_id: int) -> bool:
    """So often that fewer beams go on than the search is wide."""
    return token_id % 6 != int(before[-1]) % 5


def check_search(driver: Driver, name: str, beams: BeamParams) -> None:
    """Its answers are those of the reference, unless it was ended from outside."""
    request = driver.requests[name]
    finish = driver.finished[name]
    usage = finish.usage
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    if finish.reason == "abort":
        assert len(driver.beams.get(name, ())) <= beams.width
        return
    params, num_prompt = request.params, len(request.token_ids)
    expected = search(
        table,
        driver.prompts[name],
        beams,
        request.end_ids,
        min(params.max_tokens, request.max_len - num_prompt),
        params.min_tokens,
    )
    found = driver.beams[name]
    assert [beam.token_ids for beam in found] == [one.token_ids for one in expected]
    assert [beam.reason for beam in found] == [one.reason for one in expected]
    assert [beam.score for beam in found] == pytest.approx([one.score for one in expected])
    for beam in found:
        tokens, own = list(driver.prompts[name]), []
        for token in beam.token_ids:
            own.append(float(table(tokens)[token]))
            tokens.append(token)
        assert list(beam.logprobs) == pytest.approx(own)
    assert usage.prompt_tokens == num_prompt
    assert usage.completion_tokens == len(found[0].token_ids)


class TestChoice:
    @pytest.mark.parametrize("seed", range(30))
    def test_equal_to_sorting_everything(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        num_beams, width = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        count = int(rng.integers(1, width + 1))
        totals = rng.standard_normal(num_beams).astype(np.float32)
        candidates = []
        for _ in range(num_beams):
            scores = np.sort(rng.integers(-6, 0, width).astype(np.float32))[::-1]  # many ties
            if seed % 3 == 0:
                scores = scores.copy()
                scores[width // 2 :] = -np.inf
            ids = rng.permutation(1000)[:width].astype(np.int32)
            candidates.append(Candidates(ids, scores, scores))
        everything = sorted(
            (-(total + score), beam, rank, int(one.token_ids[rank]))
            for beam, (total, one) in enumerate(zip(totals, candidates, strict=True))
            for rank, score in enumerate(one.scores)
            if score > -np.inf
        )
        found = best_continuations(totals, candidates, count)
        assert [(one.parent, one.rank, one.token_id) for one in found] == [
            entry[1:] for entry in everything[:count]
        ]
        assert [one.total for one in found] == [float(-e[0]) for e in everything[:count]]


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_equal_to_the_reference(
    kind: str, page_size: int, early_stopping: bool | str, length_penalty: float
) -> None:
    driver = Driver(
        1200 // page_size, page_size, kind=kind, chunked_prefill_size=10, max_running_requests=20
    )
    searches = {}
    for number, width in enumerate((1, 2, 3, 5, 8)):
        beams = StoppedBeams(
            width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            is_stopped=(None, stops_at_threes, stops_mostly)[number % 3],
        )
        searches[str(number)] = beams
        driver.add(
            str(number),
            [*PROMPT[:20], number + 40],
            beams=beams,
            max_tokens=12,
            min_tokens=3 * (number % 3),
            ignore_eos=number == 4,
        )
    driver.run()
    for name, beams in searches.items():
        check_search(driver, name, beams)
    driver.drain()


class TestSharing:
    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_nothing_is_computed_twice(self, page_size: int) -> None:
        driver = Driver(
            1600 // page_size, page_size, chunked_prefill_size=10, max_running_requests=10
        )
        beams = BeamParams(width=6)
        driver.add("a", PROMPT, beams=beams, max_tokens=15, ignore_eos=True)
        driver.run()
        check_search(driver, "a", beams)
        assert set(driver.runner.computed.values()) == {1}
        stats = driver.scheduler.stats()
        assert stats["preemptions"] == 0
        assert stats["prefilled_tokens"] == len(PROMPT)
        assert stats["decoded_tokens"] == 6 * 14
        assert stats["generated_tokens"] == 6 * 15
        assert stats["prompted_tokens"] == 6 * len(PROMPT)
        assert stats["computed_tokens"] == len(PROMPT)
        steps = [one for one in driver.schedules if one.num_decode_tokens]
        assert {one.num_decode_tokens for one in steps} == {6}  # all beams in each step
        if page_size == 1:
            assert not any(len(one.cow_copies) for one in driver.schedules)
        driver.drain()

    def test_the_prompt_and_the_best_beam_stay_cached(self) -> None:
        driver = Driver(800)
        driver.add("a", PROMPT, beams=BeamParams(width=4), max_tokens=9, ignore_eos=True)
        driver.run()
        whole = PROMPT + driver.beams["a"][0].token_ids
        assert driver.cache.lookup(whole).cached_len == len(whole) - 1
        driver.add("again", PROMPT, beams=BeamParams(width=4), max_tokens=9, ignore_eos=True)
        driver.run()
        assert driver.finished["again"].usage.cached_tokens == len(PROMPT) - 1
        assert driver.beams["again"] == driver.beams["a"]
        driver.drain()

    def test_a_width_above_max_running(self) -> None:
        driver = Driver(800, 1, max_running_requests=3)
        beams = BeamParams(width=8)
        for name in ("a", "b"):
            driver.add(name, [*PROMPT, 40 + ord(name) % 5], beams=beams, max_tokens=8)
        driver.add("plain", PROMPT[::-1], max_tokens=30, ignore_eos=True)
        driver.run()
        for name in ("a", "b"):
            check_search(driver, name, beams)
        assert max(len(one.rows) for one in driver.schedules) <= 3
        assert set(driver.runner.computed.values()) == {1}  # waiting costs nothing
        driver.drain()

    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_a_pool_for_one_beam_only(self, page_size: int) -> None:
        driver = Driver(48 // page_size, page_size, chunked_prefill_size=64)
        beams = BeamParams(width=4)
        driver.add("a", PROMPT, beams=beams, max_tokens=15, ignore_eos=True)
        driver.run()
        check_search(driver, "a", beams)
        assert driver.engine.stats()["steps"] > 15  # beams took turns
        driver.drain()

    def test_two_in_a_pool_for_one(self) -> None:
        driver = Driver(60, 1, chunked_prefill_size=7, max_running_requests=4)
        beams = BeamParams(width=5)
        for name in ("a", "b", "c"):
            driver.add(name, [*PROMPT, 45, ord(name) % 9], beams=beams, max_tokens=12)
        driver.run()
        for name in ("a", "b", "c"):
            check_search(driver, name, beams)
        driver.drain()

    def test_no_reuse(self) -> None:
        driver = Driver(400, 4, reuse=False, max_running_requests=4)
        beams = BeamParams(width=6)
        driver.add("a", PROMPT, beams=beams, max_tokens=10)
        driver.run()
        check_search(driver, "a", beams)
        driver.drain()


class TestEnds:
    @pytest.mark.parametrize("steps", range(9))
    def test_abort_frees_everything(self, steps: int) -> None:
        driver = Driver(60, 2, chunked_prefill_size=9, max_running_requests=3)
        driver.add("a", PROMPT, beams=BeamParams(width=5), max_tokens=20, ignore_eos=True)
        for _ in range(steps):
            driver.step()
        driver.abort("a")
        assert not driver.scheduler.has_work
        assert driver.finished["a"].reason == "abort"
        found = driver.beams.get("a", ())
        assert all(beam.reason == "abort" for beam in found)
        scores = [beam.score for beam in found]
        assert scores == sorted(scores, reverse=True)
        driver.drain()

    def test_a_failed_step_ends_the_search_once(self) -> None:
        driver = Driver(300, 1, max_running_requests=8)
        driver.add("a", PROMPT, beams=BeamParams(width=4), max_tokens=20, ignore_eos=True)
        driver.add("b", PROMPT[::-1], max_tokens=20, ignore_eos=True)
        for _ in range(4):
            driver.step()
        schedule = driver.scheduler.schedule()
        assert schedule is not None
        ended = driver.scheduler.fail(schedule, EngineDead("no luck"))
        assert sorted(output.request_id for output in ended) == ["a", "b"]
        assert not driver.scheduler.has_work
        driver.drain()

    def test_everything_may_be_failed_at_any_time(self) -> None:
        driver = Driver(100, 1, max_running_requests=2, chunked_prefill_size=5)
        driver.add("a", PROMPT, beams=BeamParams(width=4), max_tokens=20, ignore_eos=True)
        for _ in range(12):
            driver.step()
        assert len(driver.scheduler.fail_all(EngineDead("closed"))) == 1
        assert not driver.scheduler.has_work
        driver.drain()

    def test_a_broken_row_ends_its_search_only(self) -> None:
        driver = Driver(300, 1, max_running_requests=8)
        beams = BeamParams(width=3)
        driver.add("a", PROMPT, beams=BeamParams(width=4), max_tokens=20, ignore_eos=True)
        driver.add("b", PROMPT[::-1], beams=beams, max_tokens=6, ignore_eos=True)
        for _ in range(4):
            driver.step()
        driver.runner.broken_rows = lambda row: row.request_id == "#a#2"
        driver.step()
        driver.runner.broken_rows = lambda _: False
        assert driver.finished["a"].reason == "error"
        num_tokens = driver.finished["a"].usage.completion_tokens
        assert num_tokens == len(driver.beams["a"][0].token_ids) > 0
        driver.run()
        check_search(driver, "b", beams)
        driver.drain()

    def test_a_failing_stop_check_ends_its_search_only(self) -> None:
        def fails(before: IntArray, token_id: int) -> bool:
            raise ValueError(f"no text for {before} and {token_id}")

        driver = Driver(300, 1, max_running_requests=8)
        driver.add("a", PROMPT, beams=StoppedBeams(width=4, is_stopped=fails), max_tokens=20)
        driver.add("b", PROMPT[::-1], max_tokens=9, ignore_eos=True)
        driver.run()
        assert driver.finished["a"].reason == "error"
        assert driver.output("b") == driver.expected("b", 9)
        driver.drain()

    def test_ids_in_use(self) -> None:
        driver = Driver(300, 1, max_running_requests=8)
        driver.add("#a#1", [3, 4], max_tokens=40, ignore_eos=True)
        driver.add("a", PROMPT, beams=BeamParams(width=4), max_tokens=5, ignore_eos=True)
        for _ in range(3):
            driver.step()
        with pytest.raises(InvalidRequest, match="in use"):
            driver.add("a", PROMPT)
        driver.run()
        assert driver.output("#a#1") == driver.expected("#a#1", 40)
        check_search(driver, "a", BeamParams(width=4))

    def test_what_cannot_fit_is_refused(self) -> None:
        driver = Driver(40, 1)
        with pytest.raises(InvalidRequest, match="the cache's 40 tokens"):
            driver.add("a", PROMPT, beams=BeamParams(width=4), max_len=41)
        with pytest.raises(InvalidRequest, match="beam_width"):
            BeamParams(width=0)
        with pytest.raises(InvalidRequest, match="early_stopping"):
            BeamParams(early_stopping="sometimes")
        with pytest.raises(InvalidRequest, match="length_penalty"):
            BeamParams(length_penalty=11)


def random_beams(rng: random.Random) -> BeamParams:
    return StoppedBeams(
        width=rng.choice([1, 2, 3, 4, 6]),
        length_penalty=rng.choice([0.0, 1.0, 1.0, -0.5, 2.0]),
        early_stopping=rng.choice([False, True, "never"]),
        is_stopped=rng.choice([None, None, stops_at_threes, stops_mostly]),
    )


def storm(seed: int, steps: int, page_size: int, kind: str = "radix") -> Counter[str]:
    """Searches among requests, samples and scores, with every kind of interruption."""
    rng = random.Random(seed)
    pages = max(3, rng.choice([24, 24, 120, 400]) // page_size)
    driver = Driver(
        pages,
        page_size,
        policy=rng.choice(["lpm", "fcfs", "dfs-weight"]),
        chunked_prefill_size=rng.choice([1, 7, 16, 64]),
        max_running_requests=rng.choice([1, 3, 8]),
        max_overtake=rng.choice([0, 2, 8]),
        reuse=rng.random() < 0.9,
        kind=kind,
    )
    capacity = pages * page_size
    searches: dict[str, BeamParams] = {}
    names: list[str] = []
    for _ in range(steps):
        if rng.random() < 0.3 and len(names) - len(driver.finished) < 12:
            name = f"r{len(names)}"
            known = list(driver.prompts.values()) + [
                driver.prompts[n] + beams[0].token_ids for n, beams in driver.beams.items()
            ]
            prompt = random_prompt(rng, known, min(capacity - 2, 50))
            common = {
                "max_tokens": rng.randint(1, 12),
                "priority": rng.choice([0, 0, 0, 1]),
                "namespace": rng.choice(["", "", "b"]),
                "ignore_eos": rng.random() < 0.3,
            }
            what = rng.random()
            if what < 0.5:
                searches[name] = random_beams(rng)
                min_tokens = rng.randint(0, min(4, common["max_tokens"]))
                driver.add(name, prompt, beams=searches[name], min_tokens=min_tokens, **common)
            elif what < 0.6 and len(prompt) > 1:
                cut = rng.randint(1, len(prompt) - 1)
                driver.add(name, prompt[:-1], logprob_targets=prompt[cut:])
            else:
                if names and rng.random() < 0.4:  # another sample
                    prompt = driver.prompts[names[-1]]
                    common["namespace"] = driver.requests[names[-1]].params.namespace
                driver.add(name, prompt, seed=len(names), **common)
            names.append(name)
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names[-12:]))
        if rng.random() < 0.03:
            driver.cache.evict(rng.randrange(30))
        if rng.random() < 0.01:
            driver.cache.reset(rng.choice([None, "", "b"]))
        driver.step()
        driver.cache.check()
    driver.run()
    assert set(driver.finished) == set(names)
    assert {f.reason for f in driver.finished.values()} <= {"stop", "length", "abort"}
    for name, beams in searches.items():
        check_search(driver, name, beams)
    for name in set(names) - set(searches):
        usage = driver.finished[name].usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        if driver.requests[name].logprob_targets is None:
            assert driver.output(name) == driver.expected(name, usage.completion_tokens)
    stats = driver.scheduler.stats()
    assert stats["prompted_tokens"] == stats["reused_tokens"] + stats["computed_tokens"]
    driver.scheduler.check()
    driver.drain()
    return counters(stats)


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_storms(page_size: int, kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += storm(seed, 100, page_size, kind)
    for event in ("aborted", "preemptions", "recomputed_tokens", "reused_tokens"):
        assert seen[event] > 0, f"the storm had no {event}"


def test_the_same_seed_gives_the_same_run() -> None:
    assert storm(3, 150, 2) == storm(3, 150, 2)


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_many_storms() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 3,000)."""
    for seed in range(1_000, 1_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "3000"))):
        kind = "hash" if seed % 4 == 0 else "radix"
        storm(seed, 150, (1, 2, 16)[seed % 3], kind)


@pytest.mark.parametrize(
    ("num_pages", "page_size", "most"), [(150, 1, 330), (200, 1, 110), (18, 16, 360)]
)
def test_beams_that_do_not_fit_together_take_turns(
    num_pages: int, page_size: int, most: int
) -> None:
    """99 steps are needed where all fit; with one turn a beam it would be 1,500."""
    driver = Driver(num_pages, page_size, chunked_prefill_size=512, max_running_requests=64)
    beams = BeamParams(width=16)
    driver.add("a", PROMPT, beams=beams, max_tokens=99, ignore_eos=True)
    driver.run()
    check_search(driver, "a", beams)
    stats = driver.engine.stats()
    assert stats["steps"] <= most
    assert stats["preemptions"] <= most
    driver.drain()
