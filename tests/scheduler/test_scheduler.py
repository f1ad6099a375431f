"""The scheduler's promises with the real cache and a fake model; no torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from radixserve.cache import RadixCache
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.radix import lookup, radix_cache
from radixserve.cache.radix.lookup import match_prefix
from radixserve.errors import InvalidRequest
from radixserve.request import Request, SamplingParams
from radixserve.schedule import SampleSpec, WindowLayers
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.fake import EOS, VOCAB, Driver, random_prompt

POLICIES = ["lpm", "fcfs", "dfs-weight"]
PAGE_SIZES = [1, 2, 16, 64]
MATCHED: list[dict[str, Any]] = [  # caches, as options of a `Driver`
    {"page_size": 1},
    {"page_size": 16},
    {"page_size": 16, "kind": "hash"},
    {"page_size": 4, "num_states": 24},
    {"page_size": 4, "windows": WindowLayers(64, 20)},
]


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def finished_as_expected(driver: Driver) -> None:
    for name, finish in driver.finished.items():
        if finish.reason in ("stop", "length"):
            output = driver.output(name)
            assert output == driver.expected(name, len(output)), name
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens


class TestComputeOnce:
    @pytest.mark.pairs
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    @pytest.mark.parametrize("chunked_prefill_size", [7, 64, 1024])
    def test_requests_that_arrive_at_once_compute_the_shared_part_once(
        self, policy: str, page_size: int, chunked_prefill_size: int
    ) -> None:
        driver = Driver(
            8192 // page_size,
            page_size,
            policy,
            chunked_prefill_size,
            max_running_requests=64,
            max_overtake=64,
        )
        shared = prompt(0, 512)
        for i in range(32):
            driver.add(f"r{i}", shared + prompt(1000 + i, 32), max_tokens=2, ignore_eos=True)
        driver.run()
        finished_as_expected(driver)
        computed = {n: f.usage.computed_tokens for n, f in driver.finished.items()}
        heads = distinct_prefixes([driver.prompts[f"r{i}"] for i in range(32)])
        assert sum(computed.values()) == heads
        assert sorted(computed.values())[-1] == 544
        assert max(driver.runner.computed.values()) == 1, "a prefix was computed twice"

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("shared", [1, 2, 31])
    def test_followers_wait_at_any_match_length(self, policy: str, shared: int) -> None:
        driver = Driver(1000, 1, policy, chunked_prefill_size=8)
        for i in range(4):
            driver.add(f"r{i}", prompt(0, shared) + prompt(10 + i, 20), max_tokens=1)
        driver.run()
        assert max(driver.runner.computed.values()) == 1
        assert driver.scheduler.stats()["gained_while_waiting_tokens"] >= shared

    def test_identical_prompts_recompute_only_their_last_token(self) -> None:
        driver = Driver(1000, 16, chunked_prefill_size=10)
        for i in range(5):
            driver.add(f"r{i}", prompt(3, 45), max_tokens=4)
        driver.run()
        usages = [driver.finished[f"r{i}"].usage for i in range(5)]
        assert sorted(u.computed_tokens for u in usages) == [1, 1, 1, 1, 45]

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_counts_are_the_true_common_prefixes(self, page_size: int) -> None:
        """A script of requests one after another: reuse is what an omniscient reader would say."""
        driver = Driver(16_384 // page_size, page_size, chunked_prefill_size=64)
        rng = random.Random(page_size)
        known: list[list[int]] = []
        for i in range(60):
            tokens = random_prompt(rng, known, 150)
            expected = max((common(tokens[:-1], other) for other in known), default=0)
            driver.add(f"r{i}", tokens, max_tokens=rng.randint(1, 9))
            driver.run()
            usage = driver.finished[f"r{i}"].usage
            assert usage.cached_tokens == expected
            assert usage.computed_tokens == len(tokens) - expected
            assert usage.prompt_tokens == len(tokens)
            known.append(tokens + driver.output(f"r{i}")[:-1])  # the last token is not computed
        finished_as_expected(driver)
        driver.drain()

    def test_a_stale_leader_is_not_waited_for(self) -> None:
        driver = Driver(1000, 1, chunked_prefill_size=10)
        driver.add("old", prompt(0, 100), max_tokens=1)
        driver.step()
        driver.cache.reset()
        driver.add("new", prompt(0, 100), max_tokens=1)
        driver.step()
        driver.step()
        assert "new" not in driver.finished
        driver.run()
        assert driver.finished["new"].usage.cached_tokens == 0
        driver.drain()


def common(left: list[int], right: list[int]) -> int:
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


def distinct_prefixes(prompts: list[list[int]]) -> int:
    return len({tuple(p[:end]) for p in prompts for end in range(1, len(p) + 1)})


class TestOrder:
    def test_lpm_takes_the_longest_cached_prefix_first(self) -> None:
        driver = Driver(1000, 1, "lpm", max_running_requests=1)
        driver.add("warm", prompt(0, 60), max_tokens=1)
        driver.run()
        driver.add("cold", prompt(1, 30), max_tokens=1)
        driver.add("short", [*prompt(0, 20), 2], max_tokens=1)
        driver.add("long", [*prompt(0, 50), 2], max_tokens=1)
        driver.run()
        assert driver.admitted == ["warm", "long", "short", "cold"]

    def test_fcfs_takes_the_first(self) -> None:
        driver = Driver(1000, 1, "fcfs", max_running_requests=1)
        driver.add("warm", prompt(0, 60), max_tokens=1)
        driver.run()
        for name, tokens in (("cold", prompt(1, 30)), ("hot", prompt(0, 50))):
            driver.add(name, tokens, max_tokens=1)
        driver.run()
        assert driver.admitted == ["warm", "cold", "hot"]

    def test_dfs_weight_takes_the_heaviest_branch_in_one_piece(self) -> None:
        driver = Driver(1000, 1, "dfs-weight", max_running_requests=8, chunked_prefill_size=100)
        light, heavy = prompt(5, 20), prompt(6, 20)
        for name, head in (("a", light), ("b", heavy)):
            driver.add(name, head, max_tokens=1)
        driver.run()
        for i in range(6):
            head = light if i in (0, 3) else heavy
            driver.add(f"r{i}", [*head, 2 + i], max_tokens=1)
        driver.run()
        assert driver.admitted[2:] == ["r1", "r2", "r4", "r5", "r0", "r3"]

    @pytest.mark.parametrize("policy", POLICIES)
    def test_priority_comes_first(self, policy: str) -> None:
        driver = Driver(1000, 1, policy, max_running_requests=1)
        driver.add("first", prompt(0, 10), max_tokens=3)
        driver.step()
        for i, priority in enumerate([0, 2, 1]):
            driver.add(f"r{i}", prompt(i + 1, 10), max_tokens=1, priority=priority)
        driver.run()
        assert driver.admitted == ["first", "r1", "r2", "r0"]

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("bound", [0, 1, 5])
    def test_nobody_is_overtaken_more_often_than_the_bound(self, policy: str, bound: int) -> None:
        driver = Driver(4000, 1, policy, max_running_requests=2, max_overtake=bound)
        hot = prompt(0, 40)
        driver.add("hot", hot, max_tokens=1)
        driver.run()
        rng = random.Random(bound)
        for i in range(80):
            tokens = [*hot[: rng.randint(20, 40)], 2 + i % 40] if i % 4 else prompt(i + 1, 30)
            driver.add(f"r{i}", tokens, max_tokens=rng.randint(1, 5), priority=rng.randint(0, 1))
            if i % 3 == 0:
                driver.step()
        driver.run()
        order = [int(name[1:]) for name in driver.admitted if name != "hot"]
        overtaken = [sum(later > i for later in order[: order.index(i)]) for i in range(80)]
        assert max(overtaken) <= bound
        if bound == 5 and policy == "lpm":
            assert max(overtaken) == bound, "the test does not push hard enough"

    def test_without_the_bound_lpm_starves(self) -> None:
        waits = {}
        for bound in (4, 1000):
            driver = Driver(4000, 1, "lpm", max_running_requests=1, max_overtake=bound)
            driver.add("hot", prompt(0, 40), max_tokens=1)
            driver.run()
            driver.add("cold", prompt(1, 40), max_tokens=1)
            for i in range(100):
                driver.add(f"r{i}", [*prompt(0, 39), 2 + i % 40], max_tokens=1)
            driver.run()
            waits[bound] = driver.admitted.index("cold")
        assert waits[4] <= 1 + 4
        assert waits[1000] == 101


class TestAdmission:
    def test_looks_past_a_request_that_does_not_fit(self) -> None:
        driver = Driver(100, 1, "fcfs", chunked_prefill_size=200)
        driver.add("running", prompt(0, 50), max_tokens=10)
        driver.step()
        driver.add("large", prompt(1, 80), max_tokens=1)
        driver.add("small", prompt(2, 10), max_tokens=1)
        driver.run()
        assert driver.admitted == ["running", "small", "large"]

    def test_a_cached_request_fits_where_a_new_one_does_not(self) -> None:
        driver = Driver(120, 1, "fcfs", chunked_prefill_size=200)
        head = prompt(0, 60)
        driver.add("running", head, max_tokens=20)
        driver.step()
        driver.add("new", prompt(1, 60), max_tokens=1)
        driver.add("cached", [*head, 3], max_tokens=1)
        driver.run()
        assert driver.admitted == ["running", "cached", "new"]

    def test_a_request_that_does_not_fit_is_not_passed_for_ever(self) -> None:
        driver = Driver(100, 1, "fcfs", max_running_requests=4, max_overtake=3)
        driver.add("running", prompt(0, 30), max_tokens=10)
        driver.step()
        driver.add("large", prompt(1, 90), max_tokens=1)
        for i in range(20):
            driver.add(f"r{i}", prompt(i + 2, 10), max_tokens=10)
        driver.run()
        assert driver.admitted.index("large") <= 1 + 3
        finished_as_expected(driver)

    def test_chunks_and_decodes_share_a_step_within_the_budget(self) -> None:
        driver = Driver(1000, 1, chunked_prefill_size=10)
        driver.add("a", prompt(0, 5), max_tokens=30, ignore_eos=True)
        driver.step()
        driver.add("b", prompt(1, 35), max_tokens=1)
        mixed = 0
        while (schedule := driver.step()) is not None:
            assert schedule.num_prefill_tokens <= 10
            mixed += schedule.num_prefill_tokens > 0 and schedule.num_decode_tokens > 0
        assert mixed == 4
        finished_as_expected(driver)

    def test_what_could_never_fit_is_refused(self) -> None:
        driver = Driver(20, 1)
        with pytest.raises(InvalidRequest, match="20 tokens"):
            driver.add("big", prompt(0, 30), max_len=40)
        driver.add("ok", prompt(0, 19), max_tokens=9)
        with pytest.raises(InvalidRequest, match="in use"):
            driver.add("ok", prompt(0, 5))
        driver.run()
        assert driver.finished["ok"].reason in ("length", "stop")
        driver.drain()

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_a_request_as_large_as_the_pool_runs_alone(self, page_size: int) -> None:
        driver = Driver(256 // page_size, page_size, chunked_prefill_size=50)
        tokens = prompt(0, 200)
        driver.add("before", [*tokens[:99], 3, 4, 5], max_tokens=3)
        driver.add("whole", tokens, max_tokens=500, ignore_eos=True)
        driver.run()
        assert driver.finished["whole"].reason == "length"
        assert driver.finished["whole"].usage.completion_tokens == 56
        finished_as_expected(driver)
        driver.drain()


class TestPreemption:
    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_everybody_finishes_although_not_all_fit(self, page_size: int) -> None:
        driver = Driver(128 // page_size, page_size, chunked_prefill_size=32)
        for i in range(6):
            driver.add(f"r{i}", prompt(i, 15), max_tokens=60, ignore_eos=True)
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["preemptions"] > 0
        assert stats["finished"] == 6
        assert all(f.usage.completion_tokens == 60 for f in driver.finished.values())
        finished_as_expected(driver)
        driver.drain()

    def test_resuming_costs_only_what_was_evicted(self) -> None:
        driver = Driver(100, 1, chunked_prefill_size=64)
        driver.add("old", prompt(0, 40), max_tokens=30, ignore_eos=True)
        driver.add("young", prompt(1, 40), max_tokens=12, ignore_eos=True)
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["preemptions"] >= 1
        assert 0 < stats["recomputed_tokens"] < 40
        finished_as_expected(driver)

    def test_counts_add_up_after_preemption(self) -> None:
        driver = Driver(90, 1, chunked_prefill_size=8)
        shared = prompt(0, 20)
        for i in range(8):
            driver.add(f"r{i}", shared + prompt(i + 1, 20), max_tokens=20, ignore_eos=True)
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["preemptions"] > 0
        assert stats["prompted_tokens"] == 8 * 40
        assert stats["reused_tokens"] + stats["computed_tokens"] == stats["prompted_tokens"]
        for finish in driver.finished.values():
            assert finish.usage.prompt_tokens == 40
            assert finish.usage.cached_tokens <= 40


class TestAbort:
    @pytest.mark.parametrize("after", range(12))
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_at_every_point_of_a_life(self, after: int, page_size: int) -> None:
        driver = Driver(640 // page_size, page_size, chunked_prefill_size=9, max_running_requests=2)
        driver.add("victim", prompt(0, 45), max_tokens=5, ignore_eos=True)
        driver.add("follower", [*prompt(0, 30), *prompt(1, 9)], max_tokens=5)
        driver.add("other", prompt(2, 30), max_tokens=5)
        for _ in range(after):
            driver.step()
        driver.abort("victim")
        driver.cache.check()
        assert driver.scheduler.finish("victim", "abort") is None
        driver.run()
        assert driver.finished["victim"].reason in ("abort", "length")
        for name in ("follower", "other"):
            assert driver.finished[name].reason in ("stop", "length")
        finished_as_expected(driver)
        driver.drain()

    def test_a_cancelled_prefill_leaves_its_work_in_the_tree(self) -> None:
        driver = Driver(1000, 1, chunked_prefill_size=10)
        driver.add("a", prompt(0, 100), max_tokens=1)
        for _ in range(4):
            driver.step()
        driver.abort("a")
        assert driver.cache.lookup(prompt(0, 100)).cached_len == 40

    def test_a_failed_step_ends_its_requests_and_no_others(self) -> None:
        driver = Driver(1000, 1, chunked_prefill_size=10, max_running_requests=1)
        driver.add("a", prompt(0, 25), max_tokens=3)
        driver.add("b", prompt(1, 25), max_tokens=3)
        driver.step()
        schedule = driver.scheduler.schedule()
        assert schedule is not None
        cause = RuntimeError("boom")
        (output,) = driver.scheduler.fail(schedule, cause)
        assert output.finish is not None
        assert (output.request_id, output.finish.error) == ("a", cause)
        driver.cache.check()
        driver.run()
        assert driver.finished["b"].reason in ("stop", "length")
        assert driver.cache.lookup(prompt(0, 25)).cached_len == 10  # its committed chunk
        driver.drain()


class TestEnds:
    def test_min_tokens_bans_end_tokens_and_lets_them_pass_afterwards(self) -> None:
        driver = Driver(500, 1)
        driver.add("a", prompt(0, 10), max_tokens=9, min_tokens=4)
        banned = []
        while (schedule := driver.step()) is not None:
            banned += [row.sample.banned_ids for row in schedule.rows if row.sample]
        assert banned[:4] == [(1,)] * 4
        assert set(banned[4:]) <= {()}

    def test_max_len_ends_a_request(self) -> None:
        driver = Driver(500, 1)
        driver.add("a", prompt(0, 10), max_tokens=90, max_len=16, ignore_eos=True)
        driver.run()
        assert driver.finished["a"].usage.completion_tokens == 6
        assert driver.finished["a"].reason == "length"


def test_nothing_to_do() -> None:
    driver = Driver(10, 1)
    assert driver.scheduler.schedule() is None
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_waiting_requests_are_matched_again_only_where_the_tree_changed(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RadixCache(5000)
    publish(cache, prompt(0, 50))
    publish(cache, prompt(1, 50))
    room = WaitingQueue(cache, policy, 100)
    for i in range(40):
        tokens = np.asarray([*prompt(i % 2, 30 + i // 2), 2], np.int32)
        request = Request(f"r{i}", tokens, SamplingParams(), 0, frozenset(), 100)
        room.add(RequestState(request, i, cache.watch(tokens), 0.0), is_returning=False)
    room.refresh()
    walks = count_walks(monkeypatch)
    publish(cache, prompt(2, 50))  # elsewhere
    room.refresh()
    assert walks[0] == 1  # by publish itself
    publish(cache, [*prompt(1, 40), 2, 3, 4])  # splits what half of them had matched
    room.refresh()
    assert walks[0] == 2 + 20
    cache.reset()
    room.refresh()
    assert walks[0] == 2 + 20  # there is nothing left to walk
    assert {state.prefix_watch.cached_len for state in room.candidates()} == {0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_in_which_nobody_fits_is_not_walked_again(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(
        200, 1, policy, max_running_requests=4, chunked_prefill_size=200, max_overtake=1000
    )
    driver.add("running", prompt(0, 100), max_tokens=60, ignore_eos=True)
    driver.step()
    for i in range(50):
        driver.add(f"w{i}", prompt(i + 1, 110), max_tokens=1)
    driver.step()
    fits, asked = PageBudget.fits, [0]

    def counted(*args: object) -> bool:
        asked[0] += 1
        return fits(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PageBudget, "fits", counted)
    for _ in range(20):
        driver.step()
    assert asked[0] == 0
    driver.add("small", prompt(99, 5), max_tokens=1)
    driver.step()
    assert "small" in driver.finished
    driver.run()
    finished_as_expected(driver)


def publish(cache: RadixCache, tokens: list[int]) -> None:
    seq = cache.acquire(tokens)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    seq.release()


def count_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The matches of prompts against a cache, of either kind, from now on."""
    count, match_blocks = [0], BlockPool.match

    def counted(*args: object) -> object:
        count[0] += 1
        return match_prefix(*args)  # type: ignore[arg-type]

    def counted_blocks(*args: Any) -> object:
        count[0] += 1
        return match_blocks(*args)

    for module in (radix_cache, lookup):
        monkeypatch.setattr(module, "match_prefix", counted)
    monkeypatch.setattr(BlockPool, "match", counted_blocks)
    return count


@pytest.mark.parametrize("options", MATCHED, ids=lambda options: str(options))
def test_a_prompt_is_matched_once_and_again_where_the_tree_has_changed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(512, **options)
    driver.add("first", prompt(0, 100), max_tokens=2)
    driver.run()
    walks = count_walks(monkeypatch)
    driver.add("hit", [*prompt(0, 80), *prompt(1, 20)], max_tokens=2)
    driver.run()
    driver.add("miss", prompt(2, 100), max_tokens=2)
    driver.run()
    assert walks == [2], "matched more often than once each"
    driver.add("changed", prompt(0, 100), max_tokens=2)
    driver.cache.evict(16)  # of its end
    driver.run()
    assert walks == [4], "not matched again, or twice"
    driver.add("producer", prompt(3, 100), max_tokens=2)
    driver.add("waiter", [*prompt(3, 90), *prompt(4, 10)], max_tokens=2)
    driver.run()
    assert walks[0] - 4 <= 2 + 2, "the waiter is matched again after what it waits for, once"
    finished_as_expected(driver)


def test_an_empty_prompt_is_refused() -> None:
    driver = Driver(10, 1)
    with pytest.raises(InvalidRequest):
        driver.add("a", [])


def test_plain_rows_keep_their_spec_once_their_ends_are_free() -> None:
    """Greedy ones that ask for nothing else; a penalty or log-probabilities need the latest one."""
    driver = Driver(30, 1, max_running_requests=8)  # too few pages: some are preempted
    common = {"max_tokens": 12, "temperature": 0}
    driver.add("telling", prompt(6, 6), logprobs=1, ignore_eos=True, **common)
    driver.add("sampled", prompt(7, 6), max_tokens=12, ignore_eos=True)
    driver.add("plain", prompt(5, 6), min_tokens=3, **common)
    driver.run()
    assert driver.scheduler.stats()["preemptions"] > 0
    specs: dict[str, list[SampleSpec]] = {name: [] for name in driver.prompts}
    for schedule in driver.schedules:
        for row in schedule.rows:
            if row.sample is not None:
                specs[row.request_id].append(row.sample)
    plain = specs["plain"]
    assert [spec.banned_ids for spec in plain[:4]] == [(EOS,), (EOS,), (EOS,), ()]
    assert all(spec is plain[3] for spec in plain[3:])
    for name in ("telling", "sampled"):
        assert [spec.num_sampled for spec in specs[name]] == list(range(12))
    for name, found in specs.items():
        output = driver.output(name)
        assert output == driver.expected(name, len(output))
        assert len(found) == len(output)
