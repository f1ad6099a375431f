"""`PictureProcessor`: the processor of a checkpoint, as transformers has it, for one picture.

Its Pillow form is used: torchvision is not needed.
"""

from __future__ import annotations

import json
import threading
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from radixserve.errors import InvalidRequest
from radixserve.images.table import Processed

# The family whose processor takes a family's pictures. SmolVLM's own needs packages for video.
_PROCESSORS = {
    "smolvlm": "idefics3",
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
}
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class PictureProcessor:
    """May be used from any thread. Loads transformers when it is first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def process(self, image: Any) -> Processed:
        """image: of PIL, in RGB. Raises InvalidRequest for one that the model cannot take."""
        with self._lock:
            processor = self._loaded
        try:
            made = processor(
                images=[image],
                text=[processor.image_token],
                return_tensors="np",
                add_special_tokens=False,
            )
        except Exception as error:  # of the model's own code
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(
                f"the model's processor refuses a picture of {image.width} x {image.height} "
                f"pixels: {reason}"
            ) from error
        inputs = {name: np.asarray(made[name]) for name in made if name not in _OF_TEXT}
        ids = np.asarray(made["input_ids"]).ravel().tolist()
        placeholder_id = getattr(processor, "image_token_ids", [processor.image_token_id])[0]
        ids, around = _without_text(ids, processor.tokenizer)
        return Processed(ids, int(placeholder_id), inputs, image.size, around)

    @cached_property
    def marker(self) -> str:
        """What a chat template writes in the place of a picture."""
        with self._lock:
            return str(self._loaded.image_token)

    @cached_property
    def marker_id(self) -> int:
        """The token of the marker."""
        with self._lock:
            return int(self._loaded.tokenizer.convert_tokens_to_ids(self._loaded.image_token))

    @cached_property
    def _loaded(self) -> Any:
        return load_processor(self._folder)


def _without_text(ids: list[int], tokenizer: Any) -> tuple[list[int], tuple[str, str]]:
    """Returns a picture's tokens from its first mark to its last, and the text that the processor
    writes before and after them: Gemma 3's has blank lines."""
    begin, end = (getattr(tokenizer, name, None) for name in ("boi_token_id", "eoi_token_id"))
    if begin not in ids or end not in ids:
        return ids, ("", "")
    first, last = ids.index(begin), len(ids) - ids[::-1].index(end)
    return ids[first:last], (tokenizer.decode(ids[:first]), tokenizer.decode(ids[last:]))


def load_processor(folder: Path) -> Any:
    """Returns a checkpoint's processor of transformers without its parts for video. Raises
    InvalidRequest."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto import processing_auto

    read_images: Any = AutoImageProcessor.from_pretrained
    names: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    try:
        model_type = AutoConfig.from_pretrained(folder).model_type
        model_type = _PROCESSORS.get(model_type, model_type)
        if names[model_type] == "Lfm2VlProcessor":
            from radixserve.images.lfm2_processor import Lfm2VlProcessor

            return Lfm2VlProcessor(folder, AutoTokenizer.from_pretrained(folder))
        parts = {
            "image_processor": read_images(folder, backend="pil"),
            "tokenizer": AutoTokenizer.from_pretrained(folder),
        }
        if names[model_type] == "PixtralProcessor":
            return PixtralProcessor(folder, **parts)
        code = import_module(f"transformers.models.{model_type}.processing_{model_type}")
        kind = getattr(code, names[model_type])
        settings, _ = kind.get_processor_dict(folder)
        members = {"check_argument_for_proper_class": _any_class}
        images_only: Any = type(kind.__name__, (kind,), members)
        args = [parts.get(name) for name in kind.get_attributes()]
        return images_only.from_args_and_dict(args, settings)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequest(f"the processor of {folder} cannot be loaded: {reason}") from error


class PixtralProcessor:
    """For a picture as transformers' class of that name, which needs torchvision."""

    def __init__(self, folder: Path, image_processor: Any, tokenizer: Any) -> None:
        file = folder / "processor_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.size = settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)
        self.image_token = settings.get("image_token", "[IMG]")
        self._break_token = settings.get("image_break_token", "[IMG_BREAK]")
        self._end_token = settings.get("image_end_token", "[IMG_END]")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, images: Any, text: Any, return_tensors: str, **_: Any) -> dict[str, Any]:
        """`text` is the marker alone. A row of patches ends with a token of its own."""
        del text
        made = self.image_processor(images, patch_size=self.size, return_tensors=return_tensors)
        ((height, width),) = np.asarray(made["image_sizes"]).tolist()
        row = [self.image_token] * (width // self.size) + [self._break_token]
        tokens = row * (height // self.size)
        tokens[-1] = self._end_token
        return {"input_ids": [self.tokenizer.convert_tokens_to_ids(tokens)], **made}


def _any_class(_: Any, name: str, argument: Any) -> type:
    """In place of a check that demands the parts for video."""
    del name
    return type(argument)
