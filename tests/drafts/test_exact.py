"""Answers with drafts are to the bit those without: random programs, twice, so that the second
time the answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint
from tests.drafts.sources import KINDS, ForcedSource, Kind, Memory
from tests.exact.programs import SETTINGS, Program
from tests.exact.test_exact import WRAPPED, WRAPPED_SIZES, random_checkpoints
from tests.runner.on_device import DeviceRuntime

FAMILIES = ("llama", "gemma3", "qwen3_next", "lfm2")  # windows, and two kinds of states
Find = Callable[[str], Path]

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find_folder(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            sizes: dict[str, Any] = WRAPPED_SIZES if family in WRAPPED else {}
            has_text = family == "llama"
            made[family] = make_checkpoint(folder, family, with_tokenizer=has_text, **sizes)
        return made[family]

    return find_folder


def check(
    make: Callable[..., Runtime], model: str, kind: Kind, seed: int, num_calls: int, **own: Any
) -> None:
    """Run a program twice with drafts, and compare each answer with that of a runtime without a
    cache and drafts."""
    settings = {"num_pages": 6_000, "dtype": "float32", **own}
    plain = {"cache": "off", "cascade_attention": False, "max_draft_tokens": 0}
    memory = Memory()
    longest = 24 if make is DeviceRuntime else 120
    with make(model, **settings, max_draft_tokens=8) as runtime:
        assert runtime.resolved_config.inexact == ""
        source = ForcedSource(kind, memory.guess, runtime.model.vocab_size, seed)
        runtime.add_draft_source(source)
        programs = []
        for _ in range(2):
            program = Program.of(runtime, random.Random(seed), longest)
            program.batch()
            program.samples()
            program.run(num_calls)
            runtime.check()
            for answer in program.answers:
                if answer.output is not None:
                    memory.note(*answer.output)
            programs.append(program)
        drafts = runtime.cache_stats()["drafts"][kind]
        assert drafts["drafted_tokens"] > 10
        share = drafts["accepted_tokens"] / drafts["drafted_tokens"]
        assert share > 0.9 if kind == "right" else share < 0.9
    for name in ("checkpoint_interval", "num_states"):
        settings.pop(name, None)
    with make(model, **{**settings, **plain}) as alone:
        for program in programs:
            assert not list(program.differences(alone)), own


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if kind == "half" or at < 2 else pytest.mark.long)
        for at, family in enumerate(FAMILIES)
        for kind in KINDS
    ],
)
def test_random_programs(family: str, kind: Kind, find: Find) -> None:
    seed = FAMILIES.index(family) * len(KINDS) + KINDS.index(kind)
    own = SETTINGS[seed % len(SETTINGS)]
    if family in ("qwen3_next", "lfm2"):
        own = {**own, **random_checkpoints(seed)}
    check(Runtime, str(find(family)), kind, seed, 3, **own)


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_in_8_bits(kind: Kind, find: Find) -> None:
    check(Runtime, str(find("llama")), kind, 3, 3, kv_dtype="int8", weight_dtype="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_in_bfloat16(kind: Kind, find: Find) -> None:
    seed = KINDS.index(kind) + 1
    own = {**SETTINGS[seed], "dtype": "bfloat16", "kv_dtype": "int8"}
    check(Runtime, str(find("gemma3")), kind, seed, 2, **own)


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_of_a_wrapped_model(kind: Kind, find: Find) -> None:
    check(Runtime, str(find("gpt2")), kind, 2, 2, model_impl="transformers")


def test_random_programs_on_two_ranks() -> None:
    own = {"device": "cpu", "page_size": 4, "num_pages": 600, "tensor_parallel_size": 2}
    check(Runtime, "random:tiny-llama", "half", 2, 1, **own)


@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in KINDS), ("lfm2", "half")]
)
def test_random_programs_on_the_path_of_a_device(family: str, kind: Kind, find: Find) -> None:
    own = {"num_pages": 600, "device": "cpu", "exact": True, "page_size": 4}
    check(DeviceRuntime, str(find(family)), kind, 1, 2, **own)
