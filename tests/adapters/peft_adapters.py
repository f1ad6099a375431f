"""Adapters as PEFT saves them, made by hand with seeded weights, and what PEFT computes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of Phi-3


def make_adapter(
    folder: Path,
    model: Any,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = TARGETS,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter of a transformers model's linear layers; `fields`: more of its config."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets or not isinstance(module, torch.nn.Linear):
            continue
        own = next((r for end, r in (rank_pattern or {}).items() if name.endswith(end)), rank)
        a = torch.randn(own, module.in_features, generator=rng) / math.sqrt(module.in_features)
        b = 0.3 * torch.randn(module.out_features, own, generator=rng)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    assert tensors, "the model has none of the targets"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": rank_pattern or {},
        "alpha_pattern": alpha_pattern or {},
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def applied(model: Any, folder: Path, start: int = 0) -> Iterator[None]:
    """The model computes positions from `start` on with an adapter, without a cache."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, handles = load_file(folder / "adapter_model.safetensors"), []
    for name, module in model.named_modules():
        key = f"base_model.model.{name}"
        if f"{key}.lora_A.weight" not in tensors:
            continue
        a, b = (tensors[f"{key}.lora_{letter}.weight"] for letter in "AB")
        rank, alphas = a.shape[0], config["alpha_pattern"].items()
        alpha = next((own for end, own in alphas if name.endswith(end)), config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

        def add(_: Any, inputs: Any, out: Any, a: Any = a, b: Any = b, scale: float = scale) -> Any:
            more = scale * (inputs[0] @ a.T) @ b.T
            more[..., :start, :] = 0
            return out + more

        handles.append(module.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, each from a pass over the whole sequence."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1).max()))
    return tokens[len(prompt) :], logprobs
