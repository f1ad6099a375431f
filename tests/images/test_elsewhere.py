"""Pictures with other attention backends, on a device's runner, with a K/V store and adapters."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from radixserve.models.multimodal import text_name
from radixserve.request import FIRST_PICTURE_ID
from tests.checkpoints import edit_json
from tests.images.vision_checkpoints import (
    load_vision_reference,
    make_vision_checkpoint,
    picture,
    reference_answer,
    reference_inputs,
    said,
)
from tests.runner.on_device import DeviceRuntime

COUNT = 6
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
CHAT = [said("First", picture(1), "then", picture(2, 80, 120), "and again", picture(1))]


@pytest.fixture(scope="module", params=["llava_next", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[int], list[float]]:
    return reference_answer(load_vision_reference(folder), reference_inputs(folder, CHAT), COUNT)


def encoded(runtime: Runtime) -> int:
    stats: Any = runtime.cache_stats()
    count: int = stats["pictures"]["encoded"]
    return count


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("kind", ["torch", "device"])
def test_native_decoder(
    folder: Path, expected: tuple[list[int], list[float]], kind: str, chunk: int
) -> None:
    settings: dict[str, Any] = {"num_pages": 2048, "chunked_prefill_size": chunk}
    make: Any = Runtime
    if kind == "torch":
        settings["attention_backend"] = "torch"
    else:
        make = DeviceRuntime
    with make(str(folder), **settings) as runtime:
        for _ in range(2):
            out = runtime.generate(CHAT, PARAMS)
            assert out.token_ids == expected[0]
            assert out.logprobs == pytest.approx(expected[1], abs=1e-4)
        beside = runtime.generate([CHAT, [said("Hello")], [said(picture(3))]], PARAMS)
        assert beside[0].token_ids == expected[0]


def test_a_store_knows_pictures_by_what_they_show(
    folder: Path, tmp_path: Path, expected: tuple[list[int], list[float]]
) -> None:
    store: dict[str, Any] = {"kv_store": str(tmp_path / "kv"), "kv_store_write": "finish"}
    with Runtime(folder, num_pages=2048, **store) as runtime:
        first = runtime.tokenize(CHAT)
        runtime.generate(CHAT, PARAMS)
    with Runtime(folder, num_pages=2048, **store) as runtime:
        runtime.tokenize([said(picture(77))])  # so that the others get other ids
        ids = runtime.tokenize(CHAT)
        rows = ids >= FIRST_PICTURE_ID
        assert len(ids) == len(first)
        assert not np.array_equal(ids[rows], first[rows])
        out = runtime.generate(CHAT, PARAMS)
        assert out.usage.cached_tokens == len(ids) - 1
        assert encoded(runtime) == 0
        assert (out.token_ids, out.logprobs) == (expected[0], pytest.approx(expected[1], abs=1e-4))
        place = int(rows.argmax())
        other = runtime.generate([said("First", picture(5), "then")], PARAMS)
        assert other.usage.cached_tokens == place
        assert encoded(runtime) == 1
        runtime.check()
    with Runtime(folder, num_pages=2048) as runtime:  # whose prefixes are text alone
        assert runtime.load_cache(tmp_path / "kv") > 0
        assert runtime.generate(CHAT, PARAMS).usage.cached_tokens == place
        runtime.check()


def test_scores_samples_and_grammars(folder: Path) -> None:
    inputs = reference_inputs(folder, CHAT)
    with torch.inference_mode():
        logits = load_vision_reference(folder)(**inputs).logits[0]
    targets = inputs["input_ids"][0, 1:]
    want = logits[:-1].log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    sampled = SamplingParams(max_tokens=5, seed=3, n=3, logprobs=0)
    formed = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        logprobs=0,
        structured={"json": {"enum": ["a cat", "a dog", {"is": [1, 2]}]}},
    )
    answers = []
    for settings in ({}, {"chunked_prefill_size": 5, "page_size": 3, "max_draft_tokens": 4}):
        with Runtime(folder, num_pages=2048, **settings) as runtime:
            out = runtime.generate(CHAT, scored)
            assert out.prompt_logprobs is not None
            assert out.prompt_logprobs[1:] == pytest.approx(want, abs=2e-4)
            scores = runtime.score(CHAT, ["yes", "no"])
            ids = runtime.tokenize(CHAT).tolist()
            for score in scores:
                whole = runtime.generate([*ids, *score.token_ids], scored).prompt_logprobs
                assert whole is not None
                assert whole[len(ids) :] == pytest.approx(score.logprobs, abs=1e-5)
            row = max(ids)
            for candidate in ([row], [66, row]):  # no number of the model's distribution
                with pytest.raises(InvalidRequest, match="rows of a picture"):
                    runtime.score(CHAT, [[66], candidate])
            one = runtime.generate(CHAT, formed)
            assert json.loads(one.text) in ("a cat", "a dog", {"is": [1, 2]})
            outs = [one, *runtime.generate(CHAT, sampled)]
            answers.append([(out.token_ids, out.logprobs) for out in outs])
            runtime.check()
    assert answers[0] == answers[1]


def test_kv_events(folder: Path) -> None:
    """Blocks of two pictures differ."""
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    from tests.kv_events.consumer import Follower

    with tempfile.TemporaryDirectory() as place:
        sockets = f"ipc://{place}/pub", f"ipc://{place}/replay"
        events: dict[str, Any] = {"kv_events": ",".join(sockets), "kv_events_block_size": 4}
        with Runtime(folder, num_pages=2048, **events) as runtime:
            prompts = [[said("Look: ", picture(seed))] for seed in (1, 5)]
            for prompt in prompts:
                runtime.generate(prompt, PARAMS)
            follower = Follower(*sockets, 4)
            with contextlib.closing(follower):
                while not follower.has_news(20):  # until its subscription has arrived
                    runtime.generate([said(picture(6))], PARAMS)
                    runtime.flush_cache()
                    runtime.generate(prompts, PARAMS)
                ids = [tuple(runtime.tokenize(prompt).tolist()) for prompt in prompts]
                want = {("", tokens[: len(tokens) // 4 * 4]) for tokens in ids}
                while not want <= follower.index.known():
                    follower.read()


def test_adapters(folder: Path, tmp_path: Path) -> None:
    names = [
        f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
        for layer in range(2)
        for name in ("q", "v")
    ]
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 64, "v": 32} if "llava" in folder.name else {"q": 128, "v": 64}
    tensors = {}
    for name in names:
        size = sizes[name[-6]]
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, 4, generator=generator)
    folders = {}
    for name, more in (("all", {}), ("activated", {"alora_invocation_tokens": [1, 2, 3]})):
        own = tmp_path / name
        own.mkdir()
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text("{}")
        edit_json(own / "adapter_config.json", peft_type="LORA", r=4, lora_alpha=8, **more)
        folders[name] = str(own)
    with Runtime(folder, num_pages=2048, adapters=folders) as runtime:
        plain = runtime.generate(CHAT, PARAMS)
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, adapter="all", logprobs=0)
        changed = runtime.generate(CHAT, params)
        assert changed.usage.cached_tokens == 0
        assert changed.logprobs != plain.logprobs
        assert encoded(runtime) == 2
        ids = runtime.tokenize(CHAT).tolist()
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, adapter="activated")
        out = runtime.generate([*ids, 1, 2, 3], params)
        assert out.usage.cached_tokens == len(ids)
        with pytest.raises(InvalidRequest, match="after the invocation"):
            runtime.generate([1, 2, 3, *ids], params)
        runtime.check()


def test_weights_of_the_tower_change_with_the_others(
    folder: Path, tmp_path: Path, expected: tuple[list[int], list[float]]
) -> None:
    """Pictures are encoded again, in new epochs. Text alone changes no tower."""
    other = shutil.copytree(folder, tmp_path / "other")
    before = load_file(folder / "model.safetensors")
    tower = {name for name in before if text_name(name) is None}
    after = {name: 1.5 * x if name in tower else x for name, x in before.items()}
    save_file(after, other / "model.safetensors", {"format": "pt"})
    model = load_vision_reference(other)
    changed = reference_answer(model, reference_inputs(other, CHAT), COUNT)
    assert changed[1] != pytest.approx(expected[1], abs=1e-3)
    with Runtime(folder, num_pages=2048) as runtime:

        def answers(want: tuple[list[int], list[float]], num_encoded: int, *, hits: bool) -> None:
            out = runtime.generate(CHAT, PARAMS)
            assert (out.token_ids, out.logprobs) == (want[0], pytest.approx(want[1], abs=1e-4))
            assert (out.usage.cached_tokens > 0) is hits
            assert encoded(runtime) == num_encoded

        answers(expected, 2, hits=False)
        runtime.update_weights(after)
        answers(changed, 4, hits=False)
        runtime.update_weights({name: x for name, x in after.items() if name not in tower})
        answers(changed, 4, hits=False)
        runtime.update_weights(folder)
        answers(expected, 4, hits=True)
        runtime.update_weights(other)
        answers(changed, 6, hits=False)
        some = min(name for name in tower if name.endswith("weight"))
        cut = {name: x[:-1] if name == some else x for name, x in before.items()}
        for wrong in (cut, {name: x for name, x in before.items() if name != some}):
            with pytest.raises(ModelNotSupported, match="given tensors"):
                runtime.update_weights(wrong)
        answers(changed, 6, hits=True)
        runtime.check()


def test_prompts_with_pictures_are_not_prefetched(folder: Path) -> None:
    with Runtime(folder, num_pages=512) as runtime:
        answer = runtime.hint("prefetch", CHAT)
        assert (answer.answer, answer.reason) == ("rejected", "not built for pictures")
        assert runtime.hint("prefetch", [said("Hello")]).answer == "accepted"


def test_refusals(folder: Path) -> None:
    with Runtime(folder, num_pages=512, model_impl="transformers") as runtime:
        assert "in transformers' code" in runtime.no_pictures
        with pytest.raises(InvalidRequest, match="content must be text"):
            runtime.generate([said(picture(1))], PARAMS)
    with Runtime("demo", num_pages=64) as runtime:
        assert runtime.no_pictures == "the model takes text only"
        with pytest.raises(InvalidRequest, match="out of range"):
            runtime.generate([FIRST_PICTURE_ID], PARAMS)


@pytest.mark.parametrize("folder", ["llava_next"], indirect=True)
def test_text_alone_loads_no_tower(folder: Path) -> None:
    """In a process of its own. transformers imports Pillow with the config of a wrapper."""
    code = f"""
import sys
from radixserve import Runtime, SamplingParams
for model, unwanted in (("demo", "PIL"), ({str(folder)!r}, "image_processing_")):
    with Runtime(model, num_pages=512) as runtime:
        runtime.generate([{{"role": "user", "content": "Hello"}}], SamplingParams(max_tokens=4))
    imported = [name for name in sys.modules if unwanted in name or "modeling_llava" in name]
    assert not imported, imported
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
