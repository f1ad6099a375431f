"""`PictureTable`: gives each distinct picture token ids of its own.

A picture is known by the SHA-256 of what the model's processor makes of it: pixels, shapes and
marks. Its rows get consecutive ids, from FIRST_PICTURE_ID on. An id is never given twice: so no
K/V in the cache, no branch and no list of tokens of a caller can ever come to mean another picture.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.picture import Picture
from radixserve.request import FIRST_PICTURE_ID

_LAST_ID = (1 << 31) - 1
_MAX_DIGESTS = 1 << 17  # whose ids are remembered, about 300 bytes each
# A store knows each row by 30 bits of the digest. So many rows have more bits than the digest.
_LEAST_STORED_ROWS = 9


class Processed(NamedTuple):
    """What the model's processor makes of a picture."""

    token_ids: Sequence[int]  # in a prompt
    placeholder_id: int  # which of them are rows
    inputs: Mapping[str, NDArray[Any]]  # of the vision tower
    size: tuple[int, int]  # width and height before
    around: tuple[str, str] = ("", "")  # as in `Picture`

    def digest(self) -> bytes:
        """SHA-256 of all that decides its embeddings and its tokens."""
        state = hashlib.sha256(np.asarray(self.token_ids, np.int64).tobytes())
        for name in sorted(self.inputs):
            array = np.ascontiguousarray(self.inputs[name])
            state.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
            state.update(array.view(np.uint8).data if array.size else b"")
        return state.digest()


class _Known(NamedTuple):
    """What is remembered of a picture."""

    digest: bytes
    num_rows: int


class PictureTable:
    """May be used from any thread.

    The last pictures are kept, in at most `max_bytes` of processed pixels; older ones while a
    request, a chat or a branch has them. The ids of many more are remembered, so that a picture
    that comes again finds its K/V.
    """

    def __init__(self, max_bytes: int, last_id: int = _LAST_ID) -> None:
        self._max_bytes, self._last_id = max_bytes, last_id
        self._lock = threading.Lock()
        self._next_id = FIRST_PICTURE_ID
        self._first_ids: OrderedDict[bytes, int] = OrderedDict()  # by digest, the last used last
        self._recent: OrderedDict[int, Picture] = OrderedDict()  # by first id
        self._recent_bytes = 0
        self._live: WeakValueDictionary[int, Picture] = WeakValueDictionary()  # by first id
        self._known: dict[int, _Known] = {}  # by first id; those of `_first_ids`
        self._starts: list[int] = []  # first ids of `_known` and `_live`, ascending, and some more
        self._by_file: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._senders: WeakKeyDictionary[Picture, set[str]] = WeakKeyDictionary()
        self._processing: dict[bytes, threading.Lock] = {}  # by the key of a file
        self.num_processed = 0
        self._num_refused: Counter[str] = Counter()  # by reason

    def of_file(self, key: bytes, process: Callable[[], Processed]) -> Picture:
        """Returns the picture of a file. key: the SHA-256 of its bytes. `process` is called where
        no living picture came from the same bytes."""
        with self._lock:
            own = self._processing.setdefault(key, threading.Lock())
        with own:  # a picture that comes many times at once is processed once
            try:
                picture = self._by_file.get(key) or self.add(process())
                with self._lock:
                    self._by_file[key] = picture
                    self._keep(picture)
            finally:
                with self._lock:
                    self._processing.pop(key, None)
        return picture

    def known_file(self, key: bytes) -> Picture | None:
        """Returns the living picture that came from a file before, and notes a use of it; None:
        there is none."""
        with self._lock:
            picture = self._by_file.get(key)
            if picture is not None:
                self._keep(picture)
            return picture

    def note_sender(self, picture: Picture, tenant: str) -> None:
        """A tenant has sent this picture."""
        with self._lock:
            self._senders.setdefault(picture, set()).add(tenant)

    def check_senders(self, pictures: Iterable[Picture], tenant: str) -> None:
        """Raise InvalidRequest where a tenant has not sent one of the pictures: as where it is not
        kept, since ids can be guessed."""
        with self._lock:
            for picture in pictures:
                if tenant not in self._senders.get(picture, ()):
                    raise _of_none(picture.first_id)

    def add(self, processed: Processed) -> Picture:
        """Returns the one picture with these pixels. Raises InvalidRequest when all ids are
        used."""
        digest = processed.digest()
        token_ids = np.asarray(processed.token_ids, np.int64)
        is_row = token_ids == processed.placeholder_id
        num_rows = int(is_row.sum())
        if not num_rows:
            raise InvalidRequest("the model's processor makes no token of a picture")
        with self._lock:
            self.num_processed += 1
            first_id = self._first_id(digest, num_rows)
            picture = self._live.get(first_id)
            if picture is None:
                token_ids[is_row] = np.arange(first_id, first_id + num_rows)
                picture = Picture(
                    digest,
                    first_id,
                    num_rows,
                    tuple(token_ids.tolist()),
                    processed.placeholder_id,
                    processed.inputs,
                    processed.size,
                    processed.around,
                )
                self._live[first_id] = picture
            self._keep(picture)
            return picture

    def by_digest(self, digest: bytes) -> Picture:
        """Raises InvalidRequest for a picture that is not kept any more."""
        with self._lock:
            picture = self._live.get(self._first_ids.get(digest, -1))
        if picture is None:
            raise InvalidRequest("a picture of the prompt is not kept any more: send it again")
        return picture

    def in_tokens(self, token_ids: IntArray) -> tuple[Picture, ...]:
        """Returns the pictures that have rows among the tokens, in order of their ids. Raises
        InvalidRequest for ids of a picture that is not kept any more, or of none."""
        rows = np.unique(token_ids[token_ids >= FIRST_PICTURE_ID])
        found: list[Picture] = []
        with self._lock:
            while len(rows):
                picture = self._live.get(self._start_of(int(rows[0])))
                if picture is None or rows[0] >= picture.first_id + picture.num_rows:
                    raise _of_none(int(rows[0]))
                found.append(picture)
                rows = rows[np.searchsorted(rows, picture.first_id + picture.num_rows) :]
        return tuple(found)

    def as_stored(self, token_ids: IntArray) -> IntArray:
        """Returns tokens as a store has them, the same in every process: the ids of a picture's
        rows follow from its digest. Only the tokens before the first picture that is not remembered
        or has few rows."""
        is_row = token_ids >= FIRST_PICTURE_ID
        if not is_row.any():
            return token_ids
        stored, position = token_ids.copy(), int(is_row.argmax())
        while position < len(stored):
            with self._lock:
                start = self._start_of(int(token_ids[position]))
                known = self._known.get(start)
            if known is None or known.num_rows < _LEAST_STORED_ROWS:
                return stored[:position]
            own = is_row & (token_ids >= start) & (token_ids < start + known.num_rows)
            stored[own] = _stored_rows(known)[token_ids[own] - start]
            is_row &= ~own
            position = int(is_row.argmax()) if is_row.any() else len(stored)
        return stored

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Count a picture that is refused inside, by InvalidRequest."""
        try:
            yield
        except InvalidRequest:
            self.note_refused(reason)
            raise

    def note_refused(self, reason: str) -> None:
        with self._lock:
            self._num_refused[reason] += 1

    def num_refused(self) -> Counter[str]:
        """Returns how many pictures were refused, by reason."""
        with self._lock:
            return self._num_refused.copy()

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "processed": self.num_processed,
                "kept": len(self._recent),
                "kept_bytes": self._recent_bytes,
                "ids_left": self._last_id + 1 - self._next_id,
            }

    def _first_id(self, digest: bytes, num_rows: int) -> int:
        first_id = self._first_ids.get(digest)
        if first_id is None:
            first_id = self._next_id
            if first_id + num_rows > self._last_id + 1:
                raise InvalidRequest(
                    "all token ids for pictures were given since the start: restart to take more"
                )
            self._next_id += num_rows
            self._first_ids[digest] = first_id
            self._known[first_id] = _Known(digest, num_rows)
            self._starts.append(first_id)
            if len(self._first_ids) > _MAX_DIGESTS:
                del self._known[self._first_ids.popitem(last=False)[1]]
                self._trim()
        self._first_ids.move_to_end(digest)
        return first_id

    def _keep(self, picture: Picture) -> None:
        """Note a use of the picture."""
        if picture.first_id not in self._recent:
            self._recent[picture.first_id] = picture
            self._recent_bytes += picture.num_bytes
        self._recent.move_to_end(picture.first_id)
        while self._recent_bytes > self._max_bytes and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= oldest.num_bytes

    def _trim(self) -> None:
        if len(self._starts) > 2 * _MAX_DIGESTS:
            self._starts = sorted({*self._known, *self._live})

    def _start_of(self, row: int) -> int:
        """The first id of the picture that has this row, if any has; -1 for none."""
        place = bisect_right(self._starts, row) - 1
        return self._starts[place] if place >= 0 else -1


def _of_none(row: int) -> InvalidRequest:
    return InvalidRequest(f"token id {row} is of no picture that is kept: send the picture again")


def whole_runs(token_ids: IntArray, pictures: Sequence[Picture]) -> tuple[tuple[int, int], ...]:
    """Returns where the `Picture.runs` of these pictures are among a prompt's tokens: bounds
    [start, end). Raises InvalidRequest where one is not whole."""
    sizes = {first: end - first for picture in pictures for first, end in picture.runs}
    places, runs, end = np.flatnonzero(token_ids >= FIRST_PICTURE_ID), [], 0
    while len(places := places[np.searchsorted(places, end) :]):
        start = int(places[0])
        size = sizes.get(first := int(token_ids[start]), 0)
        end = start + size
        if not size or not np.array_equal(token_ids[start:end], np.arange(first, first + size)):
            raise InvalidRequest(
                f"the prompt has a part of a picture, from token {start} on: the rows of a picture "
                "see each other in this model, so that a prompt has all of them or none"
            )
        runs.append((start, end))
    return tuple(runs)


def _stored_rows(known: _Known) -> IntArray:
    """[num_rows] the ids of a picture's rows in a store."""
    data = hashlib.shake_256(known.digest).digest(4 * known.num_rows)
    bits = np.frombuffer(data, "<u4") % FIRST_PICTURE_ID
    return (bits + FIRST_PICTURE_ID).astype(np.int32)
