"""The bits of answers on the path of a CUDA device, over CPU tensors: its kernels' references, and
the Triton kernels in Triton's interpreter. What a GPU rounds is not tested here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint
from tests.exact.programs import Program, differences_of
from tests.runner.on_device import DeviceRuntime

MODELS = [("llama", "float32"), ("gemma3", "bfloat16"), ("qwen3_moe", "bfloat16")]
STATES = [("qwen3_5", "float32"), ("falcon_h1", "bfloat16"), ("lfm2", "bfloat16")]  # of layers
VARIANTS: list[dict[str, Any]] = [
    {"page_size": 4, "chunked_prefill_size": 37},
    {"chunked_prefill_size": 16, "max_running_requests": 3},
    {"cascade_attention": True, "cache": "hash", "page_size": 16},
]
Find = Callable[[str], Path]

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find_folder(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return find_folder


def check(
    folder: Path, dtype: str, seeds: range, num_calls: int, longest: int = 60, **more: Any
) -> None:
    settings = {"num_pages": 600, "dtype": dtype, "device": "cpu", "exact": True, **more}
    with DeviceRuntime(folder, **{**settings, "cache": "off"}) as alone:
        assert alone.attention_backend == "triton"
        assert alone.resolved_config.inexact == ""
        for seed in seeds:
            own = {**settings, **VARIANTS[seed % len(VARIANTS)]}
            with DeviceRuntime(folder, **own) as runtime:
                assert not list(differences_of(runtime, seed, num_calls, alone, longest)), own


def check_interpreted(
    folder: Path, dtype: str, page_size: int, kinds: list[str], most_tokens: int, **more: Any
) -> None:
    """Each answer beside that of the same engine, emptied before each request."""
    settings = {"num_pages": 600 // page_size, "dtype": dtype, "device": "cpu", "exact": True}
    settings |= more
    small = {"chunked_prefill_size": 16, "max_running_requests": 4}
    with DeviceRuntime(folder, **settings, **small, page_size=page_size) as runtime:
        program = Program.of(runtime, random.Random(page_size), longest=24)
        program.most_tokens = most_tokens
        for kind in kinds:
            getattr(program, kind)()
        runtime.check()
        assert not list(program.differences(None))


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_random_programs(family: str, dtype: str, find: Find) -> None:
    first = [model for model, _ in MODELS].index(family)
    check(find(family), dtype, range(first, first + 1), 3)


@pytest.mark.parametrize(("family", "dtype"), MODELS[:2])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_random_programs_in_8_bits(family: str, dtype: str, kv_dtype: str, find: Find) -> None:
    """Prefill attends to what is stored, so that a hit changes nothing; gemma3 has windows."""
    first = [model for model, _ in MODELS].index(family)
    check(find(family), dtype, range(first, first + 1), 3, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("family", "dtype"), STATES)
def test_random_programs_of_layers_with_states(family: str, dtype: str, find: Find) -> None:
    """With the two variants whose cache keeps states."""
    seed = [model for model, _ in STATES].index(family) % 2
    check(find(family), dtype, range(seed, seed + 1), 2, longest=40)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("family", "dtype"), STATES)
def test_states_in_the_interpreter(family: str, dtype: str, find: Find) -> None:
    check_interpreted(find(family), dtype, 16, ["branches"], most_tokens=3)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_a_program_in_the_interpreter(find: Find) -> None:
    """Windows and forks of an answer, in few tokens: the interpreter is slow."""
    check_interpreted(find("gemma3"), "bfloat16", 16, ["branches"], most_tokens=3)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_8_bits_in_the_interpreter(kv_dtype: str, find: Find) -> None:
    more = {"kv_dtype": kv_dtype}
    check_interpreted(find("gemma3"), "bfloat16", 16, ["branches"], most_tokens=3, **more)


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_more_random_programs(family: str, dtype: str, find: Find) -> None:
    check(find(family), dtype, range(100, 106), 6, longest=200)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_programs_in_the_interpreter(family: str, dtype: str, page_size: int, find: Find) -> None:
    kinds = ["batch", "branches", "beams", "samples", "scores", "cancels"]
    check_interpreted(find(family), dtype, page_size, kinds, most_tokens=8)


def test_by_default_it_is_not_promised(find: Find) -> None:
    """Rows that share pages, and splits of keys, have other bits."""
    settings: dict[str, Any] = {"num_pages": 600, "dtype": "float32", "device": "cpu"}
    with DeviceRuntime(find("llama"), **settings, cache="off") as alone:
        assert "block sizes" in alone.resolved_config.inexact
        with DeviceRuntime(find("llama"), **settings) as runtime:
            assert list(differences_of(runtime, 0, 4, alone, 200))
