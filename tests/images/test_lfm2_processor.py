"""`Lfm2VlProcessor` gives the bits of transformers' own, where that can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from radixserve import InvalidRequest
from radixserve.images.lfm2_processor import Lfm2VlProcessor
from radixserve.images.processor import load_processor
from tests.checkpoints import edit_json
from tests.images.vision_checkpoints import make_vision_checkpoint, picture

SIZES: list[dict[str, Any]] = [
    {"min_image_tokens": 4, "max_image_tokens": 8},
    {"min_image_tokens": 4, "max_image_tokens": 16, "use_thumbnail": False, "min_tiles": 3},
    {"min_image_tokens": 8, "max_image_tokens": 32, "do_image_splitting": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("lfm2_vl"), "lfm2_vl")


@pytest.mark.parametrize("sizes", SIZES)
def test_equal_to_transformers(folder: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    pytest.importorskip("torchvision", reason="transformers' own processor needs it")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor as Published

    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = {"encoder_patch_size": 7, "tile_size": 56, "max_tiles": 4, **sizes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    published: Any = Published(Lfm2VlImageProcessor(**fields), tokenizer)
    own, rng = Lfm2VlProcessor(tmp_path, tokenizer), np.random.default_rng(0)
    for _ in range(20):
        width, height = rng.integers(8, 300, 2).tolist()
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        want = published(images=[image], text=["<image>"], return_tensors="np")
        found = own(images=[image], text=["<image>"])
        for name in ("input_ids", "pixel_values", "spatial_shapes", "pixel_attention_mask"):
            assert np.array_equal(want[name], found[name]), (name, width, height)


def test_tiles(folder: Path) -> None:
    processor = load_processor(folder)
    names = [
        processor.tokenizer.convert_ids_to_tokens(processor(images=[one], text="")["input_ids"][0])
        for one in (picture(1), picture(1, 60, 200))
    ]
    assert names[0] == ["<|image_start|>", *["<image>"] * 6, "<|image_end|>"]
    assert [name for name in names[1] if name != "<image>"] == [
        *("<|image_start|>", "<|img_row_1_col_1|>", "<|img_row_2_col_1|>", "<|img_row_3_col_1|>"),
        *("<|img_thumbnail|>", "<|image_end|>"),
    ]
    assert names[1].count("<image>") == 3 * 16 + 5


def test_settings_that_are_not_built(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    edit_json(tmp_path / "preprocessor_config.json", resample=3)
    with pytest.raises(InvalidRequest, match="resample must be 2, got 3"):
        Lfm2VlProcessor(tmp_path, AutoTokenizer.from_pretrained(folder))
