"""What a user of `Runtime` relies on: every kind of call, counts, errors, nothing that hangs."""

from __future__ import annotations

import asyncio
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import (
    Completion,
    Runtime,
    SamplingParams,
)
from radixserve.api.progress import WIDE, BatchProgress
from tests.checkpoints import EOS_ID, greedy, load_reference, make_checkpoint
from tests.pacing import PATIENCE_S, held, until, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def greedy_params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


def make_counters(*counts: float) -> dict[str, float]:
    """Those that the bar reads; all 0 without arguments."""
    names = (
        "reused_tokens",
        "prefilled_tokens",
        "prefill_s",
        "decoded_tokens",
        "decode_s",
        "generated_tokens",
    )
    return dict(zip(names, counts or [0.0] * len(names), strict=True))


def encode(rt: Runtime, text: str) -> list[int]:
    assert rt.tokenizer is not None
    return rt.tokenizer.encode(text)


class TestCalls:
    def test_text_ids_and_chat(self, rt: Runtime) -> None:
        text = rt.generate("hello", GREEDY)
        assert isinstance(text, Completion)
        ids = encode(rt, "hello")
        assert text.token_ids == rt.generate(ids, GREEDY).token_ids
        assert text.token_ids == rt.generate(np.asarray(ids), GREEDY).token_ids
        assert text.usage.prompt_tokens == 5
        chat = rt.generate([{"role": "user", "content": "hello"}], GREEDY)
        assert chat.usage.prompt_tokens == 8  # <|user|>hello\n<|assistant|>

    def test_a_list_comes_back_in_order(self, rt: Runtime) -> None:
        prompts = ["abc", encode(rt, "abcd"), [{"role": "user", "content": "x"}], "abc"]
        outs = rt.generate(prompts, GREEDY)
        assert [o.token_ids for o in outs] == [rt.generate(p, GREEDY).token_ids for p in prompts]
        lengths = [o.usage.completion_tokens for o in rt.generate(
            ["a", "b", "c"], [greedy_params(max_tokens=n) for n in (3, 1, 2)]
        )]  # fmt: skip
        assert lengths == [3, 1, 2]

    def test_stream_is_the_completion_in_pieces(self, rt: Runtime) -> None:
        chunks = list(rt.stream("hello", greedy_params(max_tokens=20)))
        whole = chunks[-1].completion
        assert whole is not None
        assert all(chunk.completion is None for chunk in chunks[:-1])
        assert {chunk.request_id for chunk in chunks} == {whole.request_id}
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids
        assert whole.text == rt.generate("hello", greedy_params(max_tokens=20)).text

    def test_leaving_a_stream_aborts_it(self, rt: Runtime) -> None:
        before = rt.cache_stats()["aborted"]
        with held(rt):
            for _ in rt.stream("hello", greedy_params(max_tokens=300)):
                break
        wait_until(lambda: rt.cache_stats()["running"] == 0)
        assert rt.cache_stats()["aborted"] == before + 1

    def test_asyncio(self, rt: Runtime) -> None:
        async def main() -> None:
            many = await asyncio.gather(*(rt.agenerate(f"prompt {i}", GREEDY) for i in range(20)))
            assert [o.token_ids for o in many] == [
                rt.generate(f"prompt {i}", GREEDY).token_ids for i in range(20)
            ]
            pieces = [chunk async for chunk in rt.astream("hello", GREEDY)]
            assert "".join(p.text for p in pieces) == pieces[-1].completion.text  # type: ignore
            both = await rt.agenerate(["a", "b"], GREEDY)
            assert len(both) == 2

        asyncio.run(main())

    def test_cancelling_a_task_aborts_its_request(self, rt: Runtime) -> None:
        async def main() -> None:
            task = asyncio.create_task(rt.agenerate("hello", greedy_params(max_tokens=400)))
            await until(lambda: rt.cache_stats()["running"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with held(rt):
            asyncio.run(main())
        wait_until(lambda: rt.cache_stats()["running"] == 0)

    def test_many_threads(self, rt: Runtime) -> None:
        prompts = [f"thread {i % 7} says {i}" for i in range(40)]
        expected = [rt.generate(p, GREEDY).token_ids for p in prompts]
        rt.flush_cache()
        with ThreadPoolExecutor(8) as pool:
            outs = list(pool.map(lambda p: rt.generate(p, GREEDY), prompts))
        assert [o.token_ids for o in outs] == expected

    def test_abort_returns_what_there_is(self, rt: Runtime) -> None:
        with ThreadPoolExecutor(1) as pool, held(rt):
            future = pool.submit(
                lambda: rt.generate("hello", greedy_params(max_tokens=450), request_id="mine")
            )
            wait_until(lambda: rt.cache_stats()["running"] == 1)
            assert rt.abort("mine") == 1
            out = future.result(timeout=PATIENCE_S)
        assert out.finish_reason == "abort"
        assert out.usage.cached_tokens + out.usage.computed_tokens == out.usage.prompt_tokens
        assert rt.abort("mine") == 0

    def test_progress_bar_shows_rates_and_reuse(
        self,
        rt: Runtime,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(WIDE))
        rt.generate(["a b c"] * 3, GREEDY, progress=True)
        shown = capsys.readouterr().err
        assert re.search(r"3/3, 15 \+ \d+ tok, 53% cached, prefill [\d,]+ tok/s", shown)
        assert re.search(r"decode [\d,]+ tok/s", shown)

    def test_the_prefill_rate_rises_with_hits(
        self,
        rt: Runtime,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Reused tokens count as taken in; the time is what the engine spent on prompts."""
        monkeypatch.setenv("COLUMNS", str(WIDE))
        counters = iter([make_counters(), make_counters(900, 100, 0.5, 80, 0.2, 80)])
        with BatchProgress(1, lambda: next(counters), wanted=True) as bar:
            bar.add(rt.generate("a", GREEDY))
        assert "prefill 2,000 tok/s, decode 400 tok/s" in capsys.readouterr().err

    def test_the_bar_counts_tokens_and_failures_in_80_columns(
        self,
        rt: Runtime,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Tokens are also counted while no request ends."""
        monkeypatch.setenv("COLUMNS", "80")
        counters = [make_counters(0, 500_000, 1.0, 9, 1.0, 9)]
        counters.append(make_counters(10**7, 10**6, 9.0, 80, 1.0, 123_456))
        read = iter([make_counters(), *counters])
        completion = rt.generate("a", GREEDY)
        with BatchProgress(2, lambda: next(read), wanted=True) as bar:
            bar.refresh()
            assert "0/2, 500k + 9 tok, 0% cached" in capsys.readouterr().err
            bar.add(None)
            bar.add(completion)
        shown = capsys.readouterr().err.replace("\r", "\n")
        last = shown.strip().splitlines()[-1].strip()
        assert "| 2/2, 1 failed, 11M + 123k tok, 91% cached [00:00<00:00]" in last
        assert 40 < len(last) <= 80
        assert "#" in last or "█" in last

    def test_generate_alone_is_silent(self, rt: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
        rt.generate(["a", "b"], GREEDY)
        assert capfd.readouterr() == ("", "")


class TestCounts:
    def test_counts_are_the_true_common_prefixes(self, folder: Path) -> None:
        rng = random.Random(3)
        for page_size in (1, 2, 16, 64):
            with Runtime(str(folder), page_size=page_size, num_pages=8192 // page_size) as rt:
                known: list[list[int]] = []
                for _ in range(25):
                    head = rng.choice(known)[: rng.randint(0, 120)] if known else []
                    prompt = [*head, *(rng.randrange(256) for _ in range(rng.randint(1, 40)))]
                    expected = max((common(prompt[:-1], other) for other in known), default=0)
                    assert rt.lookup(prompt).cached_len == expected
                    out = rt.generate(prompt, greedy_params(max_tokens=rng.randint(1, 6)))
                    assert out.usage.cached_tokens == expected
                    assert out.usage.computed_tokens == len(prompt) - expected
                    assert out.miss is not None
                    assert out.miss.cached_len == expected
                    known.append(prompt + out.token_ids[:-1])
                rt.check()

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_512_shared_tokens_are_computed_once(self, tmp_path: Path, page_size: int) -> None:
        make_checkpoint(tmp_path, "llama", max_position_embeddings=1024)
        rng = random.Random(0)
        shared = [rng.randrange(256) for _ in range(512)]
        prompts = [[*shared, i, *(rng.randrange(256) for _ in range(31))] for i in range(32)]
        with Runtime(str(tmp_path), page_size=page_size, num_pages=8192 // page_size) as rt:
            outs = rt.generate(prompts, greedy_params(max_tokens=2))
            computed = sorted(out.usage.computed_tokens for out in outs)
            assert computed == [32] * 31 + [544]
            assert rt.cache_stats()["computed_tokens"] == 512 + 32 * 32

    def test_second_turn_reuses_the_generated_tokens(self, rt: Runtime) -> None:
        first = encode(rt, "what is a radix tree?")
        out = rt.generate(first, GREEDY)
        history = first + out.token_ids
        again = rt.generate([*history, *encode(rt, "and why?")], GREEDY)
        assert again.usage.cached_tokens == len(history) - 1  # its last token was never computed

    def test_namespaces_share_nothing(self, rt: Runtime) -> None:
        for namespace in ("a", "b"):
            out = rt.generate("the same words", greedy_params(namespace=namespace))
            assert out.usage.cached_tokens == 0
        assert rt.lookup("the same words", "a").reason == "full"
        rt.flush_cache("a")
        assert rt.lookup("the same words", "a").cached_len == 0
        assert rt.lookup("the same words", "b").cached_len == 13


def common(left: list[int], right: list[int]) -> int:
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


class TestSampling:
    def test_a_seed_is_reproducible_whatever_runs_beside_it(self, rt: Runtime) -> None:
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
        alone = rt.generate("story", params).token_ids
        others = [f"noise {i}" for i in range(9)]
        noise = SamplingParams(temperature=1.3, max_tokens=25, top_k=5)
        outs = rt.generate(
            [*others[:4], "story", *others[4:]], [noise] * 4 + [params] + [noise] * 5
        )
        assert outs[4].token_ids == alone
        assert rt.generate("story", params).token_ids == alone
        other = SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=20, ignore_eos=True)
        assert rt.generate("story", other).token_ids != alone

    def test_the_engine_seed_reproduces_a_whole_run(self, folder: Path) -> None:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        runs = []
        for seed in (1, 1, 2):
            with Runtime(str(folder), num_pages=500, seed=seed) as rt:
                runs.append([o.token_ids for o in rt.generate(["a", "b"], params)])
        assert runs[0] == runs[1] != runs[2]
        assert runs[0][0] != runs[0][1]

    def test_end_tokens(self, folder: Path, rt: Runtime) -> None:
        reference = greedy(load_reference(folder), encode(rt, "hello"), 40)[5:]
        third = reference[2]
        out = rt.generate("hello", greedy_params(stop_token_ids=[third], max_tokens=40))
        assert out.token_ids == reference[: reference.index(third) + 1]
        assert out.finish_reason == "stop"
        late = greedy_params(stop_token_ids=[third], max_tokens=40, min_tokens=30)
        out = rt.generate("hello", late)
        assert len(out.token_ids) >= 30
        assert third not in out.token_ids[:30]

    def test_all_eos_ids_of_the_generation_config_end_a_request(self, rt: Runtime) -> None:
        assert set(rt.model.eos_ids) == {EOS_ID, 10}
        outs = rt.generate(["x"] * 40, SamplingParams(temperature=3.0, max_tokens=300))
        ends = {out.token_ids[-1] for out in outs if out.finish_reason == "stop"}
        assert ends == {EOS_ID, 10}

    def test_logprobs(self, rt: Runtime) -> None:
        out = rt.generate("hello", greedy_params(logprobs=3))
        assert out.logprobs is not None
        assert out.top_logprobs is not None
        for token, logprob, top in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
            assert len(top) == 3
            assert top[token] == logprob == max(top.values())
        assert rt.generate("hello", GREEDY).logprobs is None
        assert rt.generate("hello", greedy_params(logprobs=0)).top_logprobs is None

    def test_penalties_reach_the_sampler(self, rt: Runtime) -> None:
        plain = rt.generate("aaaa", greedy_params(max_tokens=60))
        fresh = rt.generate("aaaa", greedy_params(max_tokens=60, repetition_penalty=50.0))
        assert len(set(fresh.token_ids)) == 60
        assert len(set(plain.token_ids)) < 60


class TestStopStrings:
    def test_text_ends_before_the_stop_string(self, rt: Runtime) -> None:
        text = rt.generate("hello", greedy_params(max_tokens=60)).text
        for start in (3, 10, 20):
            stop = text[start : start + 3]
            for out in (
                rt.generate("hello", greedy_params(max_tokens=60, stop=stop)),
                list(rt.stream("hello", greedy_params(max_tokens=60, stop=[stop])))[-1].completion,
            ):
                assert out is not None
                assert out.text == text[: text.index(stop)]
                assert out.finish_reason == "stop"
                assert len(out.token_ids) < 60

    def test_streamed_text_never_shows_a_part_of_it(self, rt: Runtime) -> None:
        text = rt.generate("hello", greedy_params(max_tokens=60)).text
        stop = text[10:14]
        chunks = list(rt.stream("hello", greedy_params(max_tokens=60, stop=stop)))
        assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]

    def test_min_tokens_holds_for_stop_strings(self, rt: Runtime) -> None:
        text = rt.generate("hello", greedy_params(max_tokens=60)).text
        out = rt.generate("hello", greedy_params(max_tokens=60, stop=text[4:6], min_tokens=50))
        assert out.usage.completion_tokens >= 50


def test_bfloat16_stays_close_to_float32(folder: Path, rt: Runtime) -> None:
    exact = rt.generate("hello there", greedy_params(logprobs=0, max_tokens=1))
    token = exact.token_ids[0]
    with Runtime(str(folder), num_pages=500, dtype="bfloat16", page_size=16) as half:
        assert str(half.model.dtype) == "torch.bfloat16"
        for _ in range(2):  # cold, warm
            out = half.generate("hello there", greedy_params(logprobs=100, max_tokens=1))
            assert out.top_logprobs is not None
            assert exact.logprobs is not None
            assert out.top_logprobs[0][token] == pytest.approx(exact.logprobs[0], abs=0.2)


def test_the_demo_model_speaks() -> None:
    with Runtime("demo") as rt:
        messages = [{"role": "user", "content": "What does json.dumps do?"}]
        out = rt.generate(messages, SamplingParams(temperature=0.0, max_tokens=40))
        assert len(out.text.split()) > 5
        assert out.text.isprintable() or "\n" in out.text
        assert rt.max_seq_len == 4096
        again = rt.generate(messages, SamplingParams(temperature=0.0, max_tokens=40))
        assert again.text == out.text
        assert again.usage.computed_tokens == 1
