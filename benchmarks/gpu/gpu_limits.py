"""The least time that a step can take on a card whose two ceilings are known; plain arithmetic.

    products   2 FLOPs for each matrix element and token, over the rate of a large bf16 product
    memory     each weight once a step, K and V once for all that read them together, over the
               bandwidth of a large copy, bytes read and written

The larger of the two counts for the matrices, and the larger of the two for the attention; both
come one after the other. Norms, activations, softmax and embeddings cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUM_STATES = 5  # outputs of a row that a merge moves: two written before, two read, one written
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Ceilings:
    """What the card did when it was measured."""

    bandwidth: float  # bytes a second
    flops: float  # a second


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder of the Llama family in 16 bits."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    number_bytes: int = 2

    @staticmethod
    def of(fields: dict[str, Any]) -> Shape:
        """From the fields of a config.json."""
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        return Shape(
            num_layers=fields["num_hidden_layers"],
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=fields["num_key_value_heads"],
            head_dim=fields.get("head_dim") or hidden // heads,
            intermediate=fields["intermediate_size"],
            vocab=fields["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        attended = self.num_heads * self.head_dim
        qkv = attended + 2 * self.num_kv_heads * self.head_dim
        each = self.hidden * (qkv + attended + 3 * self.intermediate)
        return self.num_layers * each

    @property
    def head_weights(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Read in every step."""
        return self.number_bytes * (self.layer_weights + self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """K and V of a token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.number_bytes

    @property
    def score_flops(self) -> int:
        """A token's attention to one key, all layers: the score and the weighted sum."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def merge_bytes(self) -> int:
        """Moved to merge two attention states of a token, all layers."""
        state = self.head_dim * self.number_bytes + FLOAT_BYTES
        return NUM_STATES * self.num_layers * self.num_heads * state


def attention_s(shape: Shape, ceilings: Ceilings, num_read: float, num_attended: float) -> float:
    """num_read: keys that come from memory. num_attended: pairs of a query and a key."""
    memory = num_read * shape.kv_bytes / ceilings.bandwidth
    return max(memory, num_attended * shape.score_flops / ceilings.flops)


def flat_s(shape: Shape, ceilings: Ceilings, num_rows: int, num_keys: float) -> float:
    """Attention of rows of one token to `num_keys` each, every row on its own."""
    total = num_rows * num_keys
    return attention_s(shape, ceilings, total, total)


def cascade_s(shape: Shape, ceilings: Ceilings, num_rows: int, shared: int, own: float) -> float:
    """The same, `shared` keys read once for all rows, and the two states of each row merged."""
    together = attention_s(shape, ceilings, shared, num_rows * shared)
    apart = flat_s(shape, ceilings, num_rows, own)
    return together + apart + num_rows * shape.merge_bytes / ceilings.bandwidth


def matrices_s(shape: Shape, ceilings: Ceilings, num_tokens: int, num_logits: int) -> float:
    """All products of a step."""
    flops = 2 * (shape.layer_weights * num_tokens + shape.head_weights * num_logits)
    return max(shape.weight_bytes / ceilings.bandwidth, flops / ceilings.flops)


def decode_s(shape: Shape, ceilings: Ceilings, num_rows: int, num_keys: float) -> float:
    """A step of one token for each of `num_rows`, of `num_keys` each on average."""
    matrices = matrices_s(shape, ceilings, num_rows, num_rows)
    return matrices + flat_s(shape, ceilings, num_rows, num_keys)


def prefill_s(shape: Shape, ceilings: Ceilings, num_new: int, num_cached: int = 0) -> float:
    """`num_new` tokens behind `num_cached`, and the logits of the last one."""
    pairs = num_new * num_cached + num_new * (num_new + 1) / 2
    attention = attention_s(shape, ceilings, num_new + num_cached, pairs)
    return matrices_s(shape, ceilings, num_new, 1) + attention


def serving_s(shape: Shape, ceilings: Ceilings, requests: Sequence[tuple[int, int]]) -> float:
    """Requests of (prompt, new) tokens with nothing in common, sent at once: all prompts at the
    rate of products, then a step for all that still go on."""
    total = 0.0
    for prompt, _ in requests:
        flops = 2 * (shape.layer_weights * prompt + shape.head_weights)
        flops += shape.score_flops * prompt * (prompt + 1) / 2
        total += flops / ceilings.flops
    for step in range(1, max(new for _, new in requests)):
        lengths = [prompt + step for prompt, new in requests if new > step]
        total += decode_s(shape, ceilings, len(lengths), sum(lengths) / len(lengths))
    return total


def beams_s(
    shape: Shape, ceilings: Ceilings, num_prompts: int, width: int, prompt: int, new: int
) -> float:
    """Beam searches over different prompts, all at once; the beams of one are taken to have all
    but their last token in common."""
    total = num_prompts * prefill_s(shape, Ceilings(float("inf"), ceilings.flops), prompt)
    num_rows = num_prompts * width
    for step in range(1, new):
        length = prompt + step
        matrices = matrices_s(shape, ceilings, num_rows, num_rows)
        num_read = num_prompts * (length + width - 1)
        total += matrices + attention_s(shape, ceilings, num_read, num_rows * length)
    return total
