"""Models with recurrent layers, natively and in transformers' code: CPU seconds at equal width.

    python benchmarks/engine/hybrids.py [--families qwen3_5_text,lfm2] [--width 512]
        [--rounds 5] [--dtype float32] [--cousins]

Each family, a name of LAYERS, has random weights and eight layers. Both ways take turns in each
round; the least CPU time of the process counts, with one thread, so that other work on the machine
matters little. With --cousins the other way is a dense model of a native family, of the same
width and number of layers: the column of tokens per second in docs/models.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from radixserve import Runtime, SamplingParams

sys.path.append(str(Path(__file__).parents[1]))
from harness.machine import describe_machine
from harness.report import format_settings

IMPLEMENTATIONS = ("native", "transformers")


MAMBA, ATTENTION = "linear_attention", "full_attention"
LAYERS: dict[str, list[str]] = {  # as many of each kind as in the published models
    "qwen3_5_text": 2 * [*3 * ["linear_attention"], ATTENTION],
    "qwen3_5_moe_text": 2 * [*3 * ["linear_attention"], ATTENTION],
    "lfm2": ["conv", "conv", ATTENTION, "conv", "conv", ATTENTION, "conv", ATTENTION],
    "lfm2_moe": [*4 * ["conv"], ATTENTION, "conv", "conv", ATTENTION],
    "granitemoehybrid": [*5 * [MAMBA], ATTENTION, MAMBA, MAMBA],
    "granitemoehybrid dense": [*5 * [MAMBA], ATTENTION, MAMBA, MAMBA],
    "nemotron_h": [MAMBA, "mlp", MAMBA, "mlp", MAMBA, ATTENTION, MAMBA, "mlp"],
    "falcon_h1": 8 * ["hybrid"],
    "gemma4_text": 2 * [*3 * ["sliding_attention"], ATTENTION],
    "gemma4_text moe": 2 * [*3 * ["sliding_attention"], ATTENTION],
}
COUSINS = {
    "gemma4_text": "gemma3_text",
    "granitemoehybrid": "granite",
}  # of a first word; else qwen3


def save_model(family: str, width: int, folder: Path, initializer_range: float = 0.02) -> None:
    heads = 2 * width // 64  # of state spaces
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "moe_intermediate_size": width // 2,
        "shared_expert_intermediate_size": width // 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "layers_block_type" if family == "nemotron_h" else "layer_types": LAYERS.get(family),
        "global_head_dim": 128,
        "num_kv_shared_layers": 0 if family.endswith("moe") else 4,
        "hidden_size_per_layer_input": 0 if family.endswith("moe") else 64,
        "vocab_size_per_layer_input": 4096,
        "enable_moe_block": family.endswith("moe"),
        "top_k_experts": 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 256),
        "head_dim": 64,
        "linear_num_key_heads": max(1, width // 128),
        "linear_num_value_heads": width // 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mamba_n_heads": heads,
        "mamba_d_head": 64,
        "mamba_d_ssm": 64 * heads,
        "mamba_num_heads": heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 1,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "shared_intermediate_size": 3 * width if family.endswith("dense") else width // 2,
        "num_local_experts": 0 if family.endswith("dense") else 16,
        "num_dense_layers": 2,
        "vocab_size": 4096,
        "initializer_range": initializer_range,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family.split()[0])
    if config.model_type == "granitemoehybrid":
        sizes["intermediate_size"] = width // 2  # of an expert
    if config.model_type == "falcon_h1":
        del sizes["layer_types"]  # all its layers are alike
    if LAYERS.get(family) is None:
        del sizes["layer_types"]  # of a dense model
    own = {*vars(config), "global_head_dim"} if "gemma4" in family else ()
    known = {name: value for name, value in sizes.items() if name in own or hasattr(config, name)}
    config = type(config)(**known)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def measure(folder: Path, implementation: str, dtype: str) -> dict[str, float]:
    """CPU seconds by kind of work."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 4000, (12, 1024)).tolist()
    seconds: dict[str, float] = {}
    with Runtime(
        str(folder), model_impl=implementation, dtype=dtype, num_pages=16_384, cache="off"
    ) as rt:

        def run(name: str, work: list[list[int]], num_tokens: int) -> None:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            start = time.process_time()
            rt.generate(work, params)
            seconds[name] = time.process_time() - start

        run("warm-up", [prompts[0][:64]], 4)
        run("prefill of 1,024", [prompts[1]], 1)
        run("decode of 64", [prompts[2][:16]], 65)
        run("8 rows, 32 each", [prompt[:16] for prompt in prompts[3:11]], 33)
    del seconds["warm-up"]
    return seconds


def print_beside_cousin(family: str, width: int, rounds: int, dtype: str) -> None:
    """A row: tokens a CPU second of the family, and their ratio to its cousin's."""
    cousin = COUSINS.get(family.split()[0], "qwen3")
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for each in (family, cousin):
            save_model(each, width, Path(name) / each)
        for _ in range(rounds):
            for each in (family, cousin):
                seconds = measure(Path(name) / each, "native", dtype)
                kept = best.setdefault(each, seconds)
                best[each] = {key: min(kept[key], seconds[key]) for key in seconds}
    cells = []
    for key, num_tokens in (("prefill of 1,024", 1024), ("decode of 64", 64)):
        own, other = best[family][key], best[cousin][key]
        cells.append(f"{num_tokens / own:,.0f} ({other / own:.2f} of {cousin})")
    print(f"| {family} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default=",".join(LAYERS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cousins", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print(format_settings(describe_machine(("torch", "transformers"))), flush=True)
    for family in args.families.split(","):
        if args.cousins:
            print_beside_cousin(family, args.width, args.rounds, args.dtype)
            continue
        with tempfile.TemporaryDirectory() as name:
            save_model(family, args.width, Path(name))
            best: dict[str, dict[str, float]] = {}
            for _ in range(args.rounds):
                for implementation in IMPLEMENTATIONS:
                    found = measure(Path(name), implementation, args.dtype)
                    kept = best.setdefault(implementation, found)
                    best[implementation] = {key: min(kept[key], found[key]) for key in found}
        for key, native in best["native"].items():
            wrapped = best["transformers"][key]
            print(
                f"{family:22} {args.dtype:9} {key:18} native {native:.3f} s, "
                f"transformers {wrapped:.3f} s: {wrapped / native:.1f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
