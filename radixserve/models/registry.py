"""Which code runs a checkpoint: the native decoder for its families, transformers' for the rest."""

from __future__ import annotations

from pathlib import Path

import torch

from radixserve.models.base import LanguageModel
from radixserve.models.decoder import ARCHITECTURES, load_decoder
from radixserve.models.weights import architecture_of, choose_dtype, load_config


def load_model(folder: Path, dtype: str, device: torch.device) -> LanguageModel:
    """Load the checkpoint in `folder`; `dtype` as in EngineConfig.

    Raises ModelNotSupported naming the reason, InvalidRequest if the folder is broken.
    """
    config = load_config(folder)
    chosen = choose_dtype(dtype, config)
    if architecture_of(config) in ARCHITECTURES:
        return load_decoder(folder, config, chosen, device)
    from radixserve.models.hf import load_transformers

    return load_transformers(folder, config, chosen, device)
