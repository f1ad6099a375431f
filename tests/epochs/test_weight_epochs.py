"""Weights that change while a Runtime answers: bits, K/V, pauses and refusals."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from radixserve import (
    BeamParams,
    Completion,
    InvalidRequest,
    ModelNotSupported,
    Runtime,
    SamplingParams,
)
from radixserve.models.in_place import copy_weights
from tests.checkpoints import NATIVE, NATIVE_PARTS, RECURRENT, SHAPED, make_checkpoint
from tests.pacing import wait_until
from tests.runner.on_device import DeviceRuntime

PROMPT = list(range(5, 45))
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, digest=True, logprobs=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three checkpoints of one shape."""
    made = [
        make_checkpoint(tmp_path_factory.mktemp(f"weights{seed}"), "llama", seed=seed)
        for seed in range(3)
    ]
    return list(map(str, made))


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def fresh(folder: str, prompt: list[int] = PROMPT, **settings: Any) -> Completion:
    """The answer of a Runtime that began with these weights."""
    with Runtime(folder, num_pages=600, **settings) as rt:
        return rt.generate(prompt, SHORT)


def same(one: Completion, other: Completion) -> bool:
    return (one.digest, one.token_ids, one.logprobs) == (
        other.digest,
        other.token_ids,
        other.logprobs,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"weight_dtype": "int8"},
        {"attention_backend": "torch"},
        {"page_size": 16},
        {"cache": "hash", "page_size": 4},
        {"model_impl": "transformers"},
    ],
    ids=str,
)
def test_answers_have_the_bits_of_a_fresh_load(
    folders: list[str], settings: dict[str, Any]
) -> None:
    first, second, _ = folders
    with Runtime(first, num_pages=600, **settings) as rt:
        old = rt.generate(PROMPT, SHORT)
        assert rt.update_weights(second) == 1
        new = rt.generate(PROMPT, SHORT)
        assert same(new, fresh(second, **settings))
        assert not same(new, old)
        assert new.usage.cached_tokens == 0
        assert [*new.weight_epochs] == [(0, 8, 1, "computed")]
        assert rt.update_weights(tensors_of(first)) == 2  # known by what they are, not by a path
        assert same(rt.generate(PROMPT, SHORT), old)
        rt.check()


def test_an_earlier_epoch_is_found_again(folders: list[str]) -> None:
    first, second, third = folders
    with Runtime(first, num_pages=600, page_size=4) as rt:
        old = rt.generate(PROMPT, SHORT)
        assert [rt.update_weights(folder) for folder in (second, third, second)] == [1, 2, 1]
        assert rt.cache_stats()["old_epoch_pages"] == 12
        assert rt.update_weights(first, version="the first") == 0
        assert rt.weights_info == (0, "the first", False)
        again = rt.generate(PROMPT, SHORT)
        assert again.usage.cached_tokens == len(PROMPT) - 1
        assert same(again, old)
        given = tensors_of(third)
        assert [rt.update_weights(given), rt.update_weights(second), rt.update_weights(given)] == [
            3, 1, 3,
        ]  # fmt: skip
        rt.flush_cache()
        assert rt.cache_stats()["old_epoch_pages"] == 0
        rt.check()


def test_old_epochs_leave_when_pages_are_needed(folders: list[str]) -> None:
    first, second, _ = folders
    with Runtime(first, num_pages=100) as rt:
        rt.generate(PROMPT, SHORT)
        rt.update_weights(second)
        for start in (50, 100, 150):
            rt.generate([token + start for token in PROMPT], SHORT)
        assert rt.cache_stats()["old_epoch_pages"] == 0
        rt.check()


def test_wrong_weights_change_nothing(folders: list[str], tmp_path: Path) -> None:
    first, second, _ = folders
    name = "model.layers.1.mlp.down_proj.weight"
    good = tensors_of(second)
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=3)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((Path(second) / "config.json").read_text())
    data = (Path(second) / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with Runtime(first, num_pages=600) as rt:
        before = rt.generate(PROMPT, SHORT)
        for weights, message in (
            ({**good, name: good[name][:, :5]}, "down_proj.weight is"),
            ({key: value for key, value in good.items() if key != name}, "missing tensors: .*down"),
            ({**good, "model.more": good[name]}, "unexpected tensors: model.more"),
            ({**good, name: good[name].to(torch.int8)}, "must be a tensor of floats"),
            ({**good, name: [1.0]}, "must be a tensor of floats"),
            ({}, "weights must be a path"),
            (5, "weights must be a path"),
            (str(other), "another model"),
            (str(broken), "not a safetensors file"),
            (str(tmp_path / "nowhere"), "nowhere"),
        ):
            with pytest.raises((InvalidRequest, ModelNotSupported), match=message):
                rt.update_weights(weights)  # type: ignore[arg-type]
            assert rt.weights_info.epoch == 0
        with pytest.raises(InvalidRequest, match="kv must be"):
            rt.update_weights(second, kv="old")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="mode must be"):
            rt.pause("wait")  # type: ignore[arg-type]
        after = rt.generate(PROMPT, SHORT)
        assert same(after, before)
        assert after.usage.cached_tokens == len(PROMPT) - 1
        rt.check()


def test_buckets_of_tensors(folders: list[str]) -> None:
    first, second, _ = folders
    given = tensors_of(second)
    names = [*given]
    with Runtime(first, num_pages=600) as rt:
        before = rt.generate(PROMPT, SHORT)
        for start in range(0, len(names), 5):
            bucket = {name: given[name].clone() for name in names[start : start + 5]}
            is_last = start + 5 >= len(names)
            epoch = rt.update_weights(bucket, is_last=is_last)
            assert epoch == int(is_last)
            for tensor in bucket.values():  # the caller uses the memory again
                tensor.zero_()
            if not is_last:
                assert rt.generate(PROMPT, SHORT).token_ids == before.token_ids
        assert same(rt.generate(PROMPT, SHORT), fresh(second))
        rt.update_weights({names[0]: given[names[0]]}, is_last=False)
        stats: Any = rt.cache_stats()
        assert stats["weights"]["waiting_tensors"] == 1
        with pytest.raises((InvalidRequest, ModelNotSupported), match="missing tensors"):
            rt.update_weights({names[1]: given[names[1]]})
        with pytest.raises((InvalidRequest, ModelNotSupported), match="missing tensors"):
            rt.update_weights({name: given[name] for name in names[1:]})  # the bucket was dropped
        with pytest.raises(InvalidRequest, match="is_last=False is for tensors"):
            rt.update_weights(first, is_last=False)
        assert same(rt.generate(PROMPT, SHORT), fresh(second))
        rt.check()


SOME = ("llama", "gemma2", "phi3", "mixtral", "qwen3_next", "falcon_h1", "lfm2", "gemma4")
OTHERS = sorted({*NATIVE, *NATIVE_PARTS, *RECURRENT, *SHAPED} - {*SOME})


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "family", [*SOME, *(pytest.param(x, marks=pytest.mark.long) for x in OTHERS)]
)
def test_tensors_of_each_family(family: str, on_device: bool, tmp_path: Path) -> None:
    """They are read into the memory of the old ones; on a device graphs read them there."""
    kind: type[Runtime] = DeviceRuntime if on_device else Runtime
    first, second = (
        str(make_checkpoint(tmp_path / str(seed), family, seed=seed)) for seed in range(2)
    )
    with kind(second, num_pages=200) as rt:
        wanted = rt.generate(PROMPT, SHORT)
    with kind(first, num_pages=200) as rt:
        old = rt.generate(PROMPT, SHORT)
        rt.flush_cache()  # warm answers of a device may have other bits
        given = tensors_of(second)
        for weights, right in ((given, wanted), (first, old)):
            rt.update_weights(weights)
            found = rt.generate(PROMPT, SHORT)
            assert found.token_ids == right.token_ids
            assert found.logprobs == pytest.approx(right.logprobs, abs=1e-4 if on_device else 0)
    unchanged = tensors_of(second)
    assert all(torch.equal(given[name], unchanged[name]) for name in unchanged)


def test_a_head_that_was_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    given = tensors_of(str(folder))
    other = {**given, "lm_head.weight": 2 * given["model.embed_tokens.weight"]}
    with Runtime(str(folder), num_pages=200) as rt:
        one = rt.generate(PROMPT, SHORT)
        rt.update_weights(other)
        assert rt.generate(PROMPT, SHORT).logprobs != one.logprobs
        rt.update_weights(given)
        assert same(rt.generate(PROMPT, SHORT), one)
    both, new = torch.ones(3), (torch.zeros(3), torch.ones(3))
    with pytest.raises(InvalidRequest, match="the head is the embedding"):  # on a device
        copy_weights((both, both), new)
    assert both.tolist() == [1, 1, 1]
    copy_weights((both, both), (new[0], new[0]))
    assert both.tolist() == [0, 0, 0]


def test_given_tensors_stay_the_callers(folders: list[str]) -> None:
    first, second, _ = folders
    for settings in ({}, {"attention_backend": "torch"}, {"model_impl": "transformers"}):
        given = tensors_of(second)
        with Runtime(first, num_pages=600, **settings) as rt:
            rt.update_weights(given)
            for tensor in given.values():
                tensor.zero_()
            assert same(rt.generate(PROMPT, SHORT), fresh(second, **settings))
            again = tensors_of(second)
            rt.update_weights(tensors_of(first))
            rt.update_weights(again)
            wanted = tensors_of(second)
            rt.update_weights(first)
            assert all(torch.equal(again[name], wanted[name]) for name in wanted)


def pause_and_update(rt: Runtime, folder: str, kv: str) -> tuple[Completion, int]:
    """An answer during which the weights changed, and its tokens before."""
    chunks = rt.stream(PROMPT, LONG)
    for _ in range(3):
        next(chunks)
    rt.pause()
    rt.update_weights(folder, kv=kv)  # type: ignore[arg-type]
    assert rt.weights_info.is_paused
    rt.check()
    rt.resume()
    *_, last = chunks
    assert last.completion is not None
    return last.completion, last.completion.weight_epochs[0].end


@pytest.mark.parametrize("page_size", [1, 16])
def test_recompute_continues_as_if_begun_with_the_new_weights(
    folders: list[str], page_size: int
) -> None:
    first, second, _ = folders
    with Runtime(first, num_pages=2400 // page_size, page_size=page_size) as rt:
        out, num_old = pause_and_update(rt, second, "recompute")
        assert 0 < num_old < 300
        assert [*out.weight_epochs] == [(0, num_old, 0, "computed"), (num_old, 300, 1, "recompute")]
        rt.check()
        with Runtime(second, num_pages=2400 // page_size, page_size=page_size) as other:
            rest = other.generate(
                PROMPT + out.token_ids[:num_old],
                SamplingParams(
                    max_tokens=300 - num_old, temperature=0.0, ignore_eos=True, logprobs=0
                ),
            )
        assert rest.token_ids == out.token_ids[num_old:]
        assert out.logprobs is not None
        assert rest.logprobs == out.logprobs[num_old:]


@pytest.mark.parametrize("kv", ["recompute", "stale"])
def test_beams_go_on_with_the_new_weights(folders: list[str], kv: Any) -> None:
    """Each token has its log-probability by the weights that its range names, whatever its search
    waited for; beams end after any number of tokens."""
    params = SamplingParams(max_tokens=100, logprobs=0, stop_token_ids=tuple(range(0, 288, 16)))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with Runtime(folders[0], num_pages=600, max_running_requests=3) as rt:
        answers = rt.beam_search(
            PROMPT, params=params, beams=BeamParams(width=4, length_penalty=0.0)
        )
        assert len({len(out.token_ids) for out in answers}) > 1
        beams = BeamParams(width=4, length_penalty=1.5)
        search = threading.Thread(
            target=lambda: answers.extend(rt.beam_search(PROMPT, params=params, beams=beams))
        )
        search.start()
        for number in itertools.count(1):
            time.sleep(0.003)
            if not search.is_alive():
                break
            rt.update_weights(folders[number % 2], kv=kv)
            rt.check()
        assert number > 3
        for epoch, folder in enumerate(folders[:2]):
            rt.update_weights(folder)
            for out in answers:
                ends = [part.end for part in out.weight_epochs]
                assert [part.start for part in out.weight_epochs] == [0, *ends[:-1]]
                assert ends[-1] == len(out.token_ids)
                score = rt.generate(PROMPT + out.token_ids, scored).prompt_logprobs
                assert score is not None
                assert out.logprobs is not None
                for start, end, own, how in out.weight_epochs:
                    assert how == ("recompute" if start else "computed")
                    if own == epoch:
                        wanted = score[len(PROMPT) + start : len(PROMPT) + end]
                        assert out.logprobs[start:end] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_stale_kv_is_nobody_elses(folders: list[str], page_size: int) -> None:
    first, second, _ = folders
    settings = {"page_size": page_size}
    with Runtime(first, num_pages=2400 // page_size, page_size=page_size) as rt:
        out, num_old = pause_and_update(rt, second, "stale")
        assert [*out.weight_epochs] == [(0, num_old, 0, "computed"), (num_old, 300, 1, "stale")]
        assert rt.cache_stats()["preemptions"] == 0
        longer = PROMPT + out.token_ids[: num_old + 20]
        new = rt.generate(longer, SHORT)
        assert new.usage.cached_tokens == 0
        assert same(new, fresh(second, longer, **settings))
        rt.update_weights(first)
        old = rt.generate(longer, SHORT)
        assert old.usage.cached_tokens >= len(PROMPT)
        assert old.usage.cached_tokens < len(PROMPT) + num_old + page_size
        assert same(old, fresh(first, longer, **settings))
        rt.check()


def test_stale_requests_may_be_preempted(folders: list[str]) -> None:
    """What others need is taken from them; then their K/V is computed by the new weights."""
    first, second, _ = folders
    with Runtime(first, num_pages=420, max_running_requests=4) as rt:
        outs: list[Completion] = []
        prompts = [[number, *PROMPT] for number in range(60, 64)]
        params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        thread = threading.Thread(target=lambda: outs.extend(rt.generate(prompts, params)))
        thread.start()
        wait_until(lambda: rt.status().stats["generated_tokens"] >= 0 and rt.status().running == 4)
        rt.update_weights(second, kv="stale")
        thread.join()
        assert len(outs) == 4
        for out in outs:
            ranges = out.weight_epochs
            assert ranges[0].start == 0
            assert ranges[-1].end == 120
            assert all(one.end == two.start for one, two in itertools.pairwise(ranges))
        rt.check()
        assert rt.cache_stats()["sequences"] == 0


@pytest.mark.parametrize("cache", ["radix", "off"])
def test_stale_kv_is_computed_again_after_another_update(folders: list[str], cache: str) -> None:
    first, second, _ = folders
    with Runtime(first, num_pages=1200, cache=cache) as rt:
        chunks = rt.stream(PROMPT, LONG)
        for _ in range(3):
            next(chunks)
        rt.pause()
        rt.update_weights(second, kv="stale")
        rt.resume()
        for _ in range(3):
            next(chunks)
        rt.pause()
        rt.update_weights(first, kv="recompute")
        rt.check()
        rt.resume()
        *_, last = chunks
        out = last.completion
        assert out is not None
        assert [each.kv for each in out.weight_epochs] == ["computed", "stale", "recompute"]
        start = out.weight_epochs[-1].start
        rest = rt.generate([*PROMPT, *out.token_ids[:start]], replace(LONG, max_tokens=300 - start))
        assert rest.token_ids == out.token_ids[start:]
        assert out.logprobs is not None
        assert rest.logprobs == out.logprobs[start:]
        rt.check()


def test_a_pause_keeps_or_ends_requests(folders: list[str]) -> None:
    with Runtime(folders[0], num_pages=1200) as rt:
        alone = rt.generate(PROMPT, LONG)
        rt.pause()
        outs: list[Completion] = []
        thread = threading.Thread(target=lambda: outs.append(rt.generate(PROMPT, LONG)))
        thread.start()
        wait_until(lambda: rt.status().waiting == 1)
        rt.pause()  # again
        assert not outs
        rt.resume()
        thread.join()
        assert outs[0].token_ids == alone.token_ids
        chunks = rt.stream(PROMPT, LONG)
        next(chunks)
        rt.pause("abort")
        *_, last = chunks
        assert last.completion is not None
        assert last.completion.finish_reason == "abort"
        rt.resume()
        rt.resume()
        assert rt.generate(PROMPT, SHORT).token_ids == alone.token_ids[:8]


def test_scores_belong_to_their_weights(folders: list[str]) -> None:
    first, second, _ = folders
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with Runtime(first, num_pages=600) as rt:
        old = rt.generate(PROMPT, params)
        rt.update_weights(second)
        new = rt.generate(PROMPT, params)
        assert new.usage.computed_tokens == len(PROMPT)
        assert new.prompt_logprobs != old.prompt_logprobs
        rt.update_weights(first)
        again = rt.generate(PROMPT, params)
        assert again.usage.computed_tokens == 1
        assert again.prompt_logprobs == old.prompt_logprobs
        rt.update_weights(second)
        out, num_old = pause_and_update(rt, first, "recompute")
        (score,) = rt.score(PROMPT, [out.token_ids])  # none of the old weights' are read
        assert out.logprobs is not None
        assert score.logprobs[num_old:] == out.logprobs[num_old:]
        with Runtime(first, num_pages=600) as other:
            assert other.score(PROMPT, [out.token_ids])[0].logprobs == score.logprobs


@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
def test_scores_in_progress_are_computed_again(folders: list[str], cache: str) -> None:
    prompt = random.Random(1).choices(range(5, 250), k=400)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with Runtime(folders[1], num_pages=1200) as rt:
        wanted = rt.generate(prompt, params)
    with Runtime(folders[0], num_pages=1200, cache=cache, chunked_prefill_size=1) as rt:
        outs: list[Completion] = []
        thread = threading.Thread(target=lambda: outs.append(rt.generate(prompt, params)))
        thread.start()
        wait_until(lambda: rt.cache_stats()["steps"] >= 10)
        rt.update_weights(folders[1])
        thread.join()
        assert outs[0].weight_epochs[0].kv == "recompute"
        assert outs[0].prompt_logprobs == wanted.prompt_logprobs
        assert outs[0].prompt_top_logprobs == wanted.prompt_top_logprobs


@pytest.mark.parametrize(("kind", "max_tokens"), [(Runtime, 300), (DeviceRuntime, 30)])
def test_scores_are_computed_again_beside_a_begun_answer(
    folders: list[str], kind: type[Runtime], max_tokens: int
) -> None:
    params = replace(LONG, prompt_logprobs=1, max_tokens=max_tokens)
    with Runtime(folders[1], num_pages=1200) as rt:
        wanted = rt.generate(PROMPT, replace(params, max_tokens=1))
    with kind(folders[0], num_pages=1200) as rt:
        chunks = rt.stream(PROMPT, params)
        for _ in range(3):
            next(chunks)
        rt.update_weights(folders[1])
        *_, last = chunks
    out = last.completion
    assert out is not None
    assert [each.kv for each in out.weight_epochs] == ["computed", "recompute"]
    assert out.prompt_logprobs is not None
    assert out.prompt_ranks == wanted.prompt_ranks
    assert out.prompt_logprobs[1:] == pytest.approx((wanted.prompt_logprobs or [])[1:], abs=1e-4)


def test_stale_scores_are_nobody_elses(folders: list[str]) -> None:
    """Also where the request was preempted, and its prompt computed again by the new weights."""
    prompt = random.Random(1).choices(range(5, 250), k=300)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, priority=-1)
    settings: dict[str, Any] = {"num_pages": 460, "chunked_prefill_size": 2}
    with Runtime(folders[1], **settings) as rt:
        wanted = rt.generate(prompt, params)
    with Runtime(folders[0], **settings) as rt:
        outs: list[Completion] = []
        chunks = rt.stream(PROMPT, LONG)  # a token and a half of the prompt in each step
        next(chunks)
        thread = threading.Thread(target=lambda: outs.append(rt.generate(prompt, params)))
        thread.start()
        wait_until(lambda: rt.status().running == 2)
        rt.update_weights(folders[1], kv="stale")
        for _ in chunks:
            pass
        thread.join()
        assert rt.cache_stats()["preemptions"] == 1
        again = rt.generate(prompt, params)
        assert again.usage.computed_tokens == 1
        assert again.prompt_logprobs == outs[0].prompt_logprobs == wanted.prompt_logprobs
        rt.check()


def test_the_store_follows_the_weights(folders: list[str], tmp_path: Path) -> None:
    first, second, _ = folders
    store = str(tmp_path)
    prompt = PROMPT * 4
    with Runtime(first, num_pages=1200, kv_store=store) as rt:
        rt.generate(prompt, SHORT)
        rt.update_weights(second)
        new = rt.generate(prompt, SHORT)
        assert new.usage.loaded_tokens == 0
        rt.check()
    for folder in (second, first):
        with Runtime(folder, num_pages=1200, kv_store=store) as rt:
            loaded = rt.generate(prompt, SHORT)
            assert loaded.usage.loaded_tokens > 0 or folder == first  # dropped where it was late
            assert same(loaded, fresh(folder, prompt))


@pytest.fixture(scope="module")
def storm(folders: list[str]) -> Iterator[Runtime]:
    with Runtime(folders[0], num_pages=400, page_size=4, max_running_requests=6) as rt:
        yield rt


def test_a_hundred_updates_in_a_storm(storm: Runtime, folders: list[str]) -> None:
    rt, rng, is_over = storm, random.Random(0), threading.Event()
    outs: list[Completion] = []

    def ask(seed: int) -> None:
        own = random.Random(seed)
        while not is_over.is_set():
            prompt = PROMPT[: own.randint(1, 40)] + [own.randrange(256) for _ in range(9)]
            params = SamplingParams(
                max_tokens=own.randint(1, 40), ignore_eos=True, seed=1, n=own.choice([1, 1, 3]),
                prompt_logprobs=own.choice([None, 0]), temperature=own.choice([0.0, 1.0]),
            )  # fmt: skip
            if own.random() < 0.2:
                rt.beam_search(prompt, beam_width=3, max_tokens=6)
                continue
            out = rt.generate(prompt, params)
            outs.extend(out if isinstance(out, list) else [out])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        rt.update_weights(rng.choice(folders), kv=rng.choice(["recompute", "stale"]))
        rt.check()
    is_over.set()
    for thread in threads:
        thread.join()
    rt.check()
    stats = rt.cache_stats()
    assert stats["sequences"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    for out in outs:
        assert out.weight_epochs[-1].end == len(out.token_ids)
    assert any(len(out.weight_epochs) > 1 for out in outs)
    rt.update_weights(folders[1])
    assert same(rt.generate(PROMPT, SHORT), fresh(folders[1], page_size=4))
