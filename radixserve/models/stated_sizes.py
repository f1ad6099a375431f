"""Counts and sizes that a config states, compared with the tensors before anything is built.

A layer has a tensor at least, and no size exceeds the largest dimension of a tensor, or a million
where all tensors are small. What passes costs little to compare in full: see `check_tensors`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from radixserve.errors import ModelNotSupported, RadixServeError

Shapes = Mapping[str, tuple[int, ...]]  # of all tensors, by name
_LAYERS = re.compile(r"num_hidden_layers|num_layers|n_layers?|(?:en|de)coder_layers|block_count")
_SIZES = re.compile(
    r"vocab_size|hidden_size|d_model|n_embd|embed_dim|embedding_length|head_dim|"
    r"(?:.*_)?(?:intermediate_size|ffn_dim|d_ff|n_inner|feed_forward_length)|"
    r"(?:.*_)?(?:heads|n_head|head_count|head_count_kv|key_length|value_length)|"
    r"(?:.*_)?(?:experts|expert_count|expert_used_count|experts_per_tok)|(?:.*_)?lora_rank|"
    r"rope\.dimension_count|ssm\..*|shortconv\..*|mamba_(?:d|n)_\w+|linear_\w+_(?:dim|heads)"
)
_LENGTHS = re.compile(r"max_position_embeddings|n_positions|context_length")
_NEEDED = re.compile(
    r"num_hidden_layers|vocab_size|hidden_size|num_attention_heads|n_layer|n_embd|n_head|"
    r"max_position_embeddings|block_count|embedding_length|context_length"
)
_SMALL = 1 << 20  # a size that may be of no tensor: many configs keep defaults that they do not use
_MAX_LENGTH = (1 << 31) - 1  # positions are numbers of 32 bits
_MAX_LAYERS = 10_000  # where there are no tensors
_PACKED = 8  # numbers of a quantised tensor that may be in one of its elements


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn an exception that odd fields or tensors cause into ModelNotSupported: `what` and it."""
    try:
        yield
    except (RadixServeError, MemoryError, torch.OutOfMemoryError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelNotSupported(f"{what}: {' '.join(repr(error).split())[:300]}") from error


def check_fields(where: object, fields: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise ModelNotSupported for a count or size in a config, or in a part of it, that no model
    with these tensors has. Without tensors only impossible numbers are refused."""
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    layers = len(shapes) if shapes else _MAX_LAYERS
    of_layers = f"there are {layers:,} tensors" if shapes else f"at most {layers:,} are possible"
    limits = (
        (_LAYERS, layers, of_layers),
        (
            _SIZES,
            max(_PACKED * largest, _SMALL),
            f"no tensor has more than {largest:,} of anything",
        ),
        (_LENGTHS, _MAX_LENGTH, f"at most {_MAX_LENGTH:,} are possible"),
    )
    for name, value in _numbers(fields):
        for pattern, most, why in limits:
            if not pattern.fullmatch(name):
                continue
            least = 1 if _NEEDED.fullmatch(name) else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                shown = repr(value)[:40]
                raise ModelNotSupported(
                    f"{where}: {name} is {shown}, but must be a whole number from {least} on"
                )
            if value > most:
                raise ModelNotSupported(f"{where}: {name} is {value:,}, but {why}")


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of its parts that are given; each entry of a list."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if name != "quantization_config":
                yield from _numbers(value)
            continue
        is_per_layer = isinstance(value, list) and not _LAYERS.fullmatch(name)
        for each in value if is_per_layer else (value,):
            if each is not None:
                yield name, each


def check_parameters(where: object, wanted: int, shapes: Shapes) -> None:
    """Raise ModelNotSupported if a model has far more parameters than there are numbers in its
    tensors, of which a quantised one may hold several in an element."""
    stored = sum(map(math.prod, shapes.values()))
    if wanted > _PACKED * stored:
        raise ModelNotSupported(
            f"{where}: the model that its config describes has {wanted:,} parameters, but its "
            f"tensors have {stored:,} numbers"
        )
