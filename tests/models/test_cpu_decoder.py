"""The decoder on CPU kernels against the one on torch: the same logits, the same K and V."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.attention.cpu import CpuBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.rope import FIRST_POSITIONS
from radixserve.models.source import checkpoint
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.stored_kv import stored_width, to_stored
from tests.checkpoints import NATIVE, NATIVE_PARTS, make_checkpoint
from tests.models.forward_steps import SAMPLED, VOCAB, forward_steps
from tests.pacing import PATIENCE_S, wait_until

CPU = torch.device("cpu")
ODD: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
ODD |= {"intermediate_size": 100, "hidden_size": 40, "head_dim": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
YARN["original_max_position_embeddings"] = 64
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in NATIVE},
    "wide heads": ("llama", {"hidden_size": 72, "head_dim": 48}),
    "one key head": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "a key head each": ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qk-norm and biases": ("qwen3", {"attention_bias": True, "head_dim": 48}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn rope": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "one layer": ("mistral", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    **{family: (family, {}) for family in NATIVE_PARTS},
}

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)


@dataclass
class World:
    """A model with a pool of its own, and how it is run."""

    model: LanguageModel
    page_size: int
    is_cpu: bool
    num_pages: int = 1_500
    kv_dtype: torch.dtype | None = None
    kv: Tensor = field(init=False)

    def __post_init__(self) -> None:
        info, dtype = self.model.info, self.kv_dtype or self.model.info.dtype
        shape = (info.num_layers, 2, self.num_pages, self.page_size, info.num_kv_heads)
        self.kv = torch.zeros(*shape, stored_width(info.head_dim, dtype), dtype=dtype)
        make = CpuBackend if self.is_cpu else ReferenceBackend
        self.backend = make(self.kv, info.num_heads, dtype=info.dtype)

    @torch.inference_mode()
    def run(self, rows: list[ScheduledRequest]) -> Tensor:
        batch = build_forward_batch(rows, self.page_size, CPU)
        self.backend.plan(batch)
        return self.model.forward(batch, self.backend)


def worlds(
    folder: Path, page_size: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[World, World]:
    """On CPU kernels, and on torch."""
    if reason := unsupported_reason(dtype):
        pytest.skip(reason)
    source = checkpoint(folder)
    return (
        World(load_cpu_decoder(source, dtype), page_size, True),
        World(load_decoder(source, dtype, CPU), page_size, False),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_same_as_torch(tmp_path: Path, name: str) -> None:
    family, fields = VARIANTS[name]
    make_checkpoint(tmp_path, family, seed=len(name), **{**ODD, **fields})
    models = worlds(tmp_path)
    assert models[0].model.info == models[1].model.info
    for page_size, num_pages in ((1, 1_500), (2, 800), (16, 150)):
        own, plain = (World(one.model, page_size, one.is_cpu, num_pages) for one in models)
        for rows in forward_steps(len(name), page_size, num_pages):
            logits, expected = own.run(rows), plain.run(rows)
            assert (logits.dtype, logits.shape) == (torch.float32, expected.shape)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.kv, plain.kv, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["llama", "qwen3", "wide heads"])
def test_stored_in_another_dtype(tmp_path: Path, name: str, kv_dtype: torch.dtype) -> None:
    """What is stored has the bits that `to_stored` gives, and is what is attended to."""
    family, fields = VARIANTS[name]
    make_checkpoint(tmp_path, family, seed=len(name), **{**ODD, **fields})
    own, plain = worlds(tmp_path, 2)
    stored, expected = (
        World(world.model, 2, world.is_cpu, kv_dtype=kv_dtype) for world in (own, plain)
    )
    for rows in forward_steps(len(name), 2):
        own.run(rows)
        # A number near the middle of two integers is rounded to either.
        torch.testing.assert_close(stored.run(rows), expected.run(rows), atol=5e-2, rtol=5e-2)
    first = own.kv[0]  # a layer whose K and V depend on no others
    written = first.abs().sum((-1, -2)) > 0
    assert torch.equal(stored.kv[0][written], to_stored(first[written], kv_dtype))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "wide heads", "all biases"])
def test_bfloat16_is_closer_than_torch(tmp_path: Path, name: str, cpu_level: str) -> None:
    """To float32 on the same weights: sums and what is added to them are not rounded."""
    family, fields = VARIANTS[name]
    make_checkpoint(tmp_path, family, seed=3, dtype=torch.bfloat16, **{**ODD, **fields})
    own, plain = worlds(tmp_path, 2, torch.bfloat16)
    _, exact = worlds(tmp_path, 2)
    errors = torch.zeros(2, dtype=torch.float64)
    for rows in forward_steps(5, 2):
        right = exact.run(rows).double()
        for at, world in enumerate((own, plain)):
            errors[at] += ((world.run(rows) - right) ** 2).mean() / (right**2).mean()
    mine, theirs = errors.sqrt().tolist()
    assert 0 < mine < 0.8 * theirs, f"by {cpu_level}"


def big_checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    sizes = {"hidden_size": 136, "intermediate_size": 300, "head_dim": 40, **sizes}
    sizes["num_attention_heads"] = 8
    return make_checkpoint(folder, "qwen3", dtype=dtype, **{**ODD, **sizes})


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads(tmp_path: Path, dtype: torch.dtype) -> None:
    """The same bits with 1, 2 and 3; steps of many rows and of one."""
    sizes = {"hidden_size": 384, "intermediate_size": 1000, "head_dim": 64, "num_hidden_layers": 3}
    folder = make_checkpoint(tmp_path, "qwen3", dtype=dtype, **{**ODD, **sizes})
    own, _ = worlds(folder, 2, dtype)
    alone = [[row] for row in forward_steps(3, 2)[-1][:2]]
    for rows in [*forward_steps(1, 2), *alone]:
        answers = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            answers.append((own.run(rows), own.kv.clone()))
        for logits, kv in answers[1:]:
            assert torch.equal(logits, answers[0][0])
            assert torch.equal(kv, answers[0][1])


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.usefixtures("restored_threads")
def test_a_step_of_one_row_is_worth_several_threads(tmp_path: Path) -> None:
    """They are made when they are needed, and go with the thread that computes."""
    own, _ = worlds(big_checkpoint(tmp_path, hidden_size=512, intermediate_size=2000))
    row = forward_steps(3, 2)[-1][:1]
    before = set(os.listdir("/proc/self/task"))
    fresh: list[set[str]] = []

    def compute() -> None:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            own.run(row)
            fresh.append(set(os.listdir("/proc/self/task")) - before)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [len(threads) for threads in fresh] == [1, 3, 3]
    # join returns before the system's thread has ended
    wait_until(lambda: fresh[-1].isdisjoint(os.listdir("/proc/self/task")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_has_threads_of_its_own() -> None:
    code = """
import os
import torch
from radixserve_kernels.cpu_weights import PackedWeight
torch.set_num_threads(2)
torch.manual_seed(0)
x, weight = torch.randn(3, 900), torch.randn(2000, 900)
packed = PackedWeight(weight)
expected = packed(x)
child = os.fork()
assert torch.equal(packed(x), expected)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def check_rows_alone(folder: Path, dtype: torch.dtype) -> None:
    """Logits and K/V of each row are the same to the bit alone and in a batch, without sharing."""
    own, _ = worlds(big_checkpoint(folder, dtype), 2, dtype)
    own.backend = CpuBackend(own.kv, own.model.info.num_heads, shares=False)
    for rows in forward_steps(2, 2):
        rows = [row._replace(sample=SAMPLED, logprob_targets=None) for row in rows]
        together = own.run(rows)
        kv = own.kv.clone()
        for number in random.Random(0).sample(range(len(rows)), len(rows)):
            assert torch.equal(own.run([rows[number]])[0], together[number])
        assert torch.equal(own.kv, kv)


def test_a_row_does_not_depend_on_others(tmp_path: Path) -> None:
    check_rows_alone(tmp_path, torch.float32)


@pytest.mark.usefixtures("cpu_level")
def test_a_row_does_not_depend_on_others_in_bfloat16(tmp_path: Path) -> None:
    check_rows_alone(tmp_path, torch.bfloat16)


def test_positions_beyond_the_first_table(tmp_path: Path) -> None:
    long = FIRST_POSITIONS + 300
    make_checkpoint(tmp_path, "llama", max_position_embeddings=2 * long, **ODD)
    own, plain = worlds(tmp_path, 16)
    generator = np.random.default_rng(0)
    ids, pages = generator.integers(0, VOCAB, long).astype(np.int32), np.arange(170, dtype=np.int32)
    for start, end in ((0, long - 1), (long - 1, long)):
        row = ScheduledRequest("r", ids[start:end], start, pages[: -(-end // 16)], SAMPLED)
        torch.testing.assert_close(own.run([row]), plain.run([row]), atol=1e-4, rtol=1e-4)


def test_many_models_do_not_mix(tmp_path: Path) -> None:
    """Their memory is their own, and is given back with them."""
    pairs = []
    for number, (family, fields) in enumerate([("llama", {}), ("qwen3", {"head_dim": 48})]):
        folder = make_checkpoint(tmp_path / str(number), family, **{**ODD, **fields})
        pairs.append(worlds(folder))
        worlds(folder)  # dropped at once
    for rows in forward_steps(4, 2):
        for own, plain in pairs:
            torch.testing.assert_close(own.run(rows), plain.run(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, "llama", **ODD)
    own, plain = worlds(tmp_path)
    (rows, *_) = forward_steps(0, 2)
    expected = plain.run(rows)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = own.run(rows)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_runs_on_the_cpu_backend_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", **ODD)
    own, plain = worlds(tmp_path)
    (rows, *_) = forward_steps(0, 2)
    own.backend = plain.backend
    with pytest.raises(AssertionError, match="not on the torch backend"):
        own.run(rows)
