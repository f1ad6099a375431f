"""The parts of a run, in their order: what is right comes before what is fast."""

from __future__ import annotations

from dataclasses import dataclass

KERNEL_GROUPS = (
    "rows",
    "draws",
    *(f"attention {kind}" for kind in ("bf16 1", "bf16 16", "bf16 64", "fp16 16", "fp32 16")),
    "odd bf16 16",  # other numbers of heads
    *(f"triton {kind}" for kind in ("bf16", "fp16", "fp32")),
    *(f"flashinfer {kind}" for kind in ("bf16", "fp16")),
)
BACKENDS = ("", "triton")  # the run's own, and ours beside FlashInfer's


@dataclass(frozen=True)
class Spec:
    """`run(bench, group)` of the module part_NAME does it."""

    name: str
    title: str
    limit_s: float  # of each group
    groups: tuple[str, ...] = ("",)
    width: int = 1  # groups at a time; what is timed has the card for itself
    is_brief: bool = False  # rows that are as they should be are not printed one by one

    @property
    def module(self) -> str:
        return f"part_{self.name}"


PARTS = (
    Spec("limits", "copy bandwidth and bf16 product of this card", 60),
    Spec(
        "kernels",
        "kernels against float64, outputs and unread cells poisoned",
        300,
        KERNEL_GROUPS,
        width=8,  # each compiles its kernels first
        is_brief=True,
    ),
    Spec(
        "parity",
        "tokens of the engine against the CPU's, tiny random model",
        240,
        ("triton", "flashinfer", "torch"),
        width=3,
    ),
    Spec("tests", "the tests that run on a CUDA device", 180),
    Spec("decode", "decode step, Llama-3-8B shapes, bf16, random weights", 180, BACKENDS),
    Spec("prefill", "time to first token, Llama-3-8B shapes, bf16, one request", 120, BACKENDS),
    Spec(
        "shared",
        "shared prefix: cascade against flat, Llama-3-8B shapes, bf16",
        120,
        ("attention", "step", "crossover"),
    ),
    Spec(
        "throughput",
        "throughput, Qwen3-0.6B shapes, bf16, cache on and off",
        180,
        ("lengths", "workloads"),
    ),
    Spec("beam", "beam search, width 4, Llama-3-8B shapes, bf16", 180),
)
