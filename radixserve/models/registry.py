"""Which code runs a checkpoint: the native decoder for its families, transformers' for the rest."""

from __future__ import annotations

from pathlib import Path

import torch

from radixserve.attention.choice import choose_backend
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import ARCHITECTURES, load_decoder
from radixserve.models.weights import architecture_of, choose_dtype, load_config


def load_model(
    folder: Path, dtype: str, device: torch.device, attention_backend: str = "auto"
) -> tuple[LanguageModel, str]:
    """Load the checkpoint in `folder`; `dtype` and `attention_backend` as in EngineConfig.

    Returns the model and the name of the attention backend to run it with. Raises ModelNotSupported
    naming the reason, InvalidRequest if the folder is broken.
    """
    config = load_config(folder)
    chosen = choose_dtype(dtype, config)
    backend = choose_backend(attention_backend, chosen, device)
    if architecture_of(config) not in ARCHITECTURES:
        from radixserve.models.hf import load_transformers

        return load_transformers(folder, config, chosen, device), backend
    if backend == "cpu":
        return load_cpu_decoder(folder, config, chosen), backend
    return load_decoder(folder, config, chosen, device), backend
