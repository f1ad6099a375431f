"""What LoRA adapters cost beside the model alone, which is what merging one by hand costs.

    python benchmarks/bench_adapters.py [--model smollm2] [--dtype bfloat16] [--rank 16]
        [--runtimes 3] [--rounds 5] [--threads 1] [--only "decode 1,mixed 32"]

model: smollm2 is computed in the 4 and 8 bits of its file, a shape of harness/shapes.py, such as
small, in `dtype`, in which adapters always are.

prefill       one adapter computes a prompt of 512 tokens
decode N      one adapter computes N rows
mixed 32      eight adapters compute 32 rows

A round computes the same prompts three times, in changing order: with adapters, without any in the
same runtime, and in a runtime that has no adapters. The second is the measure of the other two. The
third is the control: what it differs by is noise, the placement of both runtimes in memory, or the
cost of adapters that no row uses. Placement differs from one runtime to the next, so some pairs of
fresh runtimes are measured.

The figures are medians of the rounds' ratios, by the CPU seconds of all threads, and the lowest and
highest median of a pair of runtimes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from harness.arguments import Names, parse
from harness.report import print_table
from harness.shapes import SHAPES, save_checkpoint
from safetensors.torch import save_file

from radixserve import Runtime, SamplingParams
from radixserve.models.source import find_model

NUM_ADAPTERS, PROMPT_TOKENS, NUM_TOKENS = 8, 512, 16


class Case(NamedTuple):
    num_tokens: int  # to generate; 1: the prompt is computed, else its K/V is cached
    names: list[str]  # of each row's adapter


def make_adapter(folder: Path, config: Any, rank: int, seed: int) -> str:
    """Write an adapter of all projections with random weights."""
    torch.manual_seed(seed)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        **{f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", q), ("k", kv))},
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (size, depth) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, depth) * 0.02
            tensors[f"{key}.lora_B.weight"] = torch.randn(size, rank) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def seconds(runtime: Runtime, prompts: list[list[int]], names: Sequence[str], count: int) -> float:
    """Of all threads, to generate `count` tokens after each prompt."""
    params = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, adapter=name)
        for name in names
    ]
    if count == 1:
        runtime.flush_cache()
    else:
        runtime.generate(prompts, params)
    begun = time.process_time()
    runtime.generate(prompts, params)
    return time.process_time() - begun


def cases(names: list[str]) -> dict[str, Case]:
    """By their labels."""
    return {
        "prefill": Case(1, names[:1]),
        "decode 1": Case(NUM_TOKENS, names[:1]),
        "decode 8": Case(NUM_TOKENS, names[:1] * 8),
        "decode 32": Case(NUM_TOKENS, names[:1] * 32),
        "mixed 32": Case(NUM_TOKENS, names * 4),
    }


class CaseTimes:
    """The times of one case, and their ratios: a list for each pair of runtimes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []  # without adapters
        self.ratios: dict[str, list[list[float]]] = {"adapters": [], "control": []}

    def add(self, rt: Runtime, plain: Runtime, case: Case, rounds: int) -> None:
        length = PROMPT_TOKENS if case.num_tokens == 1 else 16
        rows = range(len(case.names))
        prompts = [[(7 * row + 3 * place) % 1000 for place in range(length)] for row in rows]
        none = [""] * len(prompts)
        ways = [("adapters", rt, case.names), ("none", rt, none), ("control", plain, none)]
        for ratios in self.ratios.values():
            ratios.append([])
        for number in range(rounds + 1):
            taken = {
                way: seconds(runtime, prompts, names, case.num_tokens)
                for way, runtime, names in (ways if number % 2 else ways[::-1])
            }
            ways = ways[1:] + ways[:1]
            if number:  # the first warms up
                self.seconds.append(taken["none"])
                for way, ratios in self.ratios.items():
                    ratios[-1].append(taken[way] / taken["none"])

    def row(self, label: str) -> list[str]:
        cells = [label, f"{1e3 * median(self.seconds):.1f}"]
        for ratios in self.ratios.values():
            medians = [100 * (median(of_pair) - 1) for of_pair in ratios]
            whole = 100 * (median(ratio for of_pair in ratios for ratio in of_pair) - 1)
            cells += [f"{whole:+.1f} %", f"{min(medians):+.1f} to {max(medians):+.1f}"]
        return cells


def main() -> None:
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    args = parse(
        __doc__,
        model="smollm2",
        dtype="bfloat16",
        rank=16,
        runtimes=3,
        rounds=5,
        threads=1,
        only=Names("cases", cases(names)),
        json=False,
    )
    torch.set_num_threads(args.threads)
    times = {label: CaseTimes() for label in args.only}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in SHAPES:
            model = str(Path(folder) / model)
            save_checkpoint(SHAPES[args.model], args.dtype, Path(model), has_tokenizer=True)
        config = find_model(model).config
        adapters = {
            name: make_adapter(Path(folder) / name, config, args.rank, number)
            for number, name in enumerate(names)
        }
        settings: dict[str, Any] = {"dtype": args.dtype, "num_pages": 20_000, "max_draft_tokens": 0}
        more: dict[str, Any] = {"adapters": adapters, "adapter_memory": "8GB"}
        for _ in range(args.runtimes):
            with (
                Runtime(model, **settings) as plain,
                Runtime(model, **settings, **more) as rt,
            ):
                for label, of_case in times.items():
                    of_case.add(rt, plain, cases(names)[label], args.rounds)
    columns = ["case", "no adapter, ms", "with adapters", "of runtimes", "control", "of runtimes"]
    print_table(args, columns, [of_case.row(label) for label, of_case in times.items()])


if __name__ == "__main__":
    main()
