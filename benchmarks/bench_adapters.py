"""What LoRA adapters cost beside the model alone, which is what merging one by hand costs.

    python benchmarks/bench_adapters.py [--model smollm2] [--dtype bfloat16] [--rank 16]
        [--rounds 5]

One runtime answers the same prompts with and without adapters in turns. The figures are medians of
the pairs' ratios, by the seconds of all threads.

prefill     one adapter computes a prompt of 512 tokens
decode N    one adapter computes N rows
mixed 32    eight adapters compute 32 rows
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.arguments import parse
from harness.report import print_table
from safetensors.torch import save_file

from radixserve import Runtime, SamplingParams
from radixserve.models.source import find_model

NUM_ADAPTERS, PROMPT_TOKENS, NUM_TOKENS = 8, 512, 16


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
    """Of all threads, to generate `count` tokens after each prompt, whose K/V is cached but for
    count 1."""
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


def main() -> None:
    args = parse(
        __doc__, model="smollm2", dtype="bfloat16", rank=16, rounds=5, threads=1, json=False
    )
    torch.set_num_threads(args.threads)
    config = find_model(args.model).config
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"a{number}" for number in range(NUM_ADAPTERS)]
        adapters = {
            name: make_adapter(Path(folder) / name, config, args.rank, number)
            for number, name in enumerate(names)
        }
        settings: dict[str, Any] = {"dtype": args.dtype, "adapters": adapters}
        with Runtime(args.model, num_pages=20_000, adapter_memory="8GB", **settings) as runtime:
            cases: list[tuple[str, int, int, list[str]]] = [
                ("prefill", 1, 1, names[:1]),
                ("decode 1", 1, NUM_TOKENS, names[:1]),
                ("decode 8", 8, NUM_TOKENS, names[:1] * 8),
                ("decode 32", 32, NUM_TOKENS, names[:1] * 32),
                ("mixed 32", 32, NUM_TOKENS, names * 4),
            ]
            for label, count, tokens, own in cases:
                length = PROMPT_TOKENS if tokens == 1 else 16
                prompts = [
                    [(7 * row + 3 * place) % 1000 for place in range(length)]
                    for row in range(count)
                ]
                pairs = [
                    (
                        seconds(runtime, prompts, own, tokens),
                        seconds(runtime, prompts, [""] * count, tokens),
                    )
                    for _ in range(args.rounds + 1)
                ][1:]
                ratio = median(with_adapter / alone for with_adapter, alone in pairs)
                base = median(alone for _, alone in pairs)
                rows.append([label, f"{1e3 * base:.1f}", f"{100 * (ratio - 1):+.1f} %"])
    print_table(args, ["case", "alone, ms of CPU time", "with adapters"], rows)


if __name__ == "__main__":
    main()
