"""Pictures in prompts give transformers' tokens and log-probabilities, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from tests.images.vision_checkpoints import (
    FAMILIES,
    LOOKING_AHEAD,
    MORE_FAMILIES,
    load_vision_reference,
    make_vision_checkpoint,
    picture,
    reference_answer,
    reference_inputs,
    said,
)

COUNT = 6
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
CHATS = {
    "text": [said("What is this?")],
    "one": [said(picture(1), "What is this?")],
    "several": [
        said("First\n", picture(1), "\nthen", picture(2, 80, 120), picture(2, 80, 120)),
    ],
    "turns": [
        said("Look at ", picture(3, 100, 40), " please."),
        {"role": "assistant", "content": "A wall."},
        said("And ", picture(4), "?"),
    ],
}


# Each another kind: positions in three parts and deepstack; layers of several shapes, some of which
# look ahead; states.
KINDS = ("qwen3_vl", "gemma4_large", "qwen3_5")


def families(names: tuple[str, ...]) -> list[Any]:
    """Parameters: those named, and in long runs all others."""
    return [
        pytest.param(family, marks=() if family in names else pytest.mark.long)
        for family in (*FAMILIES, *MORE_FAMILIES)
    ]


of_each_kind = pytest.mark.parametrize("case", families(KINDS), indirect=True, scope="module")


class Case(NamedTuple):
    folder: Path
    expected: dict[str, tuple[int, list[int], list[float]]]  # prompt tokens, tokens, logprobs


@pytest.fixture(scope="module", params=families(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model, expected = load_vision_reference(folder), {}
    for name, messages in CHATS.items():
        inputs = reference_inputs(folder, messages)
        answer = reference_answer(model, inputs, COUNT)
        expected[name] = (inputs["input_ids"].shape[1], *answer)
    return Case(folder, expected)


@pytest.fixture(scope="module")
def runtime(case: Case) -> Iterator[Runtime]:
    with Runtime(case.folder, num_pages=4096) as runtime:
        yield runtime


def check(case: Case, name: str, out: Any) -> None:
    num_prompt, tokens, logprobs = case.expected[name]
    assert out.usage.prompt_tokens == num_prompt
    assert out.token_ids == tokens
    assert out.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("name", CHATS)
def test_they_give_what_transformers_gives(case: Case, runtime: Runtime, name: str) -> None:
    runtime.flush_cache()
    cold, warm = (runtime.generate(CHATS[name], PARAMS) for _ in range(2))
    check(case, name, cold)
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert warm.usage.computed_tokens == 1


@of_each_kind
@pytest.mark.parametrize(("chunk", "page"), [(1, 3), (16, 1), (512, 3)])
def test_in_all_chunks_and_pages(case: Case, runtime: Runtime, chunk: int, page: int) -> None:
    check_chunks(case, runtime, chunk, page)


def test_in_chunks_and_pages(case: Case, runtime: Runtime) -> None:
    check_chunks(case, runtime, 7, 16)


def check_chunks(case: Case, runtime: Runtime, chunk: int, page: int) -> None:
    settings: dict[str, Any] = {"chunked_prefill_size": chunk, "page_size": page}
    with Runtime(case.folder, num_pages=1024, **settings) as other:
        for name, messages in CHATS.items():
            out = other.generate(messages, PARAMS)
            check(case, name, out)
            assert out.logprobs == runtime.generate(messages, PARAMS).logprobs


def test_beside_strangers(case: Case, runtime: Runtime) -> None:
    runtime.flush_cache()
    chats = [*CHATS.values(), [said("Hello")], *CHATS.values()]
    names = [*CHATS, None, *CHATS]
    for name, out in zip(names, runtime.generate(chats, PARAMS), strict=True):
        if name is not None:
            check(case, name, out)


@of_each_kind
def test_preempted(case: Case, runtime: Runtime) -> None:
    """Embeddings that were dropped meanwhile are computed again."""
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, logprobs=0)
    chats = [*CHATS.values(), *([said(picture(seed), "Hm")] for seed in range(30, 34))]
    longest = max(len(runtime.tokenize(chat)) for chat in chats)
    with Runtime(case.folder, num_pages=longest + 105, image_memory=1) as small:
        outs = small.generate(chats, params)
        assert small.cache_stats()["preemptions"] > 0
    for chat, out in zip(chats, outs, strict=True):
        alone = runtime.generate(chat, params)
        assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)


def test_branches_inside_and_after_a_picture(case: Case, runtime: Runtime) -> None:
    ids = runtime.tokenize(CHATS["several"])
    rows = np.flatnonzero(ids >= 1 << 30)
    is_uncut = case.folder.name.startswith(LOOKING_AHEAD)
    end = rows[0] + next(count for count in range(1, 99) if rows[count] != rows[0] + count)
    for length in (rows[0], rows[0] + 1, end - 1, end, rows[-1], rows[-1] + 1, len(ids)):
        runtime.flush_cache()
        if is_uncut and length in rows and ids[length] == ids[length - 1] + 1:
            with runtime.branch(CHATS["several"]) as branch:
                branch.generate(PARAMS)
                branch.truncate(int(length))
                with pytest.raises(InvalidRequest, match="a part of a picture, from token"):
                    branch.generate(PARAMS)
            continue
        want = runtime.generate([*ids[:length].tolist(), 65, 66], PARAMS)
        runtime.flush_cache()
        with runtime.branch(CHATS["several"]) as branch:
            branch.generate(PARAMS)
            branch.truncate(int(length))
            branch.extend([65, 66])
            out = branch.generate(PARAMS)
        assert (out.token_ids, out.logprobs) == (want.token_ids, want.logprobs)
        assert out.usage.computed_tokens == 2 + out.usage.missing_state_tokens


@of_each_kind
def test_a_chat_computes_new_tokens_only(runtime: Runtime) -> None:
    runtime.flush_cache()
    with runtime.chat(params=PARAMS) as chat:
        first = chat.send(said("Look: ", picture(11)))
        before = counts(runtime)["encoded"]
        length = len(chat.tokens)
        second = chat.send("And now?")
        assert counts(runtime)["encoded"] == before
        assert second.usage.cached_tokens >= length - 1
        assert second.usage.computed_tokens < first.usage.computed_tokens
        third = chat.send(said("One more: ", picture(12), "?"))
        assert counts(runtime)["encoded"] == before + 1
        assert third.usage.cached_tokens >= length


@of_each_kind
def test_many_requests_encode_a_picture_once(case: Case) -> None:
    with Runtime(case.folder, num_pages=4096) as runtime:
        chats = [[said(picture(20), f"Question {number}")] for number in range(32)]
        outs = runtime.generate(chats, PARAMS)
        assert counts(runtime)["encoded"] == 1
        assert sum(counts(runtime)["reused"].values()) == 31
        first_row = int((runtime.tokenize(chats[0]) >= 1 << 30).argmax())
        assert sum(out.usage.cached_tokens <= first_row for out in outs) == 1


@of_each_kind
def test_beams_go_on_after_pictures(runtime: Runtime) -> None:
    """Their tokens have the log-probabilities that a prompt with them has."""
    ids = runtime.tokenize(CHATS["turns"])
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for beam in runtime.beam_search(CHATS["turns"], 2, max_tokens=4, length_penalty=0.0):
        out = runtime.generate([*ids.tolist(), *beam.token_ids], scored)
        assert out.prompt_logprobs is not None
        new = [value or 0.0 for value in out.prompt_logprobs[len(ids) :]]
        assert sum(new) == pytest.approx(beam.score, abs=1e-3)


@of_each_kind
def test_embeddings_outlive_what_the_cache_dropped(case: Case) -> None:
    with Runtime(case.folder, num_pages=1024) as runtime:
        out = runtime.generate(CHATS["one"], PARAMS)
        runtime.flush_cache()
        again = runtime.generate(CHATS["one"], PARAMS)
        assert (again.token_ids, again.logprobs) == (out.token_ids, out.logprobs)
        assert again.usage.cached_tokens == 0
        assert counts(runtime)["encoded"] == 1


def counts(runtime: Runtime) -> Any:
    stats: Any = runtime.cache_stats()
    return stats["pictures"]
