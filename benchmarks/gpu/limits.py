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

from harness.shapes import Shape

NUM_STATES = 5  # outputs of a row that a merge moves: two written before, two read, one written
FLOAT_BYTES, NUMBER_BYTES = 4, 2  # of a sum; of weights, K and V


@dataclass(frozen=True)
class Ceilings:
    """What the card did when it was measured."""

    bandwidth: float  # bytes a second
    flops: float  # a second


H200 = Ceilings(4.3e12, 790e12)  # as measured on one


def weight_bytes(shape: Shape) -> int:
    """Read in every step."""
    return NUMBER_BYTES * (shape.layer_weights + shape.head_weights)


def kv_bytes(shape: Shape) -> int:
    """K and V of a token, all layers."""
    return NUMBER_BYTES * shape.kv_elements


def attention_s(shape: Shape, ceilings: Ceilings, num_read: float, num_attended: float) -> float:
    """num_read: keys that come from memory. num_attended: pairs of a query and a key."""
    memory = num_read * kv_bytes(shape) / ceilings.bandwidth
    return max(memory, num_attended * shape.score_flops / ceilings.flops)


def flat_s(shape: Shape, ceilings: Ceilings, num_rows: int, num_keys: float) -> float:
    """Attention of rows of one token to `num_keys` each, every row on its own."""
    return attention_s(shape, ceilings, num_rows * num_keys, num_rows * num_keys)


def cascade_s(shape: Shape, ceilings: Ceilings, num_rows: int, shared: int, own: float) -> float:
    """The same, `shared` keys read once for all rows, and the two states of each row merged."""
    state = shape.head_dim * NUMBER_BYTES + FLOAT_BYTES
    merged = num_rows * NUM_STATES * shape.num_layers * shape.num_heads * state
    together = attention_s(shape, ceilings, shared, num_rows * shared)
    return together + flat_s(shape, ceilings, num_rows, own) + merged / ceilings.bandwidth


def matrices_s(shape: Shape, ceilings: Ceilings, num_tokens: int, num_logits: int) -> float:
    """All products of a step."""
    flops = 2 * (shape.layer_weights * num_tokens + shape.head_weights * num_logits)
    return max(weight_bytes(shape) / ceilings.bandwidth, flops / ceilings.flops)


def decode_s(shape: Shape, ceilings: Ceilings, num_rows: int, num_keys: float) -> float:
    """A step of one token for each of `num_rows`, of `num_keys` each on average."""
    matrices = matrices_s(shape, ceilings, num_rows, num_rows)
    return matrices + flat_s(shape, ceilings, num_rows, num_keys)


def prefill_s(shape: Shape, ceilings: Ceilings, num_new: int, num_cached: int = 0) -> float:
    """`num_new` tokens after `num_cached`, and the logits of the last one."""
    pairs = num_new * num_cached + num_new * (num_new + 1) / 2
    attention = attention_s(shape, ceilings, num_new + num_cached, pairs)
    return matrices_s(shape, ceilings, num_new, 1) + attention


def serving_s(shape: Shape, ceilings: Ceilings, requests: Sequence[tuple[int, int]]) -> float:
    """Requests of (prompt, new) tokens with nothing in common, sent at once: all prompts at the
    rate of products, then a step for all that still go on."""
    products = Ceilings(float("inf"), ceilings.flops)
    total = sum(prefill_s(shape, products, prompt) for prompt, _ in requests)
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
        num_read = num_prompts * (length + width - 1)
        total += matrices_s(shape, ceilings, num_rows, num_rows)
        total += attention_s(shape, ceilings, num_read, num_rows * length)
    return total
