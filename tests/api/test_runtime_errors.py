"""What `Runtime` refuses, and that nothing hangs where something fails."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import (
    EngineDead,
    InvalidRequest,
    RequestFailed,
    Runtime,
    SamplingParams,
)
from radixserve.models.cpu_decoder import CpuDecoder
from radixserve.models.decoder import Decoder
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve.scheduler import Scheduler
from tests.api.test_runtime import GREEDY, greedy_params
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.pacing import PATIENCE_S, held, wait_until


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "says"),
        [
            ("", "empty"),
            ([1, VOCAB_SIZE], "0 to 287"),
            ([-1], "out of range"),
            ([2**70], "out of range"),
            ([1] * 512, "at most 511"),
            ([1, "a"], "a prompt is"),
            ([1.5], "a prompt is"),
            (5, "a prompt is"),
            (None, "a prompt is"),
            ([True, False], "a prompt is"),
            (np.zeros((1, 2, 2), np.int32), "flat"),
            (np.zeros(3), "integers"),
            ([{"content": "no role"}], "chat message"),
            ([{"role": "user", "content": 5}], "must be text"),
            ([{"role": "user", "content": [{"type": "image"}]}], "must be text"),
            ("half a pair: \ud800", "Unicode"),
            ([["a"]], "a prompt is"),
            (["fine", ""], "empty"),
        ],
        ids=str,
    )
    def test_prompts(self, rt: Runtime, prompt: Any, says: str) -> None:
        before = rt.cache_stats()["num_acquired"]
        with pytest.raises(InvalidRequest, match=says):
            rt.generate(prompt, GREEDY)
        assert rt.cache_stats()["num_acquired"] == before

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"temprature": 1.0}, "unknown.*temprature.*allowed.*temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"temperature": -0.1}, ">= 0"),
            ({"temperature": "hot"}, "number"),
            ({"max_tokens": 0}, ">= 1"),
            ({"max_tokens": 2.5}, "integer"),
            ({"max_tokens": True}, "integer"),
            ({"min_tokens": 9, "max_tokens": 8}, "between 0 and 8"),
            ({"top_p": 0.0}, "above 0"),
            ({"top_p": 1.1}, "<= 1"),
            ({"top_k": -2}, ">= -1"),
            ({"min_p": float("inf")}, "min_p"),
            ({"repetition_penalty": 0}, ">= 0.01"),
            ({"temperature": 1e-320}, ">= 1e-05"),
            ({"temperature": 10**400}, "<= 100"),
            ({"presence_penalty": 3}, "<= 2"),
            ({"stop": [""]}, "non-empty"),
            ({"stop": 5}, "string"),
            ({"stop": {"a": 1}}, "string"),
            ({"stop_token_ids": [1.5]}, "integer"),
            ({"stop_token_ids": "ab"}, "list of token ids"),
            ({"stop_token_ids": [-1]}, "stop_token_ids"),
            ({"seed": 2**63}, "seed"),
            ({"logprobs": 2**20 + 1}, "between 0 and 1048576"),
            ({"ignore_eos": 1}, "True or False"),
            ({"namespace": 3}, "string"),
            ({"n": 0}, "n must be"),
        ],
        ids=str,
    )
    def test_params(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidRequest, match=says):
            SamplingParams(**fields)

    def test_numpy_numbers_and_any_iterable_will_do(self) -> None:
        params = SamplingParams(
            top_k=np.int64(3),  # type: ignore[arg-type]
            temperature=np.float32(0.5),  # type: ignore[arg-type]
            stop=(word for word in ("a", "b")),
            stop_token_ids=range(3),
        )
        assert (type(params.top_k), type(params.temperature)) == (int, float)
        assert (params.stop, params.stop_token_ids) == (("a", "b"), (0, 1, 2))

    def test_min_tokens_needs_a_token_that_does_not_end(self, rt: Runtime) -> None:
        params = SamplingParams(min_tokens=1, stop_token_ids=range(VOCAB_SIZE))
        with pytest.raises(InvalidRequest, match="every token ends"):
            rt.generate("a", params)

    def test_names_of_a_wrong_kind(self, rt: Runtime) -> None:
        for use in (
            lambda: rt.lookup("a", namespace=[]),  # type: ignore[arg-type]
            lambda: rt.flush_cache(5),  # type: ignore[arg-type]
            lambda: rt.abort([]),  # type: ignore[arg-type]
            lambda: rt.cache_tree(-1),
            lambda: rt.generate("a", GREEDY, progress="x"),  # type: ignore[call-overload]
            lambda: rt.generate("a", GREEDY, request_id="#1"),
            lambda: rt.generate(["a", "b"], GREEDY, request_id="x"),
        ):
            with pytest.raises(InvalidRequest):
                use()
        for model in (5, None, b"demo", ""):
            with pytest.raises(InvalidRequest):
                Runtime(model)  # type: ignore[arg-type]

    def test_params_of_a_wrong_kind(self, rt: Runtime) -> None:
        for bad in ({"max_tokens": 3}, [GREEDY], "greedy"):
            with pytest.raises(InvalidRequest):
                rt.generate(["a", "b"], bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="0 to 287"):
            rt.generate("a", SamplingParams(stop_token_ids=[300]))

    def test_settings(self, folder: Path) -> None:
        for bad, says in (
            ({"page_sise": 4}, "unknown.*page_sise.*allowed.*page_size"),
            ({"page_size": 0}, "page_size"),
            ({"cache": "ram"}, "radix, hash, off"),
            ({"hash_algorithm": "md5"}, "sha256, xxh3"),
            ({"eviction": "random"}, "lru, arc, lfu, fifo, slru, priority"),
            ({"cache": "hash", "eviction": "arc"}, 'must be "lru" with cache="hash"'),
            ({"num_pages": 5, "kv_cache_memory": 1000}, "not both"),
            ({"kv_cache_memory": "lots"}, "512MB"),
            ({"max_seq_len": 100_000}, "512"),
            ({"num_pages": 1}, "at least 2"),
            ({"device": "tpu"}, "device"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                Runtime(str(folder), **bad)

    def test_the_hash_cache_reuses_whole_blocks_and_can_be_looked_into(self, folder: Path) -> None:
        with Runtime(str(folder), num_pages=64, cache="hash") as rt:
            assert rt.config.page_size == 16
            prompt = [5 + i % 40 for i in range(40)]
            first = rt.generate(prompt, GREEDY)
            second = rt.generate(prompt, GREEDY)
            assert second.token_ids == first.token_ids
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 32)
            assert second.miss is not None
            assert second.miss.reason == rt.lookup(prompt).reason == "full"
            assert rt.cache_stats()["nodes"] == 2  # the third block is not full
            (block,) = rt.cache_tree()["namespaces"][""]["children"]
            assert block["tokens"] == prompt[:16]
            assert block["children"][0]["tokens"] == prompt[16:32]
            rt.check()
            rt.flush_cache()
            assert rt.lookup(prompt)[:5] == (0, "never_seen", 0, None, None)

    def test_the_cache_size_limits_prompts(self, folder: Path) -> None:
        with Runtime(str(folder), num_pages=20) as rt:
            with pytest.raises(InvalidRequest, match=r"at most 19 .*the cache's size"):
                rt.generate([1] * 20, GREEDY)
            out = rt.generate([1] * 15, greedy_params(max_tokens=50))
            assert (out.finish_reason, out.usage.completion_tokens) == ("length", 5)

    def test_no_such_model(self, tmp_path: Path) -> None:
        for name in (str(tmp_path), str(tmp_path / "missing"), "no/such-model"):
            with pytest.raises(InvalidRequest):
                Runtime(name)

    def test_without_a_tokenizer_ids_still_work(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        with Runtime(str(tmp_path), num_pages=100) as rt:
            out = rt.generate([1, 2, 3], GREEDY)
            assert (out.text, len(out.token_ids)) == ("", 8)
            assert [len(c.token_ids) for c in rt.stream([1, 2, 3], GREEDY)] == [1] * 8
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                rt.generate("text", GREEDY)
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                rt.generate([1], SamplingParams(stop="x"))

    def test_a_bad_request_disturbs_no_other(self, rt: Runtime) -> None:
        expected = rt.generate("hello", greedy_params(max_tokens=100)).token_ids
        with ThreadPoolExecutor(1) as pool:
            good = pool.submit(lambda: rt.generate("hello", greedy_params(max_tokens=100)))
            for _ in range(20):
                with pytest.raises(InvalidRequest):
                    rt.generate([9999], GREEDY)
            assert good.result(timeout=PATIENCE_S).token_ids == expected

    def test_request_ids_in_use(self, rt: Runtime) -> None:
        with ThreadPoolExecutor(1) as pool, held(rt):
            first = pool.submit(
                lambda: rt.generate("hello", greedy_params(max_tokens=400), request_id="twin")
            )
            wait_until(lambda: rt.cache_stats()["running"] == 1)
            with pytest.raises(InvalidRequest, match="in use"):
                rt.generate("other", GREEDY, request_id="twin")
            assert rt.cache_stats()["running"] == 1, "the first one was ended for the second"
            rt.abort("twin")
            first.result(timeout=PATIENCE_S)


def num_open(rt: Runtime) -> int:
    stats = rt.cache_stats()
    return int(stats["waiting"] + stats["running"])


class TestNothingHangs:
    def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Runtime(str(folder), num_pages=500) as rt:
            expected = rt.generate("hello", GREEDY).token_ids
            rt.flush_cache()
            launch = CpuModelRunner.launch
            calls = [0]

            def failing(self: CpuModelRunner, schedule: Any) -> Any:
                calls[0] += 1
                if calls[0] == 2:  # the first that decodes
                    raise RuntimeError("the device is on fire")
                return launch(self, schedule)

            monkeypatch.setattr(CpuModelRunner, "launch", failing)
            with pytest.raises(RequestFailed, match="on fire") as caught:
                rt.generate(["hello", "world"], GREEDY)
            assert isinstance(caught.value.__cause__, RuntimeError)
            rt.check()
            assert rt.cache_stats()["pages_private"] == 0
            assert rt.generate("hello", GREEDY).token_ids == expected

    @pytest.mark.parametrize("fails_at", range(8))
    def test_text_that_cannot_be_made_ends_its_request_only(
        self, rt: Runtime, monkeypatch: pytest.MonkeyPatch, fails_at: int
    ) -> None:
        assert rt.tokenizer is not None
        decode, calls = rt.tokenizer.decode, [0]

        def failing(*args: Any, **kwargs: Any) -> str:
            if threading.current_thread().name == "radixserve-engine":
                calls[0] += 1
                if calls[0] > fails_at:
                    raise ValueError("no text")
            return decode(*args, **kwargs)

        for params in (GREEDY, greedy_params(stop="never")):
            for use in (
                lambda p=params: rt.generate("hello", p),
                lambda p=params: list(rt.stream("hello", p)),
                lambda p=params: asyncio.run(rt.agenerate("hello", p)),
            ):
                calls[0] = 0
                monkeypatch.setattr(rt.tokenizer, "decode", failing)
                with ThreadPoolExecutor(1) as pool:
                    error = pool.submit(use).exception(timeout=PATIENCE_S)
                if error is None:
                    assert calls[0] <= fails_at
                else:
                    assert isinstance(error, RequestFailed)
                    assert "no text" in str(error)
                monkeypatch.setattr(rt.tokenizer, "decode", decode)
        assert rt.generate("hello", GREEDY).text

    def test_a_model_that_breaks_ends_its_request_only(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Runtime(str(folder), num_pages=500) as rt:
            expected = rt.generate("hello", GREEDY).token_ids
            submitted = threading.Event()
            for kind in (CpuDecoder, Decoder):  # with and without a compiler
                monkeypatch.setattr(kind, "forward", self.breaking(kind.forward, submitted))
            outs = asyncio.run(self.both(rt, submitted))
            assert outs[0].token_ids == expected
            assert isinstance(outs[1], RequestFailed)
            assert "the best logit is nan" in str(outs[1])
            rt.check()
            assert rt.cache_stats()["pages_private"] == 0

    @staticmethod
    def breaking(forward: Callable[..., Any], submitted: threading.Event) -> Callable[..., Any]:
        def breaks(model: Any, batch: Any, backend: Any) -> Any:
            assert submitted.wait(PATIENCE_S)  # so that some step holds both
            logits = forward(model, batch, backend)
            if len(logits) == 2:
                logits[1] = float("nan")
            return logits

        return breaks

    @staticmethod
    async def both(rt: Runtime, submitted: threading.Event) -> list[Any]:
        calls = [
            asyncio.ensure_future(rt.agenerate(prompt, GREEDY)) for prompt in ("hello", "world")
        ]
        await asyncio.sleep(0)  # each has run up to its first answer
        submitted.set()
        return list(await asyncio.gather(*calls, return_exceptions=True))

    def test_a_dead_engine_tells_every_caller(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rt = Runtime(str(folder), num_pages=500)
        with ThreadPoolExecutor(4) as pool:

            def broken(*_: Any) -> Any:
                raise ValueError("a bug in the scheduler")

            with held(rt):
                calls = [
                    pool.submit(rt.generate, f"call {i}", greedy_params(max_tokens=400))
                    for i in range(4)
                ]
                wait_until(lambda: num_open(rt) == 4)
                monkeypatch.setattr(Scheduler, "update", broken)
            for call in calls:
                with pytest.raises(EngineDead, match="a bug"):
                    call.result(timeout=PATIENCE_S)
        for use in (lambda: rt.generate("x", GREEDY), rt.cache_stats, lambda: rt.lookup("x")):
            with pytest.raises(EngineDead, match="a bug"):
                use()
        rt.close()

    def test_close_during_work(self, folder: Path) -> None:
        rt = Runtime(str(folder), num_pages=2000, max_running_requests=2)
        with ThreadPoolExecutor(6) as pool, held(rt):
            calls = [
                pool.submit(rt.generate, f"call {i}", greedy_params(max_tokens=400))
                for i in range(5)
            ]
            streaming = pool.submit(lambda: list(rt.stream("s", greedy_params(max_tokens=400))))
            wait_until(lambda: num_open(rt) == 6)
            rt.close()
            for call in [*calls, streaming]:
                with pytest.raises(EngineDead, match="closed"):
                    call.result(timeout=PATIENCE_S)
        rt.close()
        with pytest.raises(EngineDead, match="closed"):
            rt.generate("x", GREEDY)

    def test_ctrl_c_ends_a_waiting_call(self, rt: Runtime) -> None:
        main = threading.get_ident()

        def interrupt() -> None:
            wait_until(lambda: num_open(rt) == 60)
            signal.pthread_kill(main, signal.SIGINT)

        # A shell lets processes that it starts in the background ignore the signal.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with ThreadPoolExecutor(1) as pool, held(rt):
                pool.submit(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    rt.generate([f"p {i}" for i in range(60)], greedy_params(max_tokens=450))
                wait_until(lambda: num_open(rt) == 0)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert rt.generate("hello", GREEDY).finish_reason == "length"

    def test_abort_at_any_moment(self, rt: Runtime) -> None:
        rng = random.Random(0)
        for round_number in range(30):
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(
                    rt.generate, [f"{round_number} {i}" * 9 for i in range(3)], greedy_params()
                )
                time.sleep(rng.random() * 0.02)
                rt.abort()
                outs = call.result(timeout=PATIENCE_S)
            assert {out.finish_reason for out in outs} <= {"abort", "length"}
            rt.check()

    def test_a_dropped_runtime_ends_its_thread(self, folder: Path) -> None:
        before = set(threading.enumerate())
        rt = Runtime(str(folder), num_pages=100)
        fresh = set(threading.enumerate()) - before
        (thread,) = [thread for thread in fresh if thread.name == "radixserve-engine"]
        del rt
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_gets_an_error_at_once(folder: Path) -> None:
    with Runtime(str(folder), num_pages=500) as rt:
        expected = rt.generate("hello", GREEDY).token_ids
        chat, branch = rt.chat(), rt.branch("hello")
        calls: list[Callable[[], object]] = [
            lambda: rt.generate("hello", GREEDY),
            lambda: rt.generate(["hello"], GREEDY),
            lambda: next(rt.stream("hello", GREEDY)),
            lambda: asyncio.run(rt.agenerate("hello", GREEDY)),
            lambda: rt.beam_search("hello", 2),
            lambda: rt.score("hello", ["a"]),
            lambda: rt.lookup("hello"),
            lambda: rt.branch("hello"),
            lambda: chat.send("hello"),
            lambda: branch.generate(GREEDY),
            rt.chat,
            rt.cache_stats,
            rt.flush_cache,
            rt.abort,
        ]
        reading, writing = os.pipe()
        with ThreadPoolExecutor(1) as pool, held(rt):  # forked while the engine works
            call = pool.submit(rt.generate, "x" * 50, greedy_params(max_tokens=50))
            wait_until(lambda: num_open(rt) == 1)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                found = []
                for one in calls:
                    try:
                        one()
                    except EngineDead as error:
                        found.append("make the Runtime in the process that uses it" in str(error))
                chat.close()
                rt.close()
                os.write(writing, bytes(found))
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reading, 100) == bytes([1] * len(calls))
        os.close(reading)
        os.close(writing)
        assert len(call.result(timeout=PATIENCE_S).token_ids) == 50
        assert rt.generate("hello", GREEDY).token_ids == expected
