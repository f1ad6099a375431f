"""`PicturePositions`: positions of tokens by time, height and width (M-RoPE), in prompts with
pictures.

A row of a picture has its picture's first position plus its place in time, height and width. What
follows a picture goes on after its longer side, so that a picture takes fewer positions than rows.
The positions of a prefix follow from its tokens alone, never from what comes later: K in the cache
is turned by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from radixserve.arrays import IntArray
from radixserve.attention.base import IndexArray
from radixserve.models.multimodal import MRope
from radixserve.picture import Picture
from radixserve.request import FIRST_PICTURE_ID, Request
from radixserve.runner.input_batch import InputBatch


class OpenRequest(Protocol):
    """What is read of the scheduler's `RequestState`."""

    @property
    def request(self) -> Request: ...


class _Placed(NamedTuple):
    """The positions of a request with pictures."""

    request: Request
    positions: IndexArray  # [prompt tokens, 3]
    delta: int  # what a later token's position is beyond its place in the sequence

    def of(self, start: int, end: int) -> IndexArray:
        """[end - start, 3]"""
        later = np.arange(max(start, len(self.positions)), end) + self.delta
        known = self.positions[start:end]
        return np.concatenate((known, np.repeat(later[:, None], 3, 1)))


class PicturePositions:
    """Keeps the positions of open requests. The engine's thread makes all calls."""

    def __init__(self, mrope: MRope) -> None:
        self._axes, self._merge_size = np.array(mrope.axes), mrope.merge_size
        self.requests: Mapping[str, OpenRequest] = {}  # all open ones, by id
        self._placed: dict[str, _Placed] = {}  # by request id

    def set(self, inputs: InputBatch) -> IndexArray | None:
        """Set the positions of a step's tokens in place. Returns those that turn each pair of a
        head, [T, D/2], where a token's three parts differ."""
        shifted = [
            (number, placed)
            for number, request_id in enumerate(inputs.rows.request_ids)
            if (placed := self._of(request_id)) is not None
        ]
        if not shifted:
            return None
        host, whole = inputs.host, np.repeat(inputs.positions[:, None], 3, 1)
        for number, placed in shifted:
            first, last = host.qo_indptr[number : number + 2].tolist()
            start = int(host.start[number])
            whole[first:last] = placed.of(start, start + last - first)
        inputs.positions[:] = whole[:, 0]
        is_plain = (whole == whole[:, :1]).all()
        return None if is_plain else whole[:, self._axes]

    def _of(self, request_id: str) -> _Placed | None:
        """None for a request without pictures."""
        state = self.requests.get(request_id)  # a profile run's rows are of no request
        if state is None or not (request := state.request).pictures:
            return None
        placed = self._placed.get(request_id)
        if placed is None or placed.request is not request:
            if len(self._placed) > 2 * len(self.requests):
                self._placed = {
                    name: one for name, one in self._placed.items() if name in self.requests
                }
            positions, end = place_tokens(request.token_ids, request.pictures, self._merge_size)
            placed = _Placed(request, positions, end - len(positions))
            self._placed[request_id] = placed
        return placed


def place_tokens(
    token_ids: IntArray, pictures: Sequence[Picture], merge_size: int
) -> tuple[IndexArray, int]:
    """Returns the positions [n, 3] of a prompt's tokens, and that of the token after them.

    Rows of a part of a picture are placed as in the whole. No position is beyond a token's place in
    the sequence, also where a part lacks its first rows.
    """
    by_first_id = {picture.first_id: picture for picture in pictures}
    starts = np.array(sorted(by_first_id), np.int64)
    places = np.flatnonzero(token_ids >= FIRST_PICTURE_ID)
    rows = token_ids[places].astype(np.int64)
    first_ids = starts[np.searchsorted(starts, rows, side="right") - 1]
    goes_on = (np.diff(places) == 1) & (np.diff(rows) == 1) & (np.diff(first_ids) == 0)
    bounds = [*np.flatnonzero(np.append(True, ~goes_on))[: len(rows)], len(rows)]  # of runs
    positions = np.repeat(np.arange(len(token_ids))[:, None], 3, 1)
    delta = 0
    for first, last in pairwise(bounds):
        picture = by_first_id[int(first_ids[first])]
        height, width = _size(picture, merge_size)
        own, place = rows[first:last] - picture.first_id, places[first]
        parts = own // (height * width), own // width % height, own % width
        end = place + last - first
        bound = np.arange(place, end)[:, None]
        positions[place:end] = np.minimum(place + delta + np.stack(parts, 1), bound)
        delta = positions[place:end].max() + 1 - end
        positions[end:] = np.arange(end, len(token_ids))[:, None] + delta
    return positions, len(token_ids) + int(delta)


def _size(picture: Picture, merge_size: int) -> tuple[int, int]:
    """Rows of height and width."""
    _, height, width = np.asarray(picture.inputs["image_grid_thw"]).ravel().tolist()
    return height // merge_size, width // merge_size
