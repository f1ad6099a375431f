"""Native families whose layers have states, on the attention backends of devices: transformers'
tokens, and the same bits however a prompt is divided. Over CPU tensors: references, and the Triton
kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve.errors import ModelNotSupported
from radixserve.models.decoder import Decoder, load_decoder
from radixserve.models.source import checkpoint
from tests.checkpoints import RECURRENT, greedy, load_reference, make_checkpoint
from tests.runner.on_device import DeviceRuntime

RNG = np.random.default_rng(8)
PROMPT = RNG.integers(3, 250, 40).tolist()
PROMPTS = [PROMPT, [*PROMPT[:21], 7, 8, 9], RNG.integers(3, 250, 9).tolist()]
NUM_NEW = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, digest=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 200,
    "num_states": 60,
    "max_running_requests": 4,
    "checkpoint_interval": 16,
    "model_impl": "native",
}
ONE_OF_EACH = ("qwen3_5", "lfm2", "falcon_h1")


@dataclass
class Reference:
    folder: Path
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def model(self) -> Any:
        return load_reference(self.folder)

    def tokens(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key] = greedy(self.model, prompt, NUM_NEW)[len(prompt) :]
        return self.answers[key]


Find = Callable[[str], Reference]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    return cache(lambda family: Reference(make_checkpoint(tmp_path_factory.mktemp(family), family)))


def check(runtime: Runtime, reference: Reference) -> None:
    """Cold, warm, together, and where a prompt leaves a path at a checkpoint inside it."""
    cold = runtime.generate([PROMPT], PARAMS)[0]
    warm = runtime.generate([PROMPT], PARAMS)[0]
    assert cold.token_ids == warm.token_ids == reference.tokens(PROMPT)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, len(PROMPT) - 1)
    together = runtime.generate(PROMPTS, PARAMS)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer.token_ids == reference.tokens(prompt)
    assert together[1].usage.cached_tokens == 16
    runtime.check()


@pytest.mark.parametrize("family", RECURRENT)
def test_on_the_path_of_a_device(family: str, find: Find) -> None:
    """Decode steps and pieces of steps run over the buffers of their graphs."""
    reference = find(family)
    with DeviceRuntime(
        reference.folder, **SETTINGS, chunked_prefill_size=23, attention_backend="triton"
    ) as runtime:
        assert runtime.model.is_native
        assert isinstance(runtime.runner.model, Decoder)
        assert runtime.resolved_config.graph_sizes == (1, 2, 4)
        assert runtime.resolved_config.piecewise_tokens > 0
        check(runtime, reference)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_on_the_torch_backend(family: str, find: Find) -> None:
    reference = find(family)
    with Runtime(
        str(reference.folder), **SETTINGS, chunked_prefill_size=17, attention_backend="torch"
    ) as runtime:
        assert runtime.model.is_native
        check(runtime, reference)


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.usefixtures("interpreted")
def test_kernels_themselves(family: str, find: Find) -> None:
    """In Triton's interpreter, which is slow: few tokens, in chunks and as one."""
    reference, prompt = find(family), PROMPT[:7]
    settings = {**SETTINGS, "max_running_requests": 2, "checkpoint_interval": 4}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with DeviceRuntime(
        reference.folder, **settings, chunked_prefill_size=5, attention_backend="triton"
    ) as runtime:
        answer = runtime.generate([prompt], params)[0]
        assert answer.token_ids == reference.tokens(prompt)[:2]
        runtime.check()


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_the_same_bits_in_chunks_of_any_size(family: str, find: Find) -> None:
    digests = set()
    for chunk, mode in ((7, "radix"), (16, "off"), (64, "radix")):
        settings = {**SETTINGS, "exact": True, "cache": mode, "chunked_prefill_size": chunk}
        with DeviceRuntime(find(family).folder, **settings) as runtime:
            assert runtime.resolved_config.inexact == ""
            for _ in range(2):
                answers = runtime.generate(PROMPTS, PARAMS)
                digests.add(tuple(answer.digest for answer in answers))
    assert len(digests) == 1


def test_several_ranks_are_refused(find: Find) -> None:
    class Ranks:
        size, rank = 2, 0

    source = checkpoint(find("lfm2").folder)
    with pytest.raises(ModelNotSupported, match="recurrent layers run natively on"):
        load_decoder(source, torch.float32, torch.device("cpu"), Ranks())  # type: ignore[arg-type]
