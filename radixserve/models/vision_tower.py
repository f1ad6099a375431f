"""`VisionTower`: the parts of a checkpoint that make embeddings of pictures, in transformers' code.

The text model runs natively; see multimodal.py for the families.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve.models.multimodal import text_name
from radixserve.models.weights import without_load_report


class VisionTower:
    """Loads the tower and the projector when the first picture is encoded. One thread at a time
    encodes."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        """given: tensors of a checkpoint to use in place of the folder's."""
        self._folder, self._dtype, self._device = folder, dtype, device
        self._given: dict[str, Tensor] | None = None  # until it is loaded
        if given is not None:
            own = {name: x for name, x in given.items() if text_name(name) is None}
            self._given = {name: x.to(dtype, copy=True) for name, x in own.items()}
        self._missing: list[str] = []  # of the given ones
        self._lock = threading.Lock()

    def with_weights(self, given: Mapping[str, Tensor]) -> VisionTower:
        """Returns a loaded tower with given tensors of a checkpoint; itself where none of them is
        of a tower. Raises ModelNotSupported where some are missing or have other shapes."""
        tower = VisionTower(self._folder, self._dtype, self._device, given)
        if not tower._given:
            return self
        tower.load()
        missing = tower._missing
        if len(missing) == len(list(tower._model.parameters())):
            return self
        if missing:
            names = ", ".join(missing[:6]) + (" and others" if len(missing) > 6 else "")
            raise ModelNotSupported(f"given tensors: missing tensors of the vision tower: {names}")
        return tower

    def load(self) -> None:
        """Load what `encode` needs, if it is not there."""
        with self._lock:
            _ = self._model

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, NDArray[Any]]) -> Tensor:
        """Returns the embeddings [n, 1 + L, H] of a picture's rows, in order, see `GivenRows`. In
        host memory: no step waits for what a device does beside it."""
        with self._lock:
            tensors = {name: self._tensor(array) for name, array in inputs.items()}
            made = self._model.get_image_features(**tensors, return_dict=True)
            features = made.pooler_output if hasattr(made, "pooler_output") else made
            deep = getattr(made, "deepstack_features", None) or ()
            rows = torch.stack([_joined(one) for one in (features, *deep)], 1)
            return rows.to(self._dtype).cpu().contiguous()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @cached_property
    def _model(self) -> Any:
        """The wrapper without the layers and the embeddings of its text model."""
        from transformers import AutoConfig

        config = copy.deepcopy(AutoConfig.from_pretrained(self._folder))
        text = config.get_text_config()
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = []
        if hasattr(text, "hidden_size_per_layer_input"):
            text.hidden_size_per_layer_input = text.num_kv_shared_layers = 0
        if getattr(config, "audio_config", None) is not None:
            config.audio_config = None
        with without_load_report():
            model, missing = self._read(config)
        for parent in (model, model.model):  # their memory is given back
            for name in ("lm_head", "language_model", "text_model"):
                if hasattr(parent, name):
                    setattr(parent, name, None)
        self._missing = [name for name, _ in model.named_parameters() if name in missing]
        return model.to(self._device).eval()

    def _read(self, config: Any) -> tuple[Any, set[str]]:
        """Returns the wrapper, and the names of parameters that it lacks."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText

        if self._given is None:
            model: Any = AutoModelForImageTextToText.from_pretrained(
                self._folder, config=config, dtype=self._dtype
            )
            return model, set()
        given, self._given = self._given, None
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        try:
            model, info = kind.from_pretrained(
                None, config=config, dtype=self._dtype, state_dict=given, output_loading_info=True
            )
        except RuntimeError as error:  # of shapes
            reason = " ".join(str(error).split())
            raise ModelNotSupported(f"given tensors of the vision tower: {reason}") from None
        return model, set(info["missing_keys"])


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[n, H] the features of all parts of a picture."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def check_rows(rows: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise ModelNotSupported where a picture has other embeddings than its prompt has rows."""
    if rows.shape != shape:
        raise ModelNotSupported(
            f"the vision tower makes {tuple(rows.shape)} embeddings of a picture with {shape[0]} "
            f"rows of {shape[1]} x {shape[2]} features in its prompt"
        )
