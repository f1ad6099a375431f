"""`Lfm2VlProcessor`: for a picture as transformers' class of that name, which needs torchvision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.checks import shown
from radixserve.errors import InvalidRequest


class _Settings(NamedTuple):
    """Fields of preprocessor_config.json, with transformers' defaults."""

    downsample_factor: int = 2  # patches of a side that make a row
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)


# What the others must be: all published checkpoints have these.
_FIXED = {"resample": 2, "do_resize": True, "do_rescale": True, "do_normalize": True}
_FIXED |= {"do_pad": True, "use_image_special_tokens": True}


class Lfm2VlProcessor:
    """A large picture is split into tiles of one size, with the whole picture after them."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._settings = _read_settings(folder)
        self.image_token = _name(tokenizer, "image_token", "<image>")
        self._start = _name(tokenizer, "image_start_token", "<|image_start|>")
        self._end = _name(tokenizer, "image_end_token", "<|image_end|>")
        self._thumbnail = _name(tokenizer, "image_thumbnail_token", "<|img_thumbnail|>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, images: Any, text: Any, **_: Any) -> dict[str, Any]:
        """`text` is the marker alone."""
        del text
        (image,), settings = images, self._settings
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # [3, height, width] uint8
        rows, columns = self._grid(*pixels.shape[1:])
        parts, tokens = [], [self._start]
        if rows * columns > 1:
            size = settings.tile_size
            resized = _resized(pixels, (rows * size, columns * size))
            for row, column in np.ndindex(rows, columns):
                band = resized[:, row * size : (row + 1) * size]
                parts.append(band[:, :, column * size : (column + 1) * size])
                tokens.append(f"<|img_row_{row + 1}_col_{column + 1}|>")
                tokens += [self.image_token] * self._num_rows(size, size)
            if settings.use_thumbnail:
                tokens.append(self._thumbnail)
        if rows * columns == 1 or settings.use_thumbnail:
            whole = self._whole_size(*pixels.shape[1:])
            parts.append(_resized(pixels, whole))
            tokens += [self.image_token] * self._num_rows(*whole)
        tokens.append(self._end)
        ids = self.tokenizer.convert_tokens_to_ids(tokens)
        return {"input_ids": [ids], **self._patches(parts)}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: those whose shape is the closest, of a picture that is too
        large for one."""
        settings = self._settings
        patch, side = settings.encoder_patch_size, self._row_size
        area = max(patch, _to_multiple(height, side)) * max(patch, _to_multiple(width, side))
        most = settings.max_image_tokens * side**2 * settings.max_pixels_tolerance
        if area <= most or not settings.do_image_splitting or settings.max_tiles == 1:
            return 1, 1
        sizes = range(1, settings.max_tiles + 1)
        grids = [(columns, rows) for columns in sizes for rows in sizes]
        grids = [one for one in grids if settings.min_tiles <= math.prod(one) <= settings.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            distance = abs(width / height - columns / rows)
            fills = 2 * width * height > settings.tile_size**2 * rows * columns
            if distance < least or (distance == least and fills):
                best, least = (rows, columns), distance
        return best

    def _whole_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of a picture in one part: multiples of a row's side, within the bounds of rows,
        in nearly its shape."""
        settings, side = self._settings, self._row_size
        least, most = settings.min_image_tokens * side**2, settings.max_image_tokens * side**2
        sizes = [max(side, _to_multiple(size, side)) for size in (height, width)]
        if math.prod(sizes) > most:
            scale = math.sqrt(height * width / most)
            sizes = [max(side, math.floor(size / scale / side) * side) for size in (height, width)]
        elif math.prod(sizes) < least:
            scale = math.sqrt(least / (height * width))
            sizes = [math.ceil(size * scale / side) * side for size in (height, width)]
        return sizes[0], sizes[1]

    @property
    def _row_size(self) -> int:
        """Pixels of a side of what makes a row."""
        return self._settings.encoder_patch_size * self._settings.downsample_factor

    def _num_rows(self, height: int, width: int) -> int:
        patch, factor = self._settings.encoder_patch_size, self._settings.downsample_factor
        return math.ceil(height // patch / factor) * math.ceil(width // patch / factor)

    def _patches(self, parts: list[Tensor]) -> dict[str, Any]:
        """The inputs of the vision tower: patches of each part, with padding after them."""
        settings = self._settings
        patch = settings.encoder_patch_size
        most = settings.max_image_tokens * settings.downsample_factor**2
        if settings.do_image_splitting:
            most = max(most, (settings.tile_size // patch) ** 2)
        mean, std = (
            torch.tensor(values)[:, None, None] * (1.0 / settings.rescale_factor)
            for values in (settings.image_mean, settings.image_std)
        )
        pixels = torch.zeros(len(parts), most, patch * patch * 3)
        mask = torch.zeros(len(parts), most, dtype=torch.int32)
        shapes = [[part.shape[1] // patch, part.shape[2] // patch] for part in parts]
        for number, (part, (height, width)) in enumerate(zip(parts, shapes, strict=True)):
            normed = (part.float() - mean) / std
            cut = normed.view(3, height, patch, width, patch).permute(1, 3, 2, 4, 0)
            pixels[number, : height * width] = cut.reshape(height * width, -1)
            mask[number, : height * width] = 1
        names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
        arrays = (pixels.numpy(), np.array(shapes, np.int64), mask.numpy())
        return dict(zip(names, arrays, strict=True))


def _read_settings(folder: Path) -> _Settings:
    given: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (file := folder / name).is_file():
            fields = json.loads(file.read_text(encoding="utf-8"))
            given |= fields | fields.get("image_processor", {})
    for name, needed in _FIXED.items():
        if (found := given.get(name, needed)) not in (needed, None):
            raise InvalidRequest(f"{name} must be {needed}, got {shown(found)}")
    known = {name: given[name] for name in _Settings._fields if given.get(name) is not None}
    return _Settings(**known)


def _name(tokenizer: Any, attribute: str, default: str) -> str:
    return str(getattr(tokenizer, attribute, None) or default)


def _to_multiple(size: int, factor: int) -> int:
    return round(size / factor) * factor


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """As torchvision resizes: nothing is done where the size is the same."""
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None].contiguous(), size, mode="bilinear", antialias=True)[0]
