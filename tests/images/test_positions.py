"""Positions in three parts: those of a prefix never depend on what follows."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.images.table import PictureTable, Processed
from radixserve.picture import Picture
from radixserve.runner.picture_positions import place_tokens

TABLE = PictureTable(1 << 20)


def made(height: int, width: int) -> Picture:
    inputs = {"image_grid_thw": np.array([[1, 2 * height, 2 * width]])}
    return TABLE.add(Processed([7, *[9] * height * width, 8], 9, inputs, (width, height)))


def placed(*parts: Picture | int) -> tuple[list[list[int]], int]:
    """parts: pictures, or numbers of text tokens."""
    ids = [
        token
        for part in parts
        for token in (part.prompt_ids if isinstance(part, Picture) else [5] * part)
    ]
    pictures = [part for part in parts if isinstance(part, Picture)]
    positions, end = place_tokens(np.array(ids, np.int32), pictures, 2)
    return positions.tolist(), end


def test_a_picture_takes_its_longer_side() -> None:
    positions, end = placed(2, made(2, 3), 1)
    assert positions[:3] == [[0] * 3, [1] * 3, [2] * 3]  # two of text, the mark before the picture
    assert positions[3:9] == [[3, 3 + y, 3 + x] for y in range(2) for x in range(3)]
    assert positions[9:] == [[6] * 3, [7] * 3]
    assert end == 8


def test_the_same_picture_again_and_pictures_side_by_side() -> None:
    one, other = made(1, 2), made(1, 3)
    assert other.first_id == one.first_id + one.num_rows  # yet another picture begins
    rows = [*range(one.first_id, one.first_id + 2), *range(other.first_id, other.first_id + 3)]
    tokens = np.array([*rows, *rows[:2], *rows[:2]], np.int32)
    positions, end = place_tokens(tokens, [one, other], 2)
    assert positions[:, 0].tolist() == [0, 0, 2, 2, 2, 5, 5, 7, 7]
    assert positions[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert end == 9


@pytest.mark.parametrize("seed", range(5))
def test_those_of_a_prefix_are_a_prefix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pictures = [made(int(rng.integers(1, 5)), int(rng.integers(1, 5))) for _ in range(4)]
    ids: list[int] = []
    for picture in pictures:
        ids += [5] * int(rng.integers(0, 3))
        rows = range(picture.first_id, picture.first_id + picture.num_rows)
        ids += rows[: int(rng.integers(1, len(rows) + 1))]  # some are cut
    tokens = np.array(ids, np.int32)
    whole, _ = place_tokens(tokens, pictures, 2)
    for length in range(1, len(tokens)):  # and inside of pictures
        part, end = place_tokens(tokens[:length], pictures, 2)
        assert part.tolist() == whole[:length].tolist()
        if tokens[length] == 5:
            assert whole[length].tolist() == [end] * 3
        assert (part <= np.arange(length)[:, None]).all()
