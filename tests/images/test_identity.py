"""Which pictures are the same: `PictureTable`, and what of two prompts is shared."""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.cache import RadixCache
from radixserve.images.table import PictureTable, Processed
from radixserve.request import FIRST_PICTURE_ID
from tests.images.vision_checkpoints import as_file, make_vision_checkpoint, picture, said

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def processed(seed: int, num_rows: int = 4, **inputs: Any) -> Processed:
    pixels = np.random.default_rng(seed).random((2, 3)).astype(np.float32)
    ids = [7, *[9] * num_rows, 8]
    return Processed(ids, 9, {"pixel_values": pixels, **inputs}, (2, 3))


def test_equal_pixels_have_equal_ids() -> None:
    table = PictureTable(1 << 20)
    first, again, other = table.add(processed(1)), table.add(processed(1)), table.add(processed(2))
    assert first is again
    assert first.prompt_ids == (7, *range(FIRST_PICTURE_ID, FIRST_PICTURE_ID + 4), 8)
    assert other.first_id == FIRST_PICTURE_ID + 4
    assert first.digest != other.digest


def test_shape_dtype_names_and_tokens_count() -> None:
    """Bytes alone could be equal by chance."""
    table, zeros = PictureTable(1 << 20), np.zeros((2, 6), np.float32)
    made = [
        table.add(Processed(ids, 9, {name: array}, (1, 1)))
        for ids in ([9], [9, 9], [1, 9])
        for name in ("a", "b")
        for array in (zeros, zeros.reshape(3, 4), zeros.astype(np.int32), zeros.astype(np.int64))
    ]
    assert len({one.digest for one in made}) == len({one.first_id for one in made}) == len(made)


def test_ids_are_not_given_twice_and_survive_the_pixels() -> None:
    table = PictureTable(60)  # bytes: of two pictures
    first_id = table.add(processed(0)).first_id
    ids = [table.add(processed(seed)).first_id for seed in range(1, 6)]
    gc.collect()
    assert len({first_id, *ids}) == 6
    tokens = np.array([5, first_id], np.int32)
    with pytest.raises(InvalidRequest, match="send the picture again"):
        table.in_tokens(tokens)
    assert table.add(processed(0)).first_id == first_id  # its K/V may be cached still
    assert table.in_tokens(tokens)[0].first_id == first_id


def test_a_known_file_is_used_again() -> None:
    table, numbers = PictureTable(60), [1, 2, 1, 3]  # bytes: of two pictures
    for number in numbers:
        if table.known_file(b"%d" % number) is None:
            table.of_file(b"%d" % number, partial(processed, number))
    gc.collect()
    assert [table.known_file(b"%d" % number) is not None for number in (1, 2, 3)] == [1, 0, 1]
    assert table.num_processed == 3


def test_a_holder_keeps_a_picture() -> None:
    table = PictureTable(1)
    held = table.add(processed(0))
    for seed in range(1, 200):
        table.add(processed(seed))
    gc.collect()
    assert table.in_tokens(np.array([held.first_id + 3], np.int32)) == (held,)
    assert table.by_digest(held.digest) is held


def test_all_ids_are_given() -> None:
    table = PictureTable(1 << 20, last_id=FIRST_PICTURE_ID + 8)
    known = [table.add(processed(seed)) for seed in (1, 2)]
    with pytest.raises(InvalidRequest, match="restart"):
        table.add(processed(3))
    assert table.add(processed(1)) is known[0]
    assert table.stats()["ids_left"] == 1


def test_ids_of_nothing() -> None:
    table = PictureTable(1 << 20)
    made = table.add(processed(1))
    for wrong in (made.first_id + 4, FIRST_PICTURE_ID - 1 + 2**30):
        with pytest.raises(InvalidRequest, match="is of no picture"):
            table.in_tokens(np.array([wrong], np.int64))


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_pictures_meet_nowhere(count: int) -> None:
    """In the cache alone, each behind the same text: what two prompts share is the text."""
    rows = 4
    table, cache = PictureTable(1 << 16), RadixCache(count * rows + 64)
    text = list(range(8))
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for _ in range(count):
        inputs = {"pixel_values": rng.integers(0, 256, 12, np.uint8)}
        made = table.add(Processed([9] * rows, 9, inputs, (2, 2)))
        tokens = np.array([*text, *made.prompt_ids, 1], np.int32)
        is_new = made.first_id not in seen
        found = cache.lookup(tokens)
        assert found.cached_len == (0 if not seen else len(text) if is_new else len(tokens) - 1)
        seen.add(made.first_id)
        sequence = cache.acquire(tokens)
        sequence.extend(tokens[sequence.cached_len :])
        sequence.commit(len(tokens))
        sequence.release()
    assert len(seen) > count - 10
    cache.check()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = make_vision_checkpoint(tmp_path_factory.mktemp("llava"), "llava")
    with Runtime(folder, num_pages=4096) as runtime:
        yield runtime


def test_one_pixel_parts_two_pictures(runtime: Runtime) -> None:
    runtime.flush_cache()
    one, other = picture(1, 56, 56), picture(1, 56, 56)
    other.putpixel((30, 20), (1, 2, 3))
    first, second = [said("Text ", one, "?")], [said("Text ", other, "?")]
    runtime.generate(first, PARAMS)
    place = int(np.flatnonzero(runtime.tokenize(first) >= FIRST_PICTURE_ID)[0])
    found = runtime.lookup(second)
    assert (found.cached_len, found.position, found.reason) == (place, place, "picture")
    out = runtime.generate(second, PARAMS)
    assert out.usage.cached_tokens == place
    assert out.miss is not None
    assert out.miss.reason == "picture"


def test_the_same_picture_by_other_ways(runtime: Runtime, tmp_path: Path) -> None:
    runtime.flush_cache()
    image = picture(5, 60, 70)
    file = as_file(image)
    path = tmp_path / "picture.png"
    path.write_bytes(file)
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    anthropic = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    ways: list[dict[str, Any]] = [
        {"type": "image", "image": image},
        {"type": "image", "image": file},
        {"type": "image", "image": path},
        {"type": "image", "path": str(path)},
        {"type": "image", "image": as_file(image, compress_level=1, dpi=(72, 72))},
        {"type": "image", "image": as_file(image, "WEBP", lossless=True)},
        {"type": "image", "base64": anthropic["data"]},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": anthropic},
    ]
    chats = [[{"role": "user", "content": [part]}] for part in ways]
    tokens = [runtime.tokenize(chat).tolist() for chat in chats]
    assert all(ids == tokens[0] for ids in tokens)
    outs = [runtime.generate(chat, PARAMS) for chat in chats]
    assert all(out.usage.computed_tokens == 1 for out in outs[1:])
    stats: Any = runtime.cache_stats()
    assert stats["pictures"]["encoded"] <= 3  # of all tests of this runtime


def test_exif_turns_a_picture(runtime: Runtime) -> None:
    image = picture(6, 56, 28)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    turned = as_file(image, exif=exif.tobytes())
    asis, right = (
        runtime.tokenize([said(one)]).tolist() for one in (image, image.rotate(-90, expand=True))
    )
    given = [{"role": "user", "content": [{"type": "image", "image": turned}]}]
    assert runtime.tokenize(given).tolist() == right != asis


def test_tokens_of_pictures_are_prompts(runtime: Runtime) -> None:
    """As ids, too: they name the picture, and its rows alone."""
    ids = runtime.tokenize([said("a", picture(7), "b")])
    out = runtime.generate([said("a", picture(7), "b")], PARAMS)
    assert runtime.generate(ids, PARAMS).token_ids == out.token_ids
    with pytest.raises(InvalidRequest, match="is of no picture"):
        runtime.generate([5, (1 << 31) - 1], PARAMS)
    with pytest.raises(InvalidRequest, match="out of range"):
        runtime.generate([5, FIRST_PICTURE_ID - 1], PARAMS)


def test_penalties_and_scores_see_the_models_own_token(runtime: Runtime) -> None:
    chat = [said("a", picture(8), "b")]
    params = SamplingParams(
        max_tokens=4, temperature=0.7, seed=1, repetition_penalty=1.3, prompt_logprobs=1
    )
    out = runtime.generate(chat, params)
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(runtime.tokenize(chat))
    assert all(value <= 0 for value in out.prompt_logprobs[1:])
