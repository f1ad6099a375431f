"""Loads a model: a native decoder for its families, transformers' code for the rest."""

from __future__ import annotations

import torch

from radixserve.attention.choice import choose_backend
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.decoder_tensors import ARCHITECTURES, decoder_shape
from radixserve.models.parallel import TPGroup
from radixserve.models.source import ModelSource
from radixserve.models.weights import architecture_of, choose_dtype


def load_model(
    source: ModelSource, config: EngineConfig, device: torch.device, ranks: TPGroup | None = None
) -> tuple[LanguageModel, str]:
    """Load a model, or of several ranks this one's part of it.

    Returns the model and the name of the attention backend to run it with. Raises ModelNotSupported
    naming the reason, InvalidRequest if its folder is broken or it cannot be split so.
    """
    dtype = choose_dtype(config.dtype, source.config, device)
    is_native = architecture_of(source.config) in ARCHITECTURES
    asked = config.attention_backend
    if not is_native:  # its heads are known once it has run
        model = _load_other(source, dtype, device, ranks)
        return model, choose_backend(asked, dtype, device, head_dim=model.info.head_dim)
    dim = decoder_shape(source.config).head_dim
    backend = choose_backend(asked, dtype, device, head_dim=dim)
    if backend == "cpu" and ranks is None:
        return load_cpu_decoder(source, dtype), backend
    return load_decoder(source, dtype, device, ranks, config.max_seq_len), backend


def _load_other(
    source: ModelSource, dtype: torch.dtype, device: torch.device, ranks: TPGroup | None
) -> LanguageModel:
    from radixserve.models.hf import load_transformers

    if ranks is not None:
        raise ModelNotSupported(
            f"{architecture_of(source.config)} cannot be split over several ranks; possible are "
            f"{', '.join(ARCHITECTURES)}"
        )
    assert source.path is not None, "sizes.py names native families only"
    return load_transformers(source.path, source.config, dtype, device)
