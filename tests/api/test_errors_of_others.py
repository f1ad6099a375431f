"""What breaks outside of the engine comes as an error of its own, and holds nothing."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import InvalidRequest, ModelNotSupported, RequestFailed, Runtime, SamplingParams
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.models import hf
from radixserve.output import Finish, Metrics, Usage
from radixserve.request import Request
from tests.checkpoints import make_checkpoint
from tests.pacing import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("errors"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, num_pages=1024) as rt:
        yield rt


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_broken_tokenizer(folder: Path, tmp_path: Path, content: str | None) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / "tokenizer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=r"the tokenizer of .*copy cannot be read: \w"):
        Runtime(copy, num_pages=64)


def test_weights_that_are_not_finite(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "radixserve"), Runtime(copy, num_pages=64) as rt:
        assert "values that are not finite in model.norm.weight" in caplog.text
        with pytest.raises(RequestFailed, match="no token can be sampled: the best logit is"):
            rt.generate([1, 2], GREEDY)


def test_a_model_whose_code_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "gpt2")

    def fails(*_: Any) -> None:
        raise IndexError("odd heads")

    monkeypatch.setattr(hf, "_compare_with_eager", fails)
    with pytest.raises(ModelNotSupported, match=r"GPT2LMHeadModel failed in the check .*odd heads"):
        Runtime(tmp_path, num_pages=64)


def test_a_failed_call_holds_nothing(rt: Runtime) -> None:
    """Its lease ends with the last reference, not with the cyclic collector."""

    def fails(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if output:
            raise ValueError("mine")
        return logits

    before = rt.cache_stats()["sessions"]
    gc.collect()
    gc.disable()
    try:
        branch = rt.branch("a prompt")
        branch.generate(GREEDY)
        ending = weakref.ref(branch)
        messages = []
        try:
            branch.generate(SamplingParams(logits_processors=[fails]))
        except RequestFailed as error:
            messages.append(str(error))
        assert "mine" in messages[0]
        del branch
        wait_until(lambda: ending() is None)  # the engine's thread is done with it, too
        wait_until(lambda: rt.cache_stats()["sessions"] == before)
    finally:
        gc.enable()


def test_a_trace_goes_on_after_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(str(path), hash_block=2)
    finish = Finish("stop", Usage(3, 0, 3, 1), Metrics(0.0, 0.0, 0.0), None)
    for session in ("a\ud800", "b"):
        ids = torch.arange(4).int().numpy()
        request = Request("x", ids, SamplingParams(), 1, frozenset(), 99, session=session)
        recorder.on_finish(request, [5], finish, 1.0)
    recorder.close()
    assert len(path.read_text().splitlines()) == 3


def test_a_deep_tree_can_be_written(rt: Runtime) -> None:
    ids = list(range(5, 205))
    for end in range(20, 200, 2):  # each one leaves the path of the others at another place
        rt.generate([*ids[:end], 3], SamplingParams(max_tokens=1, temperature=0.0))
    nested, flat = rt.cache_tree(), rt.cache_tree(flat=True)
    nodes = flat["nodes"]
    json.dumps(flat)
    assert {k: v for k, v in flat.items() if k != "nodes"}.keys() == nested.keys() - {"namespaces"}
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    for node in nodes:
        if node["parent"] is not None:
            above = nodes[node["parent"]]
            assert above["id"] < node["id"]
            assert node["start"] == above["start"] + above["num_tokens"]
    count, queue = 0, list(nested["namespaces"].values())
    while queue:
        count += 1
        queue += queue.pop()["children"]
    assert count == len(nodes) > 50
