"""What each kernel has to compute, from its definition and in float64, on the CPU.

Written a second time on purpose: nothing here is shared with the kernels or their twins. Arguments
are what was given to the kernel, wherever it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def double(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| over |expected| of the worst row, features last; inf where a NaN is."""
    found, wanted = double(out).flatten(0, -2), double(expected).flatten(0, -2)
    if not len(found):
        return 0.0
    if found.isnan().any() or wanted.isnan().any():
        return math.inf
    size = wanted.norm(dim=-1)
    floor = wanted.norm() / math.sqrt(len(wanted)) * 1e-3 + 1e-30  # rows of almost nothing
    return float(((found - wanted).norm(dim=-1) / size.clamp(min=float(floor))).max())


def lse_error(lse: Tensor, expected: Tensor) -> float:
    """The largest difference of base-2 logarithms; -inf has to be -inf."""
    found, wanted = double(lse), double(expected)
    if found.isnan().any() or bool(((found == -math.inf) != (wanted == -math.inf)).any()):
        return math.inf
    some = wanted != -math.inf
    return float((found[some] - wanted[some]).abs().max()) if bool(some.any()) else 0.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = double(x)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * double(weight)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = double(gate_up).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """heads [T, H, D] with the pairs (2i, 2i + 1) turned."""
    cos, sin = double(cos_sin)[positions.cpu()].chunk(2, -1)
    even, odd = double(heads)[..., ::2], double(heads)[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attention(
    q: Tensor,  # [T, Hq, D]
    k_slots: Tensor,  # [num_slots, Hkv, D]
    v_slots: Tensor,
    slots: Sequence[Sequence[int]],  # of each row's keys
    num_new: Sequence[int],  # queries of each row, end to end
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], base 2; 0 and -inf without keys."""
    q, k_slots, v_slots = double(q), k_slots.detach().cpu(), v_slots.detach().cpu()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    first = 0
    for places, count in zip(slots, num_new, strict=True):
        mine = slice(first, first + count)
        first += count
        if places and count:
            index = torch.as_tensor(places)
            k, v = k_slots[index].double(), v_slots[index].double()
            out[mine], lse[mine] = _attend(q[mine], k, v, scale, causal=causal)
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Of one row: q [N, Hq, D] against k, v [K, Hkv, D]; the queries are its last tokens."""
    num_new, num_keys = len(q), len(k)
    heads = q.unflatten(1, (k.shape[1], -1))  # [N, Hkv, G, D]
    scores = torch.einsum("nhgd,khd->hgnk", heads, k) * scale
    if causal:
        last = torch.arange(num_new) + num_keys - num_new
        scores = scores.masked_fill(torch.arange(num_keys) > last[:, None], -math.inf)
    lse = scores.logsumexp(-1)  # [Hkv, G, N]
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    mixed = torch.einsum("hgnk,khd->nhgd", weights, v)
    return mixed.flatten(1, 2), lse.permute(2, 0, 1).flatten(1) / math.log(2)


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token of one row [V]: what ties with the last one kept is kept, too."""
    scaled = (double(logits) - double(logits).max()) / temperature
    if min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(min_p), -math.inf)
    if 0 < top_k < len(scaled):
        least = scaled.sort(descending=True).values[top_k - 1]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if top_p < 1:
        probs = scaled.softmax(-1)
        ordered = probs.sort(descending=True).values
        num_kept = int((ordered.cumsum(0) < top_p).sum()) + 1
        least = ordered[min(num_kept, len(ordered)) - 1]
        scaled = scaled.masked_fill(probs < least, -math.inf)
    mass = scaled.softmax(-1).cumsum(0)
    point = torch.tensor(uniform * float(mass[-1]), dtype=torch.float64)
    return min(int(torch.searchsorted(mass, point, right=True)), len(scaled) - 1)


def drawable(logits: Tensor, params: Sequence[float], uniform: float, slack: float) -> set[int]:
    """Tokens that may be drawn with params (temperature, top_k, top_p, min_p) when sums and the
    number are off by `slack`: one, but next to a border."""
    temperature, top_k, top_p, min_p = params
    found = set()
    for p in (top_p, *((top_p * (1 - slack), top_p * (1 + slack)) if top_p < 1 else ())):
        for least in (min_p, min_p * (1 - slack), min_p * (1 + slack)) if min_p else (0.0,):
            for u in (uniform - slack, uniform, uniform + slack):
                place = min(max(u, 0.0), 1 - 1e-16)
                found.add(draw(logits, temperature, int(top_k), p, least, place))
    return found
