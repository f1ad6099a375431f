"""Finds the attention features of each layer of a model in transformers' code by running it once.

The probe is registered under its own name in transformers' registries of attention functions and
masks. It gets each layer's mask as a function of positions, and tests which positions a query may
see. The arguments of the attention function show the layer's other features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionFeatures
from radixserve.errors import ModelNotSupported, RadixServeError

PROBE_NAME = "radixserve-probe"  # in transformers' registries
NUM_TOKENS = 4  # of the run
REFUSED_ARGUMENTS = {  # what a model may hand to its attention, and what that means
    "position_bias": "a position bias added to attention scores",
    "alibi": "ALiBi position biases",
    "head_mask": "masked attention heads",
}


@dataclass(slots=True)
class ProbedLayers:
    """The results of the probe: heads and features by layer."""

    architecture: str
    max_positions: int
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # Hq, Hkv, D
    features: dict[int, AttentionFeatures] = field(default_factory=dict)
    key_sources: dict[int, int] = field(default_factory=dict)  # the layer whose keys and values a
    # layer uses: an earlier one, or itself
    _keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # and values, by layer:
    # while they live their addresses tell them apart

    def note(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> None:
        """Raise ModelNotSupported if the layer wants what no backend has."""
        wanted = [
            what for name, what in REFUSED_ARGUMENTS.items() if arguments.get(name) is not None
        ]
        window, chunk = self._span(mask, arguments, wanted)
        if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            wanted.append("attention that is not causal")
        layer: int | None = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            wanted.append("attention layers without a number of their own")
        if key.shape[2] != query.shape[2]:
            wanted.append(f"{key.shape[2]} keys for {query.shape[2]} tokens")
        if wanted or layer is None:
            raise ModelNotSupported(f"{self.architecture} needs {', '.join(dict.fromkeys(wanted))}")
        sinks = arguments.get("s_aux")
        if sinks is not None:
            sinks = sinks.detach().float().flatten().contiguous()
        dim = max(key.shape[-1], value.shape[-1])
        self.shapes[layer] = (query.shape[1], key.shape[1], dim)
        self.features[layer] = AttentionFeatures(
            sliding_window=window,
            attention_chunk_size=chunk,
            logits_soft_cap=arguments.get("softcap") or None,
            sinks=sinks,
        )
        self._keys[layer] = key, value
        for source, (k, v) in self._keys.items():
            is_same = key.data_ptr() == k.data_ptr() and value.data_ptr() == v.data_ptr()
            if is_same and self.features[source].span == self.features[layer].span:
                self.key_sources.setdefault(layer, source)

    def forget_keys(self) -> None:
        self._keys.clear()

    def own_layers(self) -> list[int]:
        """Layers with keys and values of their own, ascending."""
        return sorted(layer for layer, source in self.key_sources.items() if layer == source)

    def largest_shape(self) -> tuple[int, int, int]:
        """Hq, Hkv, D into which the heads of every layer fit: key heads copied, values widened.

        Raises ModelNotSupported where they do not.
        """
        shapes = set(self.shapes.values())
        query_heads, kv_heads, dims = zip(*shapes, strict=True)
        most = max(kv_heads)
        fits = all(most % heads == 0 for heads in kv_heads) and query_heads[0] % most == 0
        if len(set(query_heads)) > 1 or not fits:
            raise ModelNotSupported(
                f"{self.architecture} has layers of different head shapes: {shapes}"
            )
        return query_heads[0], most, max(dims)

    def _span(
        self, mask: Any, arguments: dict[str, Any], wanted: list[str]
    ) -> tuple[int | None, int | None]:
        """(window, chunk) of a layer; what cannot be run is added to `wanted`."""
        if mask is None:  # the model makes none: what it tells the function holds
            window = arguments.get("sliding_window")
            return (window if window and window < self.max_positions else None), None
        span = getattr(mask, "radixserve_span", None)
        if span is None:
            wanted.append("an attention mask of its own")
            return None, None
        if isinstance(span, str):
            wanted.append(span)
            return None, None
        window, chunk = (size if size and size < self.max_positions else None for size in span)
        return window, chunk


def span_of_mask(
    mask_function: Callable[..., Tensor], size: int | None, device: Any = None
) -> tuple[int, int] | str:
    """(window, chunk), 0 for none, of a mask given as a function of positions, or what it is else.

    size: of its window or chunk, as transformers tells it. device: where the function computes.
    """
    some = size or 16
    queries = sorted({0, 1, *(n * some + d for n in (1, 2, 3) for d in (-1, 0, 1))})
    q = torch.tensor([position for position in queries if position >= 0], device=device)[:, None]
    k = torch.arange(int(q.max()) + 3, device=device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen = torch.as_tensor(mask_function(zero, zero, q, k)).expand(len(q), k.shape[1])
    causal = k <= q
    if torch.equal(seen, causal):
        return 0, 0
    if size and torch.equal(seen, causal & (k > q - size)):
        return size, 0
    if size and torch.equal(seen, causal & (k // size == q // size)):
        return 0, size
    if bool((seen & ~causal).any()):
        return "attention that is not causal"
    return "an attention mask of its own"


def _probe_mask(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32,
    device: Any = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' mask interface: zeros [1, 1, q, k] that carry their rule."""
    del kwargs
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=dtype, device=device)
    mask.radixserve_span = span_of_mask(mask_function, local_size, device)  # type: ignore[attr-defined]
    return mask


def _probe_attention(
    module: Any,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: notes its arguments, and attends causally."""
    module.radixserve_slot.probed.note(module, query, key, value, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the probe known to transformers; the same functions each time."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def can_choose_logits(model: Any) -> bool:
    """Whether the model's `forward` can compute logits for selected tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def probe(
    model: Any, probed: ProbedLayers, num_layers: int, recurrent: list[int], device: torch.device
) -> None:
    """Fill `probed` by one run of the model, whose slot holds it. `recurrent`: layers that keep a
    state, beside their attention or without any.

    Raises ModelNotSupported if the model cannot be run so or its layers do neither.
    """
    architecture = probed.architecture
    tokens = torch.arange(NUM_TOKENS, device=device)[None]
    # Chosen as in every step: a model may cut its masks where it is free to choose.
    wanted = {"logits_to_keep": tokens[0]} if can_choose_logits(model) else {}
    try:
        model.set_attn_implementation(PROBE_NAME)
        model(input_ids=tokens, position_ids=tokens, use_cache=False, **wanted)
    except RadixServeError:
        raise
    except Exception as error:
        raise ModelNotSupported(
            f"{architecture} cannot run with another attention function: {error}"
        ) from error
    finally:
        probed.forget_keys()
    if not probed.shapes and recurrent:
        raise ModelNotSupported(f"{architecture} has recurrent layers only, none with attention")
    if not probed.shapes:
        raise ModelNotSupported(f"{architecture} does not use transformers' attention interface")
    if not recurrent and sorted(probed.shapes) != list(range(num_layers)):
        raise ModelNotSupported(
            f"{architecture} attends in layers {sorted(probed.shapes)} of {num_layers}; "
            "linear attention and state space layers cannot be run"
        )
