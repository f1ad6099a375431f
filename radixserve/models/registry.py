"""Loads a model: a native decoder for its families, transformers' code for the rest."""

from __future__ import annotations

import logging

import torch

from radixserve.attention.choice import BACKENDS, choose_backend
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.decoder_shape import (
    check_decoder,
    compiled_parts,
    decoder_shape,
    not_native_reason,
)
from radixserve.models.decoder_tensors import check_tensors
from radixserve.models.parallel import TPGroup
from radixserve.models.source import ModelSource
from radixserve.models.stated_sizes import refusing
from radixserve.models.weights import choose_dtype

logger = logging.getLogger("radixserve")


def load_model(
    source: ModelSource, config: EngineConfig, device: torch.device, ranks: TPGroup | None = None
) -> tuple[LanguageModel, str]:
    """Load a model, or of several ranks this one's part of it.

    Returns the model and the name of the attention backend to run it with. Raises ModelNotSupported
    naming the reason, InvalidRequest if its folder is broken or it cannot be split so.
    """
    with refusing(f"{source.path}: its config and its tensors make no model"):
        return _load(source, config, device, ranks)


def _load(
    source: ModelSource, config: EngineConfig, device: torch.device, ranks: TPGroup | None
) -> tuple[LanguageModel, str]:
    dtype = choose_dtype(config.dtype, source.config, device)
    if config.model_impl == "native":
        check_decoder(source.config)
    is_native = config.model_impl != "transformers" and not not_native_reason(source.config)
    if is_native:
        is_native = _runs_natively(source, config, dtype, device, ranks)
    asked = config.attention_backend
    packs = config.weight_dtype != "auto"
    if packs and not is_native:
        raise ModelNotSupported(_refusal(config, "transformers' code"))
    if not is_native:  # its heads are known once it has run
        model = _load_other(source, dtype, device, ranks)
        dim, features = model.info.head_dim, frozenset(model.info.attention_features)
        return model, choose_backend(asked, dtype, device, dim, features)
    shape = decoder_shape(source.config)
    if shape.max_positions < (longest := source.config.max_position_embeddings):
        logger.warning(
            "sequences are limited to %d of the model's %d positions: beyond them longrope changes "
            "the keys of all tokens",
            *(shape.max_positions, longest),
        )
    check_tensors(source, dtype)
    backend = choose_backend(asked, dtype, device, shape.head_dim, shape.feature_names)
    if BACKENDS[backend].has_compiled_step and ranks is None:
        bits = config.activation_bits
        return load_cpu_decoder(source, dtype, config.weight_dtype, bits), backend
    if packs:
        where = "several ranks" if ranks is not None else f"the {backend} attention backend"
        raise ModelNotSupported(_refusal(config, where))
    decoder = load_decoder(
        *(source, dtype, device, ranks, config.max_seq_len),
        is_exact=config.is_exact_on(device.type),
        compiles=backend != "torch",
    )
    return decoder, backend


def _runs_natively(
    source: ModelSource,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: TPGroup | None,
) -> bool:
    """Whether a native family has all that it needs there. ModelNotSupported where it must."""
    shape = decoder_shape(source.config)
    parts = compiled_parts(shape, has_ranks=ranks is not None)
    if not parts:
        return True
    asked = config.attention_backend
    name = choose_backend(asked, dtype, device, shape.head_dim, shape.feature_names)
    if BACKENDS[name].has_compiled_step and ranks is None:
        return True
    if config.model_impl == "native" or ranks is not None:
        where = "several ranks" if ranks is not None else f"the {name} attention backend"
        raise ModelNotSupported(
            f"the native decoder has no {parts} on {where}, only on the cpu attention backend; "
            'model_impl="transformers" runs them in transformers\' code'
        )
    return False


def _refusal(config: EngineConfig, where: str) -> str:
    return (
        f'weight_dtype="{config.weight_dtype}" needs the native decoder on the cpu attention '
        f'backend; this model runs on {where}: "auto" is possible there'
    )


def _load_other(
    source: ModelSource, dtype: torch.dtype, device: torch.device, ranks: TPGroup | None
) -> LanguageModel:
    from radixserve.models.hf import load_transformers

    if ranks is not None or source.path is None:
        check_decoder(source.config)
        raise ModelNotSupported(
            'model_impl="transformers" runs checkpoints, and not over several ranks; '
            '"auto" and "native" can'
        )
    return load_transformers(source, dtype, device)
