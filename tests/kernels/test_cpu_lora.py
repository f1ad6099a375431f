"""Products of adapters at every instruction level, by whole answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from tests.adapters.peft_adapters import TARGETS, applied, greedy, make_adapter
from tests.adapters.test_adapters import COUNT, params, prompt_of
from tests.checkpoints import load_reference, make_checkpoint

# Parts of q, k and v end within a vector of every level, and so do those of gate and up.
SIZES = {"head_dim": 10, "intermediate_size": 84}
KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1},
    "rank 5": {"rank": 5, "targets": ("k_proj", "v_proj", "up_proj", "o_proj")},
    "rank 16": {"rank": 16},
    "rank 40": {"rank": 40, "targets": ("v_proj", "gate_proj", "down_proj")},
    "ranks": {"rank": 3, "rank_pattern": {"k_proj": 33, "gate_proj": 18, "v_proj": 1}},
}


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = make_checkpoint(folder / "model", "llama", **SIZES)
        self.model = load_reference(self.folder)
        self.adapters: dict[str, Any] = {}
        for seed, (kind, fields) in enumerate(KINDS.items()):
            given = {"targets": TARGETS, **fields}
            self.adapters[kind] = make_adapter(folder / kind, self.model, seed, **given)
        self.prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 5, 40))]
        self.pairs = [(prompt, kind) for kind in ("", *KINDS) for prompt in self.prompts]
        self.expected = [self._answer(prompt, kind) for prompt, kind in self.pairs]

    def _answer(self, prompt: list[int], kind: str) -> tuple[list[int], list[float]]:
        if not kind:
            return greedy(self.model, prompt, COUNT)
        with applied(self.model, self.adapters[kind]):
            return greedy(self.model, prompt, COUNT)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("lora"))


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers(case: Case, set_threads: Callable[[int], None], dtype: str) -> None:
    """The reference's, and the same bits alone and together, in chunks, with any threads."""
    each = [params(kind) for _, kind in case.pairs]
    prompts = [prompt for prompt, _ in case.pairs]
    settings: dict[str, Any] = {"num_pages": 2048, "adapters": case.adapters, "dtype": dtype}
    set_threads(1)
    with Runtime(str(case.folder), **settings) as rt:
        alone = [rt.generate(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    set_threads(2)
    with Runtime(str(case.folder), **settings) as rt:
        mixed = rt.generate(prompts, each)
    with Runtime(str(case.folder), chunked_prefill_size=11, **settings) as rt:
        cut = rt.generate(prompts[::-1], each[::-1])[::-1]
    assert [out.logprobs for out in mixed] == [out.logprobs for out in alone]
    assert [out.logprobs for out in cut] == [out.logprobs for out in alone]
    for (tokens, logprobs), out in zip(case.expected, alone, strict=True):
        if dtype == "float32":
            assert out.token_ids == tokens
            assert out.logprobs == pytest.approx(logprobs, abs=1e-4)
        else:
            assert out.logprobs[0] == pytest.approx(logprobs[0], abs=0.3)
