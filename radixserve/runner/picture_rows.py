"""`PictureRows`: the embeddings of pictures, and those that a step's tokens need."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Set
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import GivenRows, IndexArray
from radixserve.models.multimodal import MRope
from radixserve.models.vision_tower import VisionTower, check_rows
from radixserve.picture import Picture
from radixserve.request import FIRST_PICTURE_ID
from radixserve.runner.input_batch import InputBatch
from radixserve.runner.picture_positions import OpenRequest, PicturePositions


class PictureRows:
    """Embeddings by picture, of the last ones used. `load` and `encode` may be called from any
    thread, the others from the engine's."""

    def __init__(
        self,
        tower: VisionTower,
        hidden_size: int,
        max_bytes: int,
        mrope: MRope | None = None,
        *,
        see_each_other: bool = False,
    ) -> None:
        """see_each_other: rows of a picture that follow each other do, whichever comes first."""
        self.max_bytes = max_bytes
        self.see_each_other = see_each_other
        self._positions = None if mrope is None else PicturePositions(mrope)
        self._num_features = 1 if mrope is None else 1 + mrope.num_deepstack
        self.num_bytes = 0
        self.num_encoded = 0
        self.encode_s = 0.0
        self.tower, self._hidden_size = tower, hidden_size
        self._count_lock = threading.Lock()
        self._known: WeakValueDictionary[int, Picture] = WeakValueDictionary()  # by first id
        self._starts = np.empty(0, np.int64)  # first ids of `_known` and some more, ascending
        self._run_ends = np.empty(0, np.int64)  # the ends of their `Picture.runs`, ascending
        self._rows: OrderedDict[int, Tensor] = OrderedDict()  # by first id, the last used last

    def __len__(self) -> int:
        return len(self._rows)

    def set_tower(self, tower: VisionTower) -> None:
        """Encode with this tower from now on."""
        if tower is self.tower:
            return
        self.tower = tower
        self._rows.clear()
        self.num_bytes = 0

    def read_requests(self, requests: Mapping[str, OpenRequest]) -> None:
        """Steps have rows of these open requests, by id."""
        if self._positions is not None:
            self._positions.requests = requests

    def know(self, picture: Picture) -> None:
        """Steps may have rows of this picture as long as it lives."""
        if picture.first_id not in self._known:
            self._known[picture.first_id] = picture
            known = sorted(self._known.items())
            self._starts = np.array([first_id for first_id, _ in known], np.int64)
            ends = [end for _, known_picture in known for _, end in known_picture.runs]
            self._run_ends = np.array(ends, np.int64)

    def load(self) -> None:
        """Load the vision tower, if it is not there."""
        self.tower.load()

    def encode(self, picture: Picture) -> Tensor:
        """Returns its embeddings, as `GivenRows` has them. Takes long. Raises
        ModelNotSupported."""
        start = time.perf_counter()
        rows = self.tower.encode(picture.inputs)
        check_rows(rows, (picture.num_rows, self._num_features, self._hidden_size))
        with self._count_lock:
            self.num_encoded += 1
            self.encode_s += time.perf_counter() - start
        return rows

    def has(self, picture: Picture) -> bool:
        """Whether its embeddings are kept; notes a use of them."""
        if picture.first_id not in self._rows:
            return False
        self._rows.move_to_end(picture.first_id)
        return True

    def put(self, picture: Picture, rows: Tensor, pinned: Set[int] = frozenset()) -> None:
        """Keep embeddings. Drops the least recently used ones, but for those whose first ids are
        `pinned`, as long as all take more than max_bytes."""
        if picture.first_id in self._rows:
            return
        self._rows[picture.first_id] = rows
        self.num_bytes += rows.nbytes
        for first_id in list(self._rows):
            if self.num_bytes <= self.max_bytes:
                return
            if first_id not in pinned and first_id != picture.first_id:
                self.num_bytes -= self._rows.pop(first_id).nbytes

    def has_room(self, pictures: Set[Picture], itemsize: int, pinned: Set[int]) -> bool:
        """Whether their embeddings and the pinned ones that are kept take at most max_bytes."""
        taken = sum(self._rows[first_id].nbytes for first_id in pinned & self._rows.keys())
        num_rows = sum(picture.num_rows for picture in pictures)
        return (
            taken + num_rows * self._num_features * self._hidden_size * itemsize <= self.max_bytes
        )

    def take(self, inputs: InputBatch) -> GivenRows | None:
        """Returns the embeddings of a step's tokens that are rows of pictures, None where none is,
        and makes these tokens of the vocabulary, in place. Sets positions, too.

        Encodes what is not kept: what was dropped from the K/V cache after its request came."""
        rope_positions = None if self._positions is None else self._positions.set(inputs)
        input_ids = inputs.input_ids
        places = np.flatnonzero(input_ids >= FIRST_PICTURE_ID)
        if not len(places):
            return None
        ids = input_ids[places]
        runs = np.searchsorted(self._starts, ids, side="right") - 1
        first_ids = self._starts[runs]
        embeddings = [
            self._rows_of(int(first_id)).index_select(
                0, torch.from_numpy(ids[first_ids == first_id] - first_id)
            )
            for first_id in _in_order(first_ids)
        ]
        order = np.concatenate([places[first_ids == one] for one in _in_order(first_ids)])
        input_ids[places] = 0
        last_seen = None
        if self.see_each_other:
            last_seen = inputs.positions.copy()
            ends = self._run_ends[np.searchsorted(self._run_ends, ids, side="right")]
            last_seen[places] += ends - 1 - ids
        return GivenRows(order, torch.cat(embeddings), rope_positions, last_seen)

    def _rows_of(self, first_id: int) -> Tensor:
        rows = self._rows.get(first_id)
        if rows is None:
            picture = self._known[first_id]
            rows = self.encode(picture)
            self.put(picture, rows)
        else:
            self._rows.move_to_end(first_id)
        return rows


def _in_order(first_ids: IndexArray) -> list[int]:
    return list(dict.fromkeys(first_ids.tolist()))
