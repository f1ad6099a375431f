"""The tensors of a GGUF file by their names in transformers, as the native decoder reads them.

Matrices of 8 bits or less are kept as they are where the reader is asked to; every other tensor is
widened to the model's dtype.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import GgufFile
from radixserve.models.gguf_families import family_of
from radixserve.models.gguf_forms import EXACT, exact_form, nearest_int8
from radixserve.models.weights import TensorReader
from radixserve_kernels.quantized import (
    AnyWeight,
    concat_rows,
    dense,
    form_of,
    map_parts,
    select_rows,
    to_int8,
)

_log = logging.getLogger("radixserve")
FLOATS = ("F32", "F16", "BF16", "F64")
_EXPERT_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROPE_FACTORS = "rope_freqs.weight"  # [D / 2] inverse frequencies are divided by these (Llama 3.1)
_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|rope_factors_.*")


class GgufWeights(TensorReader):
    """The tensors of a GGUF file by their names in transformers, read one by one.

    `keeps_forms`: matrices in 8 bits or less, or in float16, stay so; else all are widened.
    """

    def __init__(
        self,
        file: GgufFile,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_forms: bool = False,
    ) -> None:
        self._rounded: set[str] = set()  # types that were logged
        self._file, self._family = file, family_of(file)
        self._origins = _origins(file)
        used = {own for origin in self._origins.values() for own in origin.names}
        super().__init__(file.path, self._origins, dtype, device, keeps_forms=keeps_forms)
        self._unused |= {own for own in file.tensors.keys() - used if not _is_unused(file, own)}

    def widened(self) -> dict[str, Tensor]:
        """Every tensor in the reader's dtype. Raises ModelNotSupported for unknown ones."""
        assert not self._keeps_forms
        self._unused -= self._origins.keys()
        self.finish()
        return {name: self._converted(dense(self._read(name))) for name in sorted(self._origins)}

    def _read(self, name: str) -> AnyWeight:
        origin = self._origins[name]
        parts = [self._restored(own, origin.expert) for own in origin.names]
        self._file.drop_pages()  # they are not read again
        if origin.order is not None:
            return origin.order(self._file, _one_below_another(parts))
        if origin.half is None:
            return parts[0]
        inner = parts[0].shape[0] // 2
        return map_parts(parts[0], lambda part: part[inner:] if origin.half else part[:inner])

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        """As in the file, where axes may be in another order or split."""
        origin = self._origins[name]
        first = self._file.tensors[origin.names[0]].shape
        if len(origin.names) > 1:
            return (sum(math.prod(self._file.tensors[own].shape) for own in origin.names),)
        own = first if origin.expert is None else first[1:]
        return own if origin.half is None else (own[0] // 2, *own[1:])

    def _may_be(self, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        del name
        return math.prod(stored) == math.prod(shape)

    def _restored(self, own: str, expert: int | None) -> AnyWeight:
        """A tensor of the file in the layout of transformers."""
        tensor = self._stored(own, expert)
        is_norm = own.endswith("norm.weight") and not own.endswith("ssm_norm.weight")
        if isinstance(tensor, Tensor) and is_norm:
            tensor = tensor - self._family.norm_offset
        if own.endswith("_shexp.weight") and len(tensor.shape) == 1:
            return map_parts(tensor, lambda part: part[None])  # the file has no axis of one row
        if self._family.has_paired_rotation and re.search(r"attn_[qk]\.", own):
            heads = "attention.head_count" + ("_kv" if "attn_k." in own else "")
            num_heads = self._file.largest(heads, self._file.field("attention.head_count"))
            return select_rows(tensor, _halves_of_pairs(tensor.shape[0], num_heads))
        layer_name = re.sub(r"^blk\.\d+\.", "", own)
        return self._family.restore(self._file, layer_name, tensor)

    def _stored(self, own: str, expert: int | None) -> AnyWeight:
        kind = self._file.kind(own)
        is_matrix = len(self._file.tensors[own].shape) == (2 if expert is None else 3)
        if self._keeps_forms and is_matrix and kind in EXACT:
            return exact_form(kind, self._file.raw(own, expert))
        if self._keeps_forms and is_matrix and kind == "F16":
            return torch.from_numpy(self._file.raw(own, expert).view(np.float16).copy())
        numbers = self._file.read(own, expert)
        if self._keeps_forms and is_matrix and kind not in FLOATS:
            if kind not in self._rounded:
                self._rounded.add(kind)
                _log.info("%s: %s is rounded to 8 bits a number", self._file.path, kind)
            try:
                return nearest_int8(numbers)
            except ValueError as error:
                raise InvalidRequest(f"{self._file.path}: tensor {own} has {error}") from error
        return torch.from_numpy(np.array(numbers))


def rope_factors(file: GgufFile) -> NDArray[np.float32] | None:
    """[D / 2] what inverse frequencies are divided by; None where the file has no such tensor."""
    if ROPE_FACTORS not in file.tensors or file.architecture == "gemma4":  # in its config
        return None
    return file.read(ROPE_FACTORS)


def _halves_of_pairs(num_rows: int, num_heads: int) -> Tensor:
    """Where the rows of halves (i, D / 2 + i) of each head lie in a file of pairs (2i, 2i + 1)."""
    pairs = torch.arange(num_rows).view(num_heads, -1, 2)
    return pairs.transpose(1, 2).reshape(-1)


class _Origin(NamedTuple):
    """Where the file has a tensor of transformers."""

    names: tuple[str, ...]
    expert: int | None = None  # its number in a tensor of all experts
    half: int | None = None  # of its rows
    order: Callable[[GgufFile, AnyWeight], AnyWeight] | None = None  # of the rows of several


def _origins(file: GgufFile) -> dict[str, _Origin]:
    """Name in transformers -> where it is, for the file's tensors that have one."""
    family = family_of(file)
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    ends |= family.ends
    parts = {part for joined in family.joined for part in joined.parts}
    origins: dict[str, _Origin] = {}
    for own in file.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", own)
        if match is None:
            stem, _, kind = own.rpartition(".")  # kind: weight or bias
            if stem in ends:
                origins[f"{ends[stem]}.{kind}"] = _Origin((own,))
        elif int(match[1]) < file.num_layers:
            stem, prefix = match[2].rpartition(".")[0], f"model.layers.{match[1]}."
            if stem not in parts:
                origins |= {
                    prefix + name: origin for name, origin in _of_layer(file, own, match[2])
                }
            for joined in family.joined:
                names = tuple(f"blk.{match[1]}.{part}.weight" for part in joined.parts)
                if own == names[0] and all(name in file.tensors for name in names):
                    origins[f"{prefix}{joined.name}.weight"] = _Origin(names, order=joined.order)
    return origins


def _of_layer(file: GgufFile, own: str, layer_name: str) -> Iterator[tuple[str, _Origin]]:
    """A layer's tensors that are in one of the file; names without the layer."""
    family = family_of(file)
    stem, _, kind = layer_name.rpartition(".")
    shape = file.tensors[own].shape
    module, *names = family.experts or ("", *_EXPERT_PARTS)
    experts = {} if family.experts is None else dict(zip(_EXPERT_PARTS, names, strict=True))
    if stem in experts and len(shape) > 1:
        for number in range(shape[0]):
            yield f"{module}.{number}.{experts[stem]}.{kind}", _Origin((own,), number)
    elif experts and stem == "ffn_gate_up_exps" and len(shape) > 1:
        for number, half in product(range(shape[0]), (0, 1)):
            yield f"{module}.{number}.{names[half]}.{kind}", _Origin((own,), number, half)
    elif (name := family.tensor_name(layer_name)) is not None:
        yield name, _Origin((own,))


def _is_unused(file: GgufFile, own: str) -> bool:
    """Whether a tensor without a name in transformers is left: of layers that draft, of rope."""
    match = re.match(r"blk\.(\d+)\.", own)
    is_after = match is not None and int(match[1]) >= file.num_layers
    return bool(is_after or _UNUSED.fullmatch(own))


def _one_below_another(weights: list[AnyWeight]) -> AnyWeight:
    """In the form of all of them, else in 8 bits."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) == len(weights) and tensors[0].ndim == 3:  # of all experts
        return torch.cat(tensors, 1)
    if len({form_of(weight) for weight in weights}) > 1:
        return concat_rows([to_int8(weight) for weight in weights])
    return concat_rows(weights)
