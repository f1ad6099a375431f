"""Shapes of decoders, what their parts cost, and checkpoints with random weights.

Costs do not depend on the weights' values, only on their shapes; so that greedy tokens are decided
by more than rounding, the weights are drawn wider than a new model's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
DEMO = Path(__file__).parents[2] / "radixserve" / "models" / "demo"
DEMO_VOCAB = 4_096  # of its tokenizer
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder. Costs of mixtures of experts are those of one token's experts."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int = 4_096
    family: str = "llama"
    window: int | None = None  # of Gemma 3's layers but for every sixth, of every second of gpt-oss
    num_experts: int = 0
    top_k: int = 1  # experts of a token, whose features `intermediate` counts together

    @staticmethod
    def of(config: dict[str, Any]) -> Shape:
        """From the fields of a config.json."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            num_layers=config["num_hidden_layers"],
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of one layer's products; those that read the same input as one."""
        attended = self.num_heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attended),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.num_layers * sum(n * k for n, k in self.projections.values())

    def weights_read(self, num_tokens: int) -> float:
        """Elements of the matrices of all layers that so many tokens need together, where each
        chooses its experts at random."""
        if not self.num_experts:
            return self.layer_weights
        distinct = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)
        each = self.num_layers * 3 * self.hidden * self.intermediate / self.top_k
        return self.layer_weights + each * (distinct - self.top_k)

    @property
    def head_weights(self) -> int:
        """Elements of the matrix that makes logits; the embedding has as many."""
        return self.vocab * self.hidden

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def score_flops(self) -> int:
        """FLOPs of one token on one key, all layers: the score and the weighted sum."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, hidden {self.hidden}, {self.num_heads} query and"
            f" {self.num_kv_heads} KV heads of {self.head_dim}, intermediate {self.intermediate},"
            f" vocabulary {self.vocab:,}"
            + (f", {self.family}: {self.top_k} of {self.num_experts} experts" * (self.top_k > 1))
        )


SHAPES = {
    "tiny": Shape(4, 256, 8, 2, 64, 688, 4_096),
    "small": Shape(12, 768, 12, 4, 128, 3_072, 8_192),
    "gemma3": Shape(  # 270M with fewer layers, words
        *(12, 640, 4, 1, 256, 2_048, 16_384), family="gemma3_text", window=512
    ),
    "qwen3-moe": Shape(
        *(4, 512, 8, 2, 64, 8 * 192, 4_096), family="qwen3_moe", num_experts=64, top_k=8
    ),
    "gpt-oss": Shape(
        *(4, 512, 8, 2, 64, 4 * 512, 4_096),
        family="gpt_oss",
        window=128,
        num_experts=32,
        top_k=4,
    ),
}


def save_checkpoint(shape: Shape, dtype: str, folder: Path, *, has_tokenizer: bool = False) -> None:
    """Write config.json, generation_config.json and model.safetensors; on demand also the demo
    model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    each = shape.intermediate // shape.top_k
    own: dict[str, Any] = {} if shape.window is None else {"sliding_window": shape.window}
    if shape.num_experts:
        count = "num_experts" if shape.family == "qwen3_moe" else "num_local_experts"
        own |= {count: shape.num_experts, "num_experts_per_tok": shape.top_k}
    if shape.family == "qwen3_moe":
        own |= {"moe_intermediate_size": each, "norm_topk_prob": True}
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=each,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=0.05,
        tie_word_embeddings=shape.family == "gemma3_text",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **own,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES if has_tokenizer else ():
        shutil.copy(DEMO / name, folder)
