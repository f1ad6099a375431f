"""A warning that names heads whose keys are rounded coarsely in 8 bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import Runtime, SamplingParams
from radixserve.runner.rounding_check import LIMIT, MIN_TOKENS, key_errors
from radixserve_kernels.stored_kv import FP8_MAX, to_stored
from tests.checkpoints import make_checkpoint
from tests.runner.on_device import DeviceRuntime

FP8 = "fp8_e4m3"
PROMPT = [3 + 7 * number % 240 for number in range(MIN_TOKENS + 20)]
DIM = 16  # of a head of the checkpoint


def make_scaled(
    folder: Path, layer: int, head: int, factor: float, channels: tuple[int, ...]
) -> Path:
    """The same model, but for rounding: keys of a head are larger in some channels, and the queries
    of its group smaller."""
    checkpoint = make_checkpoint(folder, "llama")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.{layer}.self_attn"
    keys, queries = tensors[f"{prefix}.k_proj.weight"], tensors[f"{prefix}.q_proj.weight"]
    for channel in channels:
        keys[head * DIM + channel] *= factor
        for query_head in (2 * head, 2 * head + 1):
            queries[query_head * DIM + channel] /= factor
    save_file(tensors, file, {"format": "pt"})
    return checkpoint


def warnings_of(
    kind: type[Runtime], model: Path, caplog: pytest.LogCaptureFixture, **settings: Any
) -> list[str]:
    """Of short prompts and two long ones."""
    caplog.clear()
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    common = {"num_pages": 600, "dtype": "float32", "device": "cpu"}
    with kind(str(model), **common, **settings) as runtime:
        for prompt in (PROMPT[:9], PROMPT, PROMPT[::-1]):
            runtime.generate(prompt, params)
    records = [record for record in caplog.records if "the keys of layer" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("kind", [Runtime, DeviceRuntime])
def test_an_outlier_head(
    kind: type[Runtime], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    scaled = make_scaled(tmp_path / "scaled", 1, 0, 4096.0, (3, 11))
    assert not warnings_of(kind, plain, caplog, kv_dtype="int8")
    assert not warnings_of(kind, scaled, caplog)
    (message,) = warnings_of(kind, scaled, caplog, kv_dtype="int8", page_size=4)
    assert "the keys of layer 1, head 0 are rounded by " in message
    assert 'kv_dtype="auto"' in message
    assert "others" not in message


def test_numbers_that_fp8_cuts_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    assert not warnings_of(DeviceRuntime, plain, caplog, kv_dtype=FP8)
    scaled = make_scaled(tmp_path / "scaled", 0, 1, 4096.0, (3, 11))
    (message,) = warnings_of(DeviceRuntime, scaled, caplog, kv_dtype=FP8)
    assert "the keys of layer 0, head 1 are rounded to 448 where they are larger" in message


@pytest.mark.parametrize("scales_last", [True, False])
def test_the_error_is_that_of_rounding(scales_last: bool) -> None:
    """As measured on the keys before they are stored."""
    torch.manual_seed(0)
    keys = torch.randn(300, 2, 64)
    keys[:, 1, 7] = 300 + torch.randn(300)  # large, and nearly the same for all tokens
    rows = to_stored(keys, torch.int8, scales_last=scales_last)
    errors, is_cut = key_errors(rows, scales_last=scales_last)
    assert not is_cut.any()
    assert errors[0] < 0.02
    assert LIMIT < errors[1] < 0.15
    wide = torch.randn(300, 1, 64) * 0.01 + 1
    coarse, _ = key_errors(
        to_stored(wide, torch.int8, scales_last=scales_last), scales_last=scales_last
    )
    assert coarse[0] > 0.1


def test_errors_of_fp8() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2000, 2, 64)
    keys[:, 1] += 30
    errors, is_cut = key_errors(to_stored(keys, torch.float8_e4m3fn), scales_last=True)
    stored = to_stored(keys, torch.float8_e4m3fn).float()
    measured = ((stored - keys).square().mean(0).sqrt() / keys.std(0)).median(-1).values
    torch.testing.assert_close(errors, measured, rtol=0.3, atol=0)
    assert not is_cut.any()
    keys[5, 0, 3] = 2 * FP8_MAX
    _, is_cut = key_errors(to_stored(keys, torch.float8_e4m3fn), scales_last=True)
    assert is_cut.tolist() == [True, False]
