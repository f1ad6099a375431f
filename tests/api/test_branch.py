"""Branches: they move as told, share what is computed, and answer as a cold run would."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import Branch, EngineDead, InvalidRequest, Runtime, SamplingParams
from radixserve.api.branch import SessionHandle
from tests.checkpoints import make_checkpoint
from tests.pacing import PATIENCE_S, held, until, wait_until

pytestmark = pytest.mark.usefixtures("quick_collections", "collected")


def greedy_params(count: int = 8, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **fields}
    return SamplingParams(max_tokens=count, **fields)


GREEDY = greedy_params()
HELLO = [ord(letter) - ord("!") for letter in "hello"]  # as the tiny models tokenise it


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


class TestMoving:
    def test_a_branch_is_its_tokens(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch:
            assert branch.tokens.tolist() == HELLO
            assert (branch.text, branch.length, branch.parent) == ("hello", 5, None)
            branch.extend(" you")
            branch.extend([0, 0])
            branch.extend(np.array([30]))
            branch.extend("")
            branch.extend([])
            assert branch.text == "hello you!!?"
            branch.truncate(5)
            assert branch.text == "hello"
            assert repr(branch) == "Branch(length=5)"
        assert repr(branch) == "Branch(length=5, released)"

    def test_it_grows_by_exactly_what_was_generated(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch:
            first = branch.generate(GREEDY)
            assert branch.tokens.tolist() == [*HELLO, *first.token_ids]
            assert (first.usage.computed_tokens, first.usage.cached_tokens) == (5, 0)
            second = branch.generate(GREEDY)
            assert branch.tokens.tolist() == [*HELLO, *first.token_ids, *second.token_ids]
            assert second.usage.computed_tokens == 1  # the last token of the first answer
            branch.extend("abc")
            third = branch.generate(GREEDY)
            assert third.usage.computed_tokens == 1 + 3

    def test_an_end_token_belongs_to_it(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch:
            free = branch.fork()[0].generate(GREEDY)
            end = next(t for t in free.token_ids[1:] if t not in free.token_ids[:1])
            at = free.token_ids.index(end)
            out = branch.generate(greedy_params(stop_token_ids=[end]))
            assert out.finish_reason == "stop"
            assert branch.tokens.tolist() == [*HELLO, *free.token_ids[: at + 1]]
            branch.truncate(branch.length - 1)
            assert branch.generate(greedy_params(1)).token_ids == [end]

    def test_tokens_cannot_be_written_and_stay(self, rt: Runtime) -> None:
        with rt.branch([1, 2, 3]) as branch:
            tokens = branch.tokens
            with pytest.raises(ValueError, match="read-only"):
                tokens[0] = 9
            with pytest.raises(ValueError, match="WRITEABLE"):
                tokens.flags.writeable = True
            branch.extend([4])
            branch.truncate(1)
            assert tokens.tolist() == [1, 2, 3]

    def test_the_callers_array_stays_his(self, rt: Runtime) -> None:
        ids, more = np.array([1, 2], np.int32), np.array([3], np.int32)
        with rt.branch(ids) as branch:
            branch.extend(more)
            ids[0] = more[0] = 7
            assert branch.tokens.tolist() == [1, 2, 3]

    def test_a_stream_moves_by_what_it_hands_out(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch, rt.branch("hello") as other:
            length, text = branch.length, ""
            for chunk in branch.stream(GREEDY):
                length, text = length + len(chunk.token_ids), text + chunk.text
                assert branch.length == length
            assert chunk.completion is not None
            assert chunk.completion.text == text
            assert chunk.completion.token_ids == other.generate(GREEDY).token_ids
            assert branch.tokens.tolist() == other.tokens.tolist()

    def test_leaving_a_stream_leaves_the_branch_there(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch:
            seen: list[int] = []
            with held(rt, 5):
                for chunk in branch.stream(greedy_params(300)):
                    seen += chunk.token_ids
                    if len(seen) >= 3:
                        break
            del chunk
            wait_until(lambda: rt.cache_stats()["running"] == 0)
            gc.collect()
            assert branch.tokens.tolist() == [*HELLO, *seen]
            whole = rt.generate("hello", greedy_params(len(seen) + 4)).token_ids
            assert branch.generate(greedy_params(4)).token_ids == whole[len(seen) :]

    def test_asyncio(self, rt: Runtime) -> None:
        async def main() -> None:
            with rt.branch("hello") as root:
                kids = root.fork(3)
                outs = await asyncio.gather(*(kid.agenerate(GREEDY) for kid in kids))
                pieces = [chunk async for chunk in root.astream(GREEDY)]
                assert all(out.token_ids == outs[0].token_ids for out in outs)
                last = pieces[-1].completion
                assert last is not None
                assert last.token_ids == outs[0].token_ids
                assert all(kid.tokens.tolist() == root.tokens.tolist() for kid in kids)
                with held(rt):
                    task = asyncio.create_task(root.agenerate(greedy_params(400)))
                    await until(lambda: rt.cache_stats()["running"] == 1)
                    with pytest.raises(InvalidRequest, match="being moved"):
                        root.extend("x")
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                assert root.length == 5 + 8
                root.extend("x")

        asyncio.run(main())
        wait_until(lambda: rt.cache_stats()["running"] == 0)

    def test_abort_moves_by_what_there_is(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch, ThreadPoolExecutor(1) as pool, held(rt):
            future = pool.submit(branch.generate, greedy_params(450))
            wait_until(lambda: rt.cache_stats()["running"] == 1)
            rt.abort()
            out = future.result(timeout=PATIENCE_S)
            assert out.finish_reason == "abort"
            assert branch.tokens.tolist() == [*HELLO, *out.token_ids]


class TestForks:
    def test_forks_go_their_own_ways(self, rt: Runtime) -> None:
        with rt.branch("hello") as root:
            steps = rt.cache_stats()["steps"]
            one, two = root.fork(2)
            assert rt.cache_stats()["steps"] == steps
            one.extend("a")
            two.extend("bc")
            root.truncate(2)
            assert [b.text for b in (root, one, two)] == ["he", "helloa", "hellobc"]
            assert one.parent is root
            assert one.fork()[0].parent is one

    def test_the_prefix_is_computed_once(self, rt: Runtime) -> None:
        ids = random_ids(100)
        with rt.branch(ids) as root:
            kids = root.fork(4)
            with ThreadPoolExecutor(4) as pool:
                outs = list(pool.map(lambda kid: kid.generate(GREEDY), kids))
            assert rt.cache_stats()["computed_tokens"] >= 100
            assert sum(out.usage.computed_tokens for out in outs) == 100 + 3
            assert len({tuple(out.token_ids) for out in outs}) == 1

    def test_a_fork_of_a_running_stream_has_the_tokens_so_far(self, rt: Runtime) -> None:
        with rt.branch("hello") as root:
            stream = root.stream(GREEDY)
            seen = [t for _ in range(3) for t in next(stream).token_ids]
            (kid,) = root.fork()
            assert kid.tokens.tolist() == [*HELLO, *seen]
            rest = [t for chunk in stream for t in chunk.token_ids]
            assert kid.generate(greedy_params(len(rest))).token_ids == rest

    def test_a_fork_while_generating_has_the_tokens_from_before(self, rt: Runtime) -> None:
        with rt.branch("hello") as root, ThreadPoolExecutor(1) as pool:
            with held(rt):
                future = pool.submit(root.generate, greedy_params(200))
                wait_until(lambda: rt.cache_stats()["running"] == 1)
                kid = root.fork()[0]
            future.result(timeout=PATIENCE_S)
            assert kid.text == "hello"

    def test_namespaces_keep_apart(self, rt: Runtime) -> None:
        ids = random_ids(20)
        with rt.branch(ids, namespace="a") as one, rt.branch(ids) as two:
            assert one.generate(GREEDY).usage.cached_tokens == 0
            assert two.generate(GREEDY).usage.cached_tokens == 0
            kid = one.fork()[0]
            assert kid.namespace == "a"
            assert kid.generate(greedy_params(namespace="a")).usage.computed_tokens == 1
            with pytest.raises(InvalidRequest, match="namespace 'a', not 'b'"):
                kid.generate(greedy_params(namespace="b"))

    def test_lookup_and_cached_len(self, rt: Runtime) -> None:
        with rt.branch(random_ids(40)) as branch:
            assert branch.cached_len == 0
            branch.generate(GREEDY)
            assert branch.cached_len == 47
            branch.extend([1, 2])
            found = branch.lookup()
            assert (found.cached_len, found.reason) == (47, "never_seen")
            rt.flush_cache()
            assert branch.cached_len == 0
            out = branch.generate(GREEDY)  # computed again, and usage says so
            assert (out.usage.cached_tokens, out.usage.computed_tokens) == (0, 50)


class TestErrors:
    def test_too_long_changes_nothing(self, rt: Runtime) -> None:
        limit = rt.max_seq_len
        with rt.branch(random_ids(limit - 2)) as branch:
            with pytest.raises(InvalidRequest, match=f"at most {limit} are allowed"):
                branch.extend([1, 2, 3])
            assert branch.length == limit - 2
            out = branch.generate(GREEDY)
            assert (len(out.token_ids), out.finish_reason) == (2, "length")
            assert branch.length == limit
            with pytest.raises(InvalidRequest, match=f"at most {limit - 1} are allowed"):
                branch.generate(GREEDY)
            with pytest.raises(InvalidRequest, match="at most"):
                branch.extend([1])
            branch.truncate(limit - 1)
            assert branch.generate(GREEDY).token_ids == out.token_ids[1:]

    def test_what_is_refused(self, rt: Runtime) -> None:
        for prompt in ("", [], [288], object()):
            with pytest.raises(InvalidRequest):
                rt.branch(prompt)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="namespace"):
            rt.branch("x", namespace=1)  # type: ignore[arg-type]
        with rt.branch("hello") as branch:
            for more in ([288], [-1], [True], [1.5], ["a"], None, 7, [[1]], np.zeros((2, 2), int)):
                with pytest.raises(InvalidRequest):
                    branch.extend(more)  # type: ignore[arg-type]
            for length in (-1, 6, True, 1.0):
                with pytest.raises(InvalidRequest, match="length"):
                    branch.truncate(length)  # type: ignore[arg-type]
            for n in (0, -1, None):
                with pytest.raises(InvalidRequest, match="n must be"):
                    branch.fork(n)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="n=1"):
                branch.generate(SamplingParams(n=2))
            with pytest.raises(InvalidRequest, match="SamplingParams"):
                branch.generate({"max_tokens": 1})  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="SamplingParams"):
                branch.stream(3)  # type: ignore[arg-type]
            branch.truncate(0)
            assert (branch.length, branch.text, branch.cached_len) == (0, "", 0)
            with pytest.raises(InvalidRequest, match="empty"):
                branch.generate(GREEDY)
            branch.extend("hello")
            assert branch.generate(GREEDY).usage.prompt_tokens == 5

    def test_one_at_a_time(self, rt: Runtime) -> None:
        with rt.branch("hello") as branch:
            stream = branch.stream(GREEDY)
            branch.extend("!")  # not begun yet
            next(stream)
            moves: list[Callable[[], object]] = [
                lambda: branch.extend("x"),
                lambda: branch.truncate(1),
                lambda: branch.generate(GREEDY),
                lambda: next(branch.stream(GREEDY)),
            ]
            for move in moves:
                with pytest.raises(InvalidRequest, match="being moved"):
                    move()
            assert branch.fork()[0].length == branch.length
            last = [*stream][-1].completion
            assert last is not None
            assert branch.tokens.tolist() == [*HELLO, 0, *last.token_ids]
            branch.extend("x")

    def test_released(self, rt: Runtime) -> None:
        branch = rt.branch("hello")
        branch.generate(GREEDY)
        kid = branch.fork()[0]
        stream = branch.stream(GREEDY)
        branch.release()
        branch.release()
        acts: list[Callable[[], object]] = [
            branch.fork,
            branch.generate,
            branch.stream,
            branch.astream,
            branch.lookup,
            lambda: branch.cached_len,
            lambda: branch.extend("x"),
            lambda: branch.truncate(1),
            lambda: next(stream),
            lambda: asyncio.run(branch.agenerate(GREEDY)),
        ]
        for act in acts:
            with pytest.raises(InvalidRequest, match="released"):
                act()
        assert branch.length == len(branch.tokens) == 13
        assert branch.text.startswith("hello")
        assert kid.generate(GREEDY).usage.computed_tokens == 1

    def test_release_while_a_stream_runs(self, rt: Runtime) -> None:
        branch = rt.branch("hello")
        stream = branch.stream(GREEDY)
        next(stream)
        branch.release()
        assert rt.cache_stats()["sessions"] == 1
        last = [*stream][-1].completion
        assert last is not None
        assert len(last.token_ids) == 8
        assert rt.cache_stats()["sessions"] == 0

    def test_closed_runtime(self, folder: Path) -> None:
        rt = Runtime(str(folder), num_pages=64)
        branch, used = rt.branch("hello"), rt.branch("hello")
        used.generate(GREEDY)
        stream = branch.stream(GREEDY)
        rt.close()
        acts: list[Callable[[], object]] = [
            branch.fork,
            branch.generate,
            branch.stream,
            branch.lookup,
            lambda: branch.extend("x"),
            lambda: branch.truncate(1),
            lambda: next(stream),
            lambda: rt.branch("x"),
        ]
        for act in acts:
            with pytest.raises(EngineDead, match="closed"):
                act()
        assert branch.text == "hello"
        used.release()
        del used
        gc.collect()

    def test_a_model_without_tokenizer(self, tmp_path: Path) -> None:
        with Runtime(str(make_checkpoint(tmp_path, "llama")), num_pages=64) as rt:
            branch = rt.branch([1, 2, 3])
            branch.extend([4])
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                branch.extend("x")
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                _ = branch.text
            assert len(branch.generate(GREEDY).token_ids) == 8


class TestSessions:
    """A branch's K/V goes last; when it is released or gone, first."""

    def test_dropped_handles_are_reclaimed(self, rt: Runtime) -> None:
        root = rt.branch(random_ids(20))
        kids = root.fork(5)
        for kid in kids:
            kid.generate(greedy_params(2))
        assert rt.cache_stats()["sessions"] == 5
        del kid, kids
        gc.collect()
        assert rt.cache_stats()["sessions"] == 1  # the root has taken over what they shared
        parent = root.fork()[0].parent
        assert parent is root
        orphan = rt.branch([1]).fork()[0]
        assert orphan.parent is None

    def test_many_threads_drop_handles(self, rt: Runtime) -> None:
        root = rt.branch(random_ids(30))

        def play(seed: int) -> None:
            for turn in range(6):
                kid = root.fork()[0].fork()[0]
                kid.extend([seed, turn])
                kid.generate(greedy_params(2))
                if turn % 2:
                    kid.release()

        threads = [threading.Thread(target=play, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        wait_until(lambda: rt.cache_stats()["sessions"] <= 1)

    def test_chains_of_forks_stay_short(self, rt: Runtime) -> None:
        branch = rt.branch([1, 2, 3])
        for _ in range(2000):
            branch = branch.fork()[0]
        sessions = [one for one in gc.get_objects() if type(one) is SessionHandle]
        assert len(sessions) <= 3
        assert branch.generate(GREEDY).token_ids

    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_what_is_held_goes_last(self, folder: Path, page_size: int) -> None:
        with Runtime(str(folder), num_pages=512 // page_size, page_size=page_size) as rt:
            with rt.branch(random_ids(100, 1)) as kept, rt.branch(random_ids(100, 2)) as gone:
                kept.generate(GREEDY)
                gone.generate(GREEDY)
                gone.release()
                for seed in range(3, 12):
                    rt.generate(random_ids(120, seed), greedy_params(2))
                assert kept.cached_len == 107
                assert rt.lookup(gone.tokens).cached_len == 0
            rt.check()

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_a_parent_keeps_what_its_forks_computed(self, folder: Path, page_size: int) -> None:
        with Runtime(str(folder), num_pages=512 // page_size, page_size=page_size) as rt:
            with rt.branch(random_ids(96, 1)) as root:
                middle = root.fork()[0]
                for kid in middle.fork(3):
                    kid.generate(GREEDY)
                    kid.release()
                middle.release()
                for seed in range(3, 12):
                    rt.generate(random_ids(120, seed), greedy_params(2))
                assert root.cached_len >= 95
                rt.check()
            assert rt.cache_stats()["sessions"] == 0

    def test_a_parent_keeps_what_its_forks_computed_after_a_flush(self, folder: Path) -> None:
        with Runtime(str(folder), num_pages=512) as rt, rt.branch(random_ids(96, 1)) as root:
            for kid in root.fork(2):
                rt.flush_cache()
                kid.generate(GREEDY)
                kid.release()
            for seed in range(3, 12):
                rt.generate(random_ids(120, seed), greedy_params(2))
            assert root.cached_len == 95
            rt.check()

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("end", ["release", "truncate"])
    def test_a_fork_keeps_what_its_parent_lets_go(
        self, folder: Path, page_size: int, end: str
    ) -> None:
        """Also where the fork is one of a fork that is gone, and none of them ever ran."""
        with Runtime(str(folder), num_pages=512 // page_size, page_size=page_size) as rt:
            with rt.branch(random_ids(96, 1)) as root:
                root.generate(greedy_params(16))
                kid = root.fork(2)[0].fork(20)[-1]
                assert rt.cache_stats()["sessions"] == 1
                if end == "release":
                    root.release()
                else:
                    root.truncate(5)
                for seed in range(3, 12):
                    rt.generate(random_ids(120, seed), greedy_params(2))
                assert kid.cached_len >= 111 - page_size
                rt.check()
            kid.release()
            assert rt.cache_stats()["sessions"] == 0

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_what_is_cut_off_is_let_go(self, folder: Path, page_size: int) -> None:
        num_pages = 384 // page_size
        with (
            Runtime(str(folder), num_pages=num_pages, page_size=page_size) as rt,
            rt.branch(random_ids(64, 1)) as branch,
        ):
            branch.generate(greedy_params(100))
            whole = branch.tokens
            assert rt.lookup(whole).cached_len == 163
            branch.truncate(64)
            for seed in range(3, 6):
                rt.generate(random_ids(120, seed), greedy_params(2))
            assert branch.cached_len == 63
            assert rt.lookup(whole).cached_len <= 64
            rt.check()


def test_branch_is_exported() -> None:
    assert Branch.__module__ == "radixserve.api.branch"
