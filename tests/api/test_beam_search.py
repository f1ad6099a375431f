"""Beam search: the answers and scores of transformers, however the work is cut up."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

from radixserve import (
    Completion,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    Runtime,
    SamplingParams,
)
from radixserve.arrays import IntArray
from radixserve.request import BeamParams
from tests.beams.beam_reference import StoppedBeams, search
from tests.checkpoints import all_logprobs, load_reference, make_checkpoint
from tests.pacing import PATIENCE_S, held, until, wait_until

TOLERANCE = 1e-4
TIE = 1e-5  # candidates closer than this: float32 cannot tell, nor can transformers
NUM_CASES = 40
PROMPT = list(range(5, 45))


@dataclass
class Case:
    prompt: list[int]
    options: dict[str, Any]
    sequences: list[list[int]]
    scores: list[float]


class Reference:
    """transformers' model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_reference(folder)
        self.model.generation_config.eos_token_id = None
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def search(self, prompt: list[int], options: dict[str, Any]) -> Case:
        """What its `generate` finds with the options of `beam_search`."""
        ids = torch.tensor([prompt])
        ends = list(options.get("stop_token_ids", ()))
        more: dict[str, Any] = {}
        if ends:
            more["eos_token_id"] = ends
        if options.get("min_tokens") and ends:
            more["min_new_tokens"] = options["min_tokens"]
        if options.get("stop"):
            more |= {"stop_strings": list(options["stop"]), "tokenizer": self.tokenizer}
        if options.get("repetition_penalty", 1.0) != 1.0:
            more["repetition_penalty"] = options["repetition_penalty"]
        width = options["beam_width"]
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=options["max_tokens"],
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=options.get("early_stopping", False),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
        lengths = (found.beam_indices >= 0).sum(1).tolist()
        rows = found.sequences[:, len(prompt) :].tolist()
        sequences = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return Case(prompt, options, sequences, found.sequences_scores.tolist())

    def stop_check(self, stops: list[str] | None) -> Callable[[IntArray, int], bool] | None:
        if not stops:
            return None
        criteria = StopStringCriteria(self.tokenizer, stops)
        return lambda before, token_id: bool(
            criteria(torch.tensor([[*before.tolist(), token_id]]), None)[0]
        )

    def least_gap(self, case: Case) -> float:
        """Between what was chosen and what was not, at any step."""
        options: dict[str, Any] = case.options
        gaps: list[float] = []
        penalty = options.get("repetition_penalty", 1.0)

        def table(tokens: list[int]) -> np.ndarray:
            scores = all_logprobs(self.model, tokens)[-1].numpy().copy()
            seen = np.unique(tokens)
            scores[seen] *= penalty
            return scores

        beams = StoppedBeams(
            width=options["beam_width"],
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=options.get("early_stopping", False),
            is_stopped=self.stop_check(options.get("stop")),
        )
        ends = frozenset(options.get("stop_token_ids", ()))
        arguments = (ends, options["max_tokens"], options.get("min_tokens", 0))
        search(table, case.prompt, beams, *arguments, gaps=gaps)
        return min(gaps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A model with a few favourite tokens, so that what may end a beam is often among the best.
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"),
        "llama",
        seed=3,
        with_tokenizer=True,
        num_hidden_layers=1,
        initializer_range=0.12,
    )


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    found = make_cases(reference, 0)
    ended = [len(s) < c.options["max_tokens"] for c in found for s in c.sequences]
    assert sum(ended) > 30
    assert any(c.options.get("stop") for c in found)
    return found


def make_cases(reference: Reference, seed: int) -> list[Case]:
    """Random prompts, many of them heads of earlier ones, with random options."""
    rng = random.Random(seed)
    found: list[Case] = []
    for number in range(NUM_CASES):
        head: list[int] = []
        if found and rng.random() < 0.6:
            other = rng.choice(found)
            whole = other.prompt + other.sequences[0]
            head = whole[: rng.randint(0, min(len(whole), 60))]
        prompt = head + [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 17]))]
        options: dict[str, Any] = {
            "beam_width": rng.choice([2, 3, 4, 5, 8]),
            "max_tokens": rng.choice([1, 5, 9, 12, 16]),
            "length_penalty": rng.choice([1.0, 1.0, 0.0, -1.0, 0.6, 2.0]),
            "early_stopping": rng.choice([False, True, "never"]),
        }
        if number % 3:  # what ends it is taken from what it says without an end
            plain = reference.search(prompt, options).sequences
            said = [token for sequence in plain for token in sequence]
            options["stop_token_ids"] = sorted(set(rng.choices(said, k=rng.choice([1, 2, 4]))))
            if number % 4 == 0:
                options["stop"] = stop_strings(rng, plain, rng.choice([2, 60]))
        if number % 5 < 2:
            options["min_tokens"] = rng.randint(0, options["max_tokens"] // 2)
        if number % 2:
            options["repetition_penalty"] = rng.choice([0.8, 1.2, 1.7])
        found.append(reference.search(prompt, options))
    return found


def stop_strings(rng: random.Random, said: list[list[int]], count: int) -> list[str]:
    """One or two characters of what it says, wherever they are ASCII, and others if many."""
    texts = ["".join(chr(t + 33) if t < 94 else " " for t in tokens) for tokens in said]
    pairs = [text[i : i + n] for text in texts for n in (1, 2) for i in range(len(text) - n + 1)]
    found = {pair for pair in pairs if " " not in pair} or {"zz"}
    if count > 2:
        found |= {chr(rng.randrange(33, 127)) for _ in range(count)}
    return rng.sample(sorted(found), min(count, len(found)))


def options_of(case: Case) -> dict[str, Any]:
    """The ends are named in the case; the model has one of its own."""
    return {"logprobs": 0, "ignore_eos": True, **case.options}


async def run_all(rt: Runtime, cases: list[Case], seed: int) -> list[list[Completion]]:
    """All at once, in another order, beside requests of other kinds."""
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    other = SamplingParams(max_tokens=12, n=3, seed=1, ignore_eos=True)
    plain = asyncio.ensure_future(rt.agenerate([c.prompt for c in cases[:6]], other))
    tasks = [rt.abeam_search(cases[at].prompt, **options_of(cases[at])) for at in order]
    done = dict(zip(order, await asyncio.gather(*tasks), strict=True))
    await plain
    return [done[at] for at in range(len(cases))]


def check(reference: Reference, case: Case, found: list[Completion]) -> bool:
    """Whether it is equal; where candidates are too close to call it need not be."""
    sequences = [one.token_ids for one in found]
    scores = [one.score for one in found]
    close = pytest.approx(case.scores, abs=TOLERANCE, rel=1e-6)  # float32 cannot hold more
    is_equal = sequences == case.sequences and scores == close
    if not is_equal:
        assert reference.least_gap(case) < TIE, (case, sequences, scores)
    usage = found[0].usage
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens == len(case.prompt)
    for one in found[1:]:
        assert one.usage.cached_tokens == one.usage.prompt_tokens == len(case.prompt)
        assert one.usage.computed_tokens == 0
    for one in found:
        assert one.usage.completion_tokens == len(one.token_ids)
        ends = one.token_ids[-1] in case.options.get("stop_token_ids", ())
        if not case.options.get("stop"):
            assert one.finish_reason == ("stop" if ends else "length")
    return is_equal


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"page_size": 2, "chunked_prefill_size": 7},
        {"page_size": 16, "chunked_prefill_size": 5, "max_running_requests": 3},
        {"page_size": 1, "num_tokens": 90, "chunked_prefill_size": 16},
        {"page_size": 2, "num_tokens": 110},
        {"page_size": 16, "num_tokens": 160, "chunked_prefill_size": 64},
        {"page_size": 16, "num_tokens": 320, "cache": "hash"},
        {"page_size": 4, "cache": "off", "num_tokens": 600},
    ],
    ids=str,
)
def test_equal_to_transformers(
    reference: Reference, cases: list[Case], settings: dict[str, Any]
) -> None:
    size = settings["page_size"]
    settings = {"max_running_requests": 12, **settings}
    num_tokens = settings.pop("num_tokens", 8192)
    with Runtime(str(reference.folder), num_pages=num_tokens // size, **settings) as rt:
        for turn in range(2 if num_tokens > 1000 else 1):  # cold, then warm
            answers = asyncio.run(run_all(rt, cases, turn))
            equal = [check(reference, *pair) for pair in zip(cases, answers, strict=True)]
            assert sum(equal) >= NUM_CASES - 2
            rt.check()
        stats = rt.cache_stats()
        assert stats["sequences"] == stats["pages_private"] == stats["pages_locked"] == 0
        assert stats["prompted_tokens"] == stats["reused_tokens"] + stats["computed_tokens"]
        assert stats["evicted_tokens"] > 0 or num_tokens > 500


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 41))
def test_many_cases(reference: Reference, seed: int) -> None:
    found = make_cases(reference, seed)
    rng = random.Random(seed)
    size, tokens = rng.choice([1, 2, 16]), rng.choice([112, 176, 400, 4096])
    settings = {
        "chunked_prefill_size": rng.choice([1, 7, 64]),
        "max_running_requests": rng.choice([2, 5, 16]),
    }
    with Runtime(str(reference.folder), num_pages=tokens // size, page_size=size, **settings) as rt:
        answers = asyncio.run(run_all(rt, found, seed))
        equal = [check(reference, *pair) for pair in zip(found, answers, strict=True)]
        assert sum(equal) >= NUM_CASES - 3
        rt.check()
        assert rt.cache_stats()["sequences"] == 0


@pytest.fixture(scope="module")
def shared_rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=600, page_size=2) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime) -> Iterator[Runtime]:
    shared_rt.flush_cache()
    yield shared_rt
    shared_rt.check()
    assert shared_rt.cache_stats()["sequences"] == 0


class TestAnswers:
    def test_a_single_beam_is_greedy(self, rt: Runtime) -> None:
        (one,) = rt.beam_search(PROMPT, 1, 12, ignore_eos=True)
        greedy = rt.generate(
            PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
        )
        assert one.token_ids == greedy.token_ids
        assert one.cumulative_logprob == pytest.approx(greedy.cumulative_logprob, abs=TOLERANCE)
        assert one.score == pytest.approx(greedy.cumulative_logprob / 12, abs=TOLERANCE)

    def test_the_models_own_end_tokens(self, reference: Reference, tmp_path: Path) -> None:
        options = {"beam_width": 3, "max_tokens": 14}
        said = reference.search(PROMPT, options).sequences[0]
        ends = sorted({said[4], said[7], 257})
        make_checkpoint(
            tmp_path, "llama", 3, eos_ids=ends, num_hidden_layers=1, initializer_range=0.12
        )
        expected = reference.search(PROMPT, {**options, "stop_token_ids": ends})
        with Runtime(str(tmp_path), num_pages=600) as rt:
            outs = rt.beam_search(PROMPT, **options)  # type: ignore[arg-type]
            assert [out.token_ids for out in outs] == expected.sequences
            assert [out.score for out in outs] == pytest.approx(expected.scores, abs=TOLERANCE)
            assert any(out.finish_reason == "stop" for out in outs)
            assert all(out.text == "" for out in outs)

    def test_logprobs_are_the_models_own(self, rt: Runtime, reference: Reference) -> None:
        outs = rt.beam_search(PROMPT, 3, 6, ignore_eos=True, logprobs=2, repetition_penalty=1.3)
        for out in outs:
            table = all_logprobs(reference.model, PROMPT + out.token_ids)[len(PROMPT) - 1 : -1]
            own = [float(table[at, token]) for at, token in enumerate(out.token_ids)]
            assert out.logprobs == pytest.approx(own, abs=TOLERANCE)
            assert out.cumulative_logprob == pytest.approx(sum(own), abs=1e-3)
            assert out.top_logprobs is not None
            for at, top in enumerate(out.top_logprobs):
                best = table[at].topk(2)
                assert list(top) == best.indices.tolist()
                assert list(top.values()) == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        plain = rt.beam_search(PROMPT, 3, 6, ignore_eos=True)
        assert all(out.logprobs is None and out.top_logprobs is None for out in plain)

    def test_a_list_of_prompts(self, rt: Runtime) -> None:
        prompts = [PROMPT, PROMPT[:7], PROMPT]
        outs = rt.beam_search(prompts, 3, 5, ignore_eos=True)
        assert [len(one) for one in outs] == [3, 3, 3]
        for prompt, answers in zip(prompts, outs, strict=True):
            alone = rt.beam_search(prompt, 3, 5, ignore_eos=True)
            assert [o.token_ids for o in answers] == [o.token_ids for o in alone]

    def test_the_prompt_is_computed_once_and_stays(self, rt: Runtime) -> None:
        before = rt.cache_stats()
        outs = rt.beam_search(PROMPT, 6, 10, ignore_eos=True)
        after = rt.cache_stats()
        assert [out.usage.computed_tokens for out in outs] == [len(PROMPT), 0, 0, 0, 0, 0]
        assert after["prefilled_tokens"] - before["prefilled_tokens"] == len(PROMPT)
        assert after["decoded_tokens"] - before["decoded_tokens"] == 6 * 9
        assert after["generated_tokens"] - before["generated_tokens"] == 6 * 10
        assert rt.lookup([*PROMPT, 1]).cached_len == len(PROMPT)

    def test_text_ends_before_the_stop_string(self, rt: Runtime) -> None:
        assert rt.tokenizer is not None
        plain = rt.beam_search(PROMPT, 2, 12, ignore_eos=True)[0]
        ascii_at = [at for at, token in enumerate(plain.token_ids) if token < 94]
        stop = chr(plain.token_ids[ascii_at[0]] + 33)
        outs = rt.beam_search(PROMPT, 4, 12, ignore_eos=True, stop=stop, early_stopping=True)
        stopped = [out for out in outs if out.finish_reason == "stop"]
        assert stopped
        for out in stopped:
            assert rt.tokenizer.decode(out.token_ids).endswith(stop)
            assert out.text == rt.tokenizer.decode(out.token_ids)[: -len(stop)]

    def test_wrong_options(self, rt: Runtime) -> None:
        for options, message in (
            ({"beam_width": 0}, "beam_width must be"),
            ({"beam_width": 145}, "at most 144"),
            ({"length_penalty": float("nan")}, "length_penalty"),
            ({"early_stopping": "maybe"}, "early_stopping"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop_token_ids": [10**6]}, "out of range"),
            ({"request_id": "#1"}, "request_id"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                rt.beam_search(PROMPT, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="empty"):
            rt.beam_search([[1, 2], []])

    def test_records_instead_of_their_fields(self, rt: Runtime) -> None:
        fields = {"max_tokens": 5, "ignore_eos": True, "repetition_penalty": 1.3}
        expected = rt.beam_search(PROMPT, beam_width=3, length_penalty=0.5, **fields)
        params, beams = SamplingParams(**fields), BeamParams(width=3, length_penalty=0.5)
        found = rt.beam_search(PROMPT, params=params, beams=beams)
        again = asyncio.run(rt.abeam_search([PROMPT], params=params, beams=beams))[0]
        for outs in (found, again):
            assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
            scores = [out.score for out in outs]  # the prompt's K/V was computed in other chunks
            assert scores == pytest.approx([out.score for out in expected], abs=1e-5)

    def test_wrong_records(self, rt: Runtime) -> None:
        for options, message in (
            ({"params": SamplingParams(), "max_tokens": 3}, "params or max_tokens, not both"),
            ({"beams": BeamParams(), "beam_width": 3}, "beams or beam_width, not both"),
            ({"params": {"max_tokens": 3}}, "params must be SamplingParams"),
            ({"beams": 4}, "beams must be BeamParams"),
            ({"params": SamplingParams(top_p=0.5)}, "does not sample: top_p"),
            ({"temperature": 0.5}, "does not sample: temperature"),
            ({"params": SamplingParams(n=2)}, "does not sample: n "),
            ({"beam_with": 3}, "unknown.*beam_with.*allowed"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                rt.beam_search(PROMPT, **options)


class TestEnds:
    def test_abort_returns_what_there_is(self, rt: Runtime) -> None:
        found: list[list[Completion]] = []
        thread = threading.Thread(
            target=lambda: found.append(
                rt.beam_search(PROMPT, 8, 450, ignore_eos=True, request_id="mine")
            )
        )
        decoded = rt.cache_stats()["decoded_tokens"]
        with held(rt):
            thread.start()
            wait_until(lambda: rt.cache_stats()["decoded_tokens"] > decoded)
            assert rt.abort("mine") == 1
            thread.join(PATIENCE_S)
        (outs,) = found
        assert outs
        assert all(out.finish_reason == "abort" for out in outs)

    def test_cancelling_the_task(self, rt: Runtime) -> None:
        async def main() -> None:
            task = asyncio.ensure_future(rt.abeam_search(PROMPT, 4, 300, ignore_eos=True))
            await until(lambda: rt.cache_stats()["running"] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: rt.cache_stats()["running"] == 0)

        with held(rt):
            asyncio.run(main())

    def test_closing_during_work(self, folder: Path) -> None:
        with Runtime(str(folder), num_pages=600) as rt:
            raised: list[BaseException] = []

            def run() -> None:
                try:
                    rt.beam_search(PROMPT, 4, 400, ignore_eos=True)
                except EngineDead as error:
                    raised.append(error)

            thread = threading.Thread(target=run)
            with held(rt):
                thread.start()
                wait_until(lambda: rt.cache_stats()["running"] > 0)
                rt.close()
        thread.join(PATIENCE_S)
        assert len(raised) == 1

    def test_a_broken_model_is_reported(self, folder: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        weights = load_file(tmp_path / "model.safetensors")
        weights["lm_head.weight"][3, 0] = float("nan")
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with Runtime(str(tmp_path), num_pages=200) as rt:
            with pytest.raises(RequestFailed, match="nan"):
                rt.beam_search(PROMPT, 4)
            assert rt.cache_stats()["sequences"] == 0
            rt.check()
