"""The source of a model: a checkpoint in a folder, or a known size with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import GgufFile, find_gguf
from radixserve.models.families import FAMILIES
from radixserve.models.generation_config import read_eos_ids, read_gguf_sampling, read_sampling
from radixserve.models.gguf_config import gguf_config, gguf_eos_ids
from radixserve.models.gguf_source import GgufWeights, rope_factors
from radixserve.models.given_weights import GivenWeights, digest_of
from radixserve.models.hub import find_or_fetch
from radixserve.models.multimodal import (
    TRANSPOSABLE,
    MRope,
    mrope_of,
    picture_refusal,
    text_config,
    text_name,
)
from radixserve.models.names import (
    CONFIG_FILE,
    PACKAGED,
    RANDOM,
    check_model_name,
    packaged_folder,
    read_hub_name,
)
from radixserve.models.quantized_checkpoint import config_scheme
from radixserve.models.random_weights import RandomWeights
from radixserve.models.sizes import size_config
from radixserve.models.stated_sizes import refusing
from radixserve.models.weights import (
    WeightReader,
    architecture_of,
    as_transformers,
    check_checkpoint,
    load_config,
    tensor_files,
    transformers_config,
)
from radixserve.sampling_defaults import LLAMA_CPP, NO_SAMPLING, ModelSampling
from radixserve_kernels.quantized import AnyWeight


class TensorSource(Protocol):
    """A model's tensors by name: `WeightReader` or `RandomWeights`. Read once, then finished."""

    num_parameters: int  # elements taken so far

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor although the config does not ask for it."""
        ...

    def skip(self, pattern: str) -> None:
        """Tensors whose whole name matches the regular expression may be left untaken."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, in the dtype and on the device of the source."""
        ...

    def take_weight(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """The same, or as it is stored, in float16 or fewer bits, if the source keeps forms."""
        ...

    def finish(self) -> None:
        """Raise ModelNotSupported naming everything that was wrong."""
        ...


class WidenedTensors(NamedTuple):
    """See `ModelSource.widened`."""

    tensors: dict[str, Tensor]
    optional: frozenset[str]  # those that a model may lack


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is located but not loaded. Made by `find_model`."""

    config: Any  # a DecoderConfig; of other families transformers' own
    path: Path | None  # checkpoint folder or GGUF file; None: random weights and no tokenizer
    seed: int = 0  # of random weights
    gguf: GgufFile | None = None  # the open file, where `path` is one
    is_text_part: bool = False  # of a checkpoint that has parts for images too
    no_pictures: str = "the model takes text only"  # why pictures are refused; "": they are not
    mrope: MRope | None = None  # of a model that takes pictures, where its positions have parts
    packaged: str = ""  # its name in PACKAGED
    given: Mapping[str, Tensor] | None = None  # weights to use in place of those of `path`
    copies_given: bool = True  # when they are read: a model may keep what it reads

    def tensors(
        self, dtype: torch.dtype, device: torch.device, *, keeps_forms: bool = False
    ) -> TensorSource:
        """Its weights; matrices as they are stored if `keeps_forms`, see `TensorReader`.

        Raises ModelNotSupported or InvalidRequest for a broken checkpoint.
        """
        rename = text_name if self.is_text_part else self._stored_rename()
        if self.given is not None:
            return GivenWeights(
                *(self.given, dtype, device),
                keeps_forms=keeps_forms,
                copies=self.copies_given,
                rename=rename,
            )
        if self.gguf is not None:
            return GgufWeights(self.gguf, dtype, device, keeps_forms=keeps_forms)
        if self.path is not None:
            transposes = getattr(self.config, "may_transpose_experts", False)
            return WeightReader(
                self.path,
                dtype,
                device,
                keeps_forms=keeps_forms,
                rename=rename,
                transposable=TRANSPOSABLE if transposes else None,
                scheme=config_scheme(self.config),
            )
        return RandomWeights(self.seed, self.config.initializer_range, dtype, device)

    def _stored_rename(self, *, is_back: bool = False) -> Callable[[str], str]:
        """A native family's tensors may have other names in its checkpoints. is_back: to those."""
        family = FAMILIES.get(architecture_of(self.config))
        prefixes = () if family is None else family.stored_prefixes

        def rename(name: str) -> str:
            for stored, own in prefixes:
                before, after = (own, stored) if is_back else (stored, own)
                if name.startswith(before):
                    return after + name.removeprefix(before)
            return name

        return rename

    def transformers_config(self) -> Any:
        """The config as transformers reads it; of a file, and of a text part, it is made."""
        assert self.path is not None
        if self.gguf is not None:
            return as_transformers(self.config)
        return self.config if self.is_text_part else transformers_config(self.path)

    def widened(self, dtype: torch.dtype) -> WidenedTensors | None:
        """All tensors for transformers' code; None where it reads the folder itself.

        Raises ModelNotSupported or InvalidRequest for a broken checkpoint.
        """
        if self.given is not None:
            return WidenedTensors(
                {name: x.to(dtype, copy=True) for name, x in self.given.items()}, frozenset()
            )
        if self.gguf is None and config_scheme(self.config) is None:
            return None
        reader = self.tensors(dtype, torch.device("cpu"))
        assert isinstance(reader, GgufWeights | WeightReader)
        rename = self._stored_rename(is_back=True)
        tensors = {rename(name): tensor for name, tensor in reader.widened().items()}
        return WidenedTensors(tensors, frozenset(map(rename, reader.optional)))

    def in_memory(self, dtype: torch.dtype) -> ModelSource:
        """With the weights of its files as given ones, read whole. Raises ModelNotSupported or
        InvalidRequest for a broken checkpoint."""
        assert self.path is not None
        if (widened := self.widened(dtype)) is not None:
            return replace(self, given=widened.tensors)
        given: dict[str, Tensor] = {}
        try:
            for file in tensor_files(self.path):
                given |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"{self.path}: not a safetensors file: {error}") from None
        return replace(self, given=given)

    def weights_id(self) -> str:
        """Tells the weights from others: those of files by path, size and times of change, others
        by what they are. O(bytes) of given ones."""
        if self.given is not None:
            return f"given {digest_of(self.given)}"
        if self.path is None:
            return f"random {architecture_of(self.config)} {self.seed}"
        files = [self.path] if self.path.is_file() else tensor_files(self.path)
        facts = [(str(path.resolve()), path.stat()) for path in files]
        return "; ".join(
            f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            for path, stat in facts
        )

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending; none where weights are random."""
        if self.gguf is not None:
            return gguf_eos_ids(self.gguf)
        return () if self.path is None else read_eos_ids(self.path, self.config)

    def sampling(self) -> ModelSampling:
        """Its sampling defaults: its own, else its model card's, for other GGUF files llama.cpp's;
        none where weights are random."""
        if self.path is None:
            return NO_SAMPLING
        own = read_sampling(self.path) if self.gguf is None else read_gguf_sampling(self.gguf)
        if own.values:
            return own
        if self.packaged:
            return ModelSampling(PACKAGED[self.packaged].sampling, "model card")
        return NO_SAMPLING if self.gguf is None else ModelSampling(LLAMA_CPP, "llama.cpp")

    def rope_factors(self) -> Tensor | None:
        """[D / 2] what the inverse frequencies of the config are divided by; None: nothing."""
        factors = None if self.gguf is None else rope_factors(self.gguf)
        return None if factors is None else torch.from_numpy(np.array(factors))


def find_model(model_path: str, seed: int = 0) -> ModelSource:
    """The model of a folder, a GGUF file, a hub id, "smollm2", or "random:" and a size.

    `seed` is that of random weights. Raises InvalidRequest if there is no such model,
    ModelNotSupported if its config cannot be read.
    """
    if model_path.startswith(RANDOM):
        return ModelSource(size_config(model_path.removeprefix(RANDOM)), None, seed)
    packaged = model_path if model_path in PACKAGED and not Path(model_path).exists() else ""
    if packaged:
        model_path = str(packaged_folder(packaged))
    if not Path(model_path).expanduser().exists():
        check_model_name(model_path)
        name = read_hub_name(model_path)
        assert name is not None, "what it checks"
        model_path = str(find_or_fetch(name))
    if (file := find_gguf(model_path)) is not None:
        return ModelSource(gguf_config(file), file.path, gguf=file, packaged=packaged)
    return checkpoint(check_checkpoint(Path(model_path).expanduser()))


def checkpoint(folder: Path) -> ModelSource:
    """The checkpoint in a folder, or the text model of one that takes images too."""
    with refusing(f"{folder / CONFIG_FILE}: a field is wrong"):
        config = load_config(folder)
        text = text_config(config)
    if text is None:
        return ModelSource(config, folder)
    refusal = picture_refusal(config)
    mrope = None if refusal else mrope_of(config)
    return ModelSource(text, folder, is_text_part=True, no_pictures=refusal, mrope=mrope)
