"""How far recurrent states in 8 bits move a model's distributions, beside K and V in 8 bits.

    python benchmarks/state_fidelity.py [--families qwen3_5_text,nemotron_h] [--width 256]
        [--num-prompts 3] [--prompt 512] [--tokens 320] [--json]

Models have random weights, eight layers and float32 numbers. After a prompt of random tokens the
states are rounded, and every distribution after each of the next tokens is compared with that of
the same engine whose states stay as they are: KL divergence in nats, over all of them and over the
last quarter, and the share of tokens whose most likely successor is the same.

once           rounded after the prompt, as where a request resumes at a checkpoint
every N        also after each N further tokens, as where every engine would round so that warm and
               cold answers have the same bits
scale          one for each last axis of a state, a bfloat16; bfloat16: rounded to 16 bits instead
K and V int8   the same prompts and tokens with kv_dtype="int8"
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from engine.hybrids import LAYERS, save_model
from harness.arguments import Names, parse
from harness.report import Cell, print_table
from torch import Tensor

from radixserve.config import EngineConfig
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve.schedule import ScheduledRequest, ScheduledRows, SchedulerOutput
from radixserve_kernels.stored_kv import multiply_hadamard

COLUMNS = ("family", "states", "KL mean", "KL of the last quarter", "same best token %")
INITIALIZER_RANGE = 0.06  # so that distributions are not flat
Rounding = Callable[[Tensor], Tensor]  # of a state of one sequence


def to_int8(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30).bfloat16().float()
    return (x / scale).round().clamp(-127, 127) * scale


def hadamard_to_int8(x: Tensor) -> Tensor:
    """Heads multiplied with a Hadamard matrix, as those of K and V."""
    return multiply_hadamard(to_int8(multiply_hadamard(x)))


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


FORMS: dict[str, tuple[Rounding, int]] = {  # and after how many tokens it is done again; 0: never
    "bfloat16, once": (to_bfloat16, 0),
    "int8, once": (to_int8, 0),
    "int8, Hadamard, once": (hadamard_to_int8, 0),
    "bfloat16, every 64": (to_bfloat16, 64),
    "int8, Hadamard, every 64": (hadamard_to_int8, 64),
    "int8, Hadamard, every token": (hadamard_to_int8, 1),
}


class RunnerSequence:
    """One sequence of a runner without a scheduler; it has the first state and pages in order."""

    def __init__(self, folder: Path, num_tokens: int, kv_dtype: str = "auto") -> None:
        config = EngineConfig(
            device="cpu", dtype="float32", num_pages=num_tokens, num_states=4, kv_dtype=kv_dtype
        )
        self._runner = CpuModelRunner(str(folder), config)
        self._length = 0

    @torch.inference_mode()
    def forward(self, tokens: np.ndarray) -> Tensor:
        """[n, V] log-probabilities after each of the tokens."""
        start, end = self._length, self._length + len(tokens)
        pages = np.arange(end, dtype=np.int32)
        row = ScheduledRequest("", tokens, start, pages, None, tokens, state_id=0)
        copies = np.empty((0, 3), np.int32)
        schedule = SchedulerOutput(0, ScheduledRows.of([row]), copies, len(tokens), 0)
        prepared = self._runner.launch(schedule)
        assert prepared is not None
        self._length = end
        return self._runner.model.forward(prepared[1], self._runner.backend).log_softmax(-1)

    def round(self, rounding: Rounding) -> None:
        for tensor in self._runner._states.tensors:
            tensor[0] = rounding(tensor[0])

    def restart(self) -> None:
        self._length = 0


def distributions(
    sequence: RunnerSequence, tokens: np.ndarray, num_prompt: int, form: tuple[Rounding, int] | None
) -> Tensor:
    sequence.restart()
    sequence.forward(tokens[:num_prompt])
    rest = tokens[num_prompt:]
    if form is None:
        return sequence.forward(rest)
    rounding, interval = form
    parts: list[Tensor] = []
    for part in np.array_split(rest, math.ceil(len(rest) / interval) if interval else 1):
        sequence.round(rounding)
        parts.append(sequence.forward(part))
    return torch.cat(parts)


def measure(family: str, args: argparse.Namespace) -> list[list[Cell]]:
    length = args.prompt + args.tokens
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 4000, length).astype(np.int32) for _ in range(args.num_prompts)]
    with tempfile.TemporaryDirectory(prefix="state-fidelity-") as name:
        save_model(family, args.width, Path(name), INITIALIZER_RANGE)
        sequence, in_8_bits = (
            RunnerSequence(Path(name), length),
            RunnerSequence(Path(name), length, "int8"),
        )
        expected = [distributions(sequence, tokens, args.prompt, None) for tokens in prompts]
        rows: list[list[Cell]] = []
        for form in (*FORMS, "K and V int8"):
            kl, same = [], []
            for tokens, p in zip(prompts, expected, strict=True):
                own = in_8_bits if form not in FORMS else sequence
                q = distributions(own, tokens, args.prompt, FORMS.get(form))
                kl.append((p.exp() * (p - q)).sum(-1))
                same.append((p.argmax(-1) == q.argmax(-1)).float())
            means, last = torch.stack(kl), torch.stack(kl)[:, -args.tokens // 4 :]
            share = 100 * torch.stack(same).mean()
            rows.append([family, form, f"{means.mean():.6f}", f"{last.mean():.6f}", f"{share:.2f}"])
            print(f"{family}: {form}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = parse(
        *(__doc__,),
        families=Names("family", LAYERS, ("qwen3_5_text", "nemotron_h")),
        width=256,
        num_prompts=3,
        prompt=512,
        tokens=320,
        json=False,
    )
    torch.set_num_threads(1)
    table = [row for family in args.families for row in measure(family, args)]
    print_table(args, COLUMNS, table, ("torch", "transformers"))


if __name__ == "__main__":
    main()
