"""Pictures whose rows see each other: no step, no prompt and no hit changes what a row sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.images.table import PictureTable, Processed, whole_runs
from tests.images.vision_checkpoints import make_vision_checkpoint, picture, said

COUNT = 6
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
CHAT = [said("First\n", picture(1), picture(1), "and ", picture(2), "?")]
ROWS = 16  # of a picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, num_pages=2048) as runtime:
        yield runtime


def answer(runtime: Runtime, prompt: Any) -> tuple[Any, Any]:
    out = runtime.generate(prompt, PARAMS)
    return out.token_ids, out.logprobs


def test_whole_runs() -> None:
    table = PictureTable(1 << 20)
    inputs = {"pixel_values": np.zeros(1)}
    one = table.add(Processed([7, 9, 9, 9, 8], 9, inputs, (1, 1)))
    crops = table.add(Processed([7, 9, 9, 8, 5, 7, 9, 9, 8], 9, inputs, (1, 1)))
    assert one.runs == ((one.first_id, one.first_id + 3),)
    first = crops.first_id
    assert crops.runs == ((first, first + 2), (first + 2, first + 4))
    both = [one, crops]
    tokens = np.array([*one.prompt_ids, *one.prompt_ids[1:4], *crops.prompt_ids], np.int32)
    assert whole_runs(tokens, both) == ((1, 4), (5, 8), (9, 11), (14, 16))
    assert whole_runs(tokens[:12], both) == ((1, 4), (5, 8), (9, 11))
    for start, end, place in ((2, 8, 0), (0, 3, 1), (0, 7, 5), (5, 15, 9)):
        with pytest.raises(InvalidRequest, match=f"from token {place} on"):
            whole_runs(tokens[start:end], both)


@pytest.mark.parametrize("first", [0, 1, ROWS + 2])
def test_prompts_that_begin_and_end_with_pictures(runtime: Runtime, first: int) -> None:
    """As ids, without marks: two of one picture side by side, then another."""
    ids = runtime.tokenize(CHAT)
    rows = ids[ids >= 1 << 30].tolist()
    prompt = [70] * first + rows
    runtime.flush_cache()
    cold = answer(runtime, prompt)
    assert answer(runtime, prompt) == cold  # whose last row is computed again, alone
    runtime.flush_cache()
    answer(runtime, prompt[: first + ROWS])
    assert runtime.lookup(prompt).cached_len == first + ROWS
    assert answer(runtime, prompt) == cold


def test_a_hit_that_ends_inside_a_picture(folder: Path, runtime: Runtime) -> None:
    """What was evicted behind it is computed with what is left, to the same bits."""
    runtime.flush_cache()
    want = answer(runtime, CHAT)
    ids = runtime.tokenize(CHAT)
    places = set()
    with Runtime(folder, num_pages=len(ids) + 40) as small:
        for count in range(30, len(ids) + 20, 5):
            assert answer(small, CHAT) == want
            small.generate([80 + count % 7] * count, SamplingParams(max_tokens=1))
            places.add(small.lookup(CHAT).cached_len)
            small.check()
    assert any(ids[place] == ids[place - 1] + 1 >= 1 << 30 for place in places if place)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "hash", "page_size": 3, "chunked_prefill_size": 7},
        {"num_pages": 100, "swa_full_tokens_ratio": 0.1, "chunked_prefill_size": 1},
        {"page_size": 4, "num_pages": 100, "swa_full_tokens_ratio": 0.1},
        {"max_draft_tokens": 4, "chunked_prefill_size": 7},
    ],
    ids=str,
)
def test_other_caches(folder: Path, runtime: Runtime, settings: dict[str, Any]) -> None:
    runtime.flush_cache()
    want = answer(runtime, CHAT)
    with Runtime(folder, **{"num_pages": 400, **settings}) as other:
        for _ in range(2):
            assert answer(other, CHAT) == want
        outs = other.generate([[said(picture(n), "Hm")] for n in range(6)], PARAMS)
        assert answer(other, CHAT) == want
        other.check()
    for number, out in enumerate(outs):
        assert answer(runtime, [said(picture(number), "Hm")]) == (out.token_ids, out.logprobs)


def test_samples_scores_and_grammars(folder: Path, runtime: Runtime) -> None:
    sampled = SamplingParams(max_tokens=4, temperature=1.0, seed=5, n=3, ignore_eos=True)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    formed = SamplingParams(max_tokens=8, temperature=0.0, structured={"regex": "(ab|cd)+e"})

    def answers(runtime: Runtime) -> Iterator[Any]:
        for params in (sampled, scored, formed):
            runtime.flush_cache()
            made: Any = runtime.generate(CHAT, params)
            outs = made if isinstance(made, list) else [made]
            yield [(out.token_ids, out.prompt_logprobs) for out in outs]

    with Runtime(folder, num_pages=400, chunked_prefill_size=5, page_size=3) as other:
        assert list(answers(other)) == list(answers(runtime))


def test_backends_that_look_back_only(folder: Path) -> None:
    with Runtime(folder, num_pages=400, attention_backend="triton") as runtime:
        assert "triton does not compute; cpu and torch do" in runtime.no_pictures
        with pytest.raises(InvalidRequest, match="content must be text"):
            runtime.generate(CHAT, PARAMS)
        assert runtime.generate([said("Hello")], PARAMS).token_ids
