"""GGUF files of Qwen 3.5 (architecture qwen35) with random weights, to measure with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_PERIOD = 4  # every such layer has attention, the others a gated delta net
_RAW = {  # of types that the gguf package cannot make: offsets of float16 in a block, their sizes
    "Q4_K": {0: 1.2e-4, 2: 9e-4},
    "Q6_K": {208: 1.6e-5},
}


@dataclass(frozen=True)
class Qwen35Shape:
    num_layers: int = 20
    hidden: int = 1_536
    intermediate: int = 4_608
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 256
    linear_heads: int = 16  # as many of keys as of values
    linear_dim: int = 128
    vocab: int = 248_320
    max_positions: int = 4_096

    @property
    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns; the embedding is the head, too."""
        yield "token_embd", self.vocab, self.hidden
        inner, attended = self.linear_heads * self.linear_dim, self.num_heads * self.head_dim
        for layer in range(self.num_layers):
            stem = f"blk.{layer}"
            yield f"{stem}.ffn_gate", self.intermediate, self.hidden
            yield f"{stem}.ffn_up", self.intermediate, self.hidden
            yield f"{stem}.ffn_down", self.hidden, self.intermediate
            if self.attends(layer):
                yield f"{stem}.attn_q", 2 * attended, self.hidden  # with a gate of each head
                yield f"{stem}.attn_k", self.num_kv_heads * self.head_dim, self.hidden
                yield f"{stem}.attn_v", self.num_kv_heads * self.head_dim, self.hidden
                yield f"{stem}.attn_output", self.hidden, attended
            else:
                yield f"{stem}.attn_qkv", 3 * inner, self.hidden
                yield f"{stem}.attn_gate", inner, self.hidden
                yield f"{stem}.ssm_alpha", self.linear_heads, self.hidden
                yield f"{stem}.ssm_beta", self.linear_heads, self.hidden
                yield f"{stem}.ssm_out", self.hidden, inner

    @property
    def num_parameters(self) -> int:
        return sum(rows * columns for _, rows, columns in self.matrices)

    def attends(self, layer: int) -> bool:
        return (layer + 1) % _PERIOD == 0


def write_random_qwen35(path: Path, shape: Qwen35Shape, kind: str, head_kind: str) -> None:
    """Write a file with matrices of the type `kind`, its embedding of `head_kind`; no tokenizer."""
    writer = gguf.GGUFWriter(path, "qwen35")
    _add_fields(writer, shape)
    rng = np.random.default_rng(0)
    for name, rows, columns in shape.matrices:
        chosen = head_kind if name == "token_embd" else kind
        raw = _random_matrix(rng, rows, columns, chosen)
        raw_dtype = gguf.GGMLQuantizationType[chosen]
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=raw_dtype)
    for name, numbers in _vectors(rng, shape):
        writer.add_tensor(name, np.ascontiguousarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_fields(writer: gguf.GGUFWriter, shape: Qwen35Shape) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.head_dim // 4)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_uint32("qwen35.ssm.conv_kernel", 4)
    writer.add_uint32("qwen35.ssm.state_size", shape.linear_dim)
    writer.add_uint32("qwen35.ssm.group_count", shape.linear_heads)
    writer.add_uint32("qwen35.ssm.time_step_rank", shape.linear_heads)
    writer.add_uint32("qwen35.ssm.inner_size", shape.linear_heads * shape.linear_dim)
    writer.add_uint32("qwen35.full_attention_interval", _PERIOD)
    writer.add_uint32("qwen35.vocab_size", shape.vocab)
    writer.add_tokenizer_model("no_vocab")


def _vectors(
    rng: np.random.Generator, shape: Qwen35Shape
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    yield "output_norm.weight", np.ones(shape.hidden)
    heads = shape.linear_heads
    for layer in range(shape.num_layers):
        stem = f"blk.{layer}"
        yield f"{stem}.attn_norm.weight", np.ones(shape.hidden)
        yield f"{stem}.post_attention_norm.weight", np.ones(shape.hidden)
        if shape.attends(layer):
            yield f"{stem}.attn_q_norm.weight", np.ones(shape.head_dim)
            yield f"{stem}.attn_k_norm.weight", np.ones(shape.head_dim)
        else:
            channels = 3 * heads * shape.linear_dim
            yield f"{stem}.ssm_conv1d.weight", rng.normal(0, 0.3, (channels, 4))
            yield f"{stem}.ssm_a", -rng.uniform(0.5, 8, heads)
            yield f"{stem}.ssm_dt.bias", rng.normal(0, 1, heads)
            yield f"{stem}.ssm_norm.weight", np.ones(shape.linear_dim)


def _random_matrix(
    rng: np.random.Generator, rows: int, columns: int, kind: str
) -> NDArray[np.uint8]:
    """[rows, bytes of a row]: numbers of about 0.02, as a file holds them."""
    quantized = gguf.GGMLQuantizationType[kind]
    if kind not in _RAW:
        numbers = rng.standard_normal((rows, columns), np.float32) * 0.02
        return gguf.quants.quantize(numbers, quantized)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantized]
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), np.uint8)
    for offset, scale in _RAW[kind].items():
        values = rng.uniform(0.8, 1.2, raw.shape[:2]) * scale
        raw[..., offset : offset + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
