"""The tensors of a GGUF file by their names in transformers, as the native decoder reads them.

Matrices of 8 bits or less are kept as they are where the reader is asked to; every other tensor is
widened to the model's dtype.
"""

from __future__ import annotations

import logging
import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import GgufFile
from radixserve.models.gguf_families import family_of
from radixserve.models.gguf_forms import EXACT, exact_form, nearest_int8
from radixserve.models.weights import TensorReader
from radixserve_kernels.quantized import AnyWeight, map_parts, select_rows

_log = logging.getLogger("radixserve")
FLOATS = ("F32", "F16", "BF16", "F64")
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
        self._own = _transformers_names(file)
        named = {own for own, _ in self._own.values()}
        unnamed = {own for own in file.tensors if own not in named and not _UNUSED.fullmatch(own)}
        every = {*self._own, *unnamed}
        super().__init__(file.path, every, dtype, device, keeps_forms=keeps_forms)

    def _read(self, name: str) -> AnyWeight:
        own, expert = self._own[name]
        tensor = self._stored(own, expert)
        self._file.drop_pages()  # they are not read again
        if isinstance(tensor, Tensor) and own.endswith("norm.weight"):
            return tensor - self._family.norm_offset
        if own.endswith("_shexp.weight") and len(tensor.shape) == 1:
            return map_parts(tensor, lambda part: part[None])  # the file has no axis of one row
        if not self._family.has_paired_rotation or not re.search(r"attn_[qk]\.", own):
            return tensor
        heads = "attention.head_count" + ("_kv" if "attn_k." in own else "")
        num_heads = self._file.field(heads, self._file.field("attention.head_count"))
        return select_rows(tensor, _halves_of_pairs(tensor.shape[0], num_heads))

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
    return file.read(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None


def _halves_of_pairs(num_rows: int, num_heads: int) -> Tensor:
    """Where the rows of halves (i, D / 2 + i) of each head lie in a file of pairs (2i, 2i + 1)."""
    pairs = torch.arange(num_rows).view(num_heads, -1, 2)
    return pairs.transpose(1, 2).reshape(-1)


def _transformers_names(file: GgufFile) -> dict[str, tuple[str, int | None]]:
    """Name in transformers -> name in the file, for tensors that have one; in the file experts are
    one tensor, of which it is the number."""
    family = family_of(file)
    others = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    module, *names = family.experts
    experts = dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), names, strict=True))
    found: dict[str, tuple[str, int | None]] = {}
    for own, tensor in file.tensors.items():
        stem, _, kind = own.rpartition(".")  # kind: weight or bias
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        prefix = f"model.layers.{match[1]}." if match else ""
        if match and match[2] in experts and len(tensor.shape) > 1:
            for number in range(tensor.shape[0]):
                found[f"{prefix}{module}.{number}.{experts[match[2]]}.{kind}"] = own, number
        elif match and (name := family.tensor_name(match[2])):
            found[prefix + (name if name.endswith("sinks") else f"{name}.{kind}")] = own, None
        elif stem in others:
            found[f"{others[stem]}.{kind}"] = own, None
    return found
