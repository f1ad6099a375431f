"""`StoredPrefixes`: which prefixes of token sequences a store holds.

A run is named by a hash of all tokens before it and by its first token. So a sequence is found run
by run from its beginning, however the tree was split when the runs were written, and at any page
size. Where a sequence leaves a stored run in its middle, the tokens up to there are used, and the
next run is named by the hash at that position.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import is_within
from radixserve.request import FIRST_PICTURE_ID
from radixserve.runner.kv_layout import ByteArray, KVLayout
from radixserve.store.run_file import (
    BadRun,
    KVRun,
    OtherRun,
    RunHead,
    ShortHead,
    decode_head,
    decode_run,
    encode_run,
)
from radixserve.store.run_store import NotAFile, RunStore
from radixserve.token_marks import num_before_mark

_log = logging.getLogger("radixserve")

MAX_RUN_TOKENS = 512  # longer runs are divided, so that reading one overlaps with loading another
_HEAD_BYTES = 4096  # that are read of a file first
_MAX_HEAD_BYTES = 1 << 17  # beside the tokens
_MAX_ERRORS = 3  # of a store, after which a list of its runs is given up
_MAX_HEADS = 65_536  # that are kept
_MAX_NAMESPACES = 4096  # whose folders are kept
_DIGEST_BYTES = 16


def _before_pictures(tokens: IntArray) -> IntArray:
    is_row = tokens >= FIRST_PICTURE_ID
    return tokens[: int(is_row.argmax())] if is_row.any() else tokens


def _is_inside(tokens: IntArray, length: int) -> bool:
    """Whether the tokens before and after a place may be rows of the same picture."""
    before, after = int(tokens[length - 1]), int(tokens[length])
    return before >= FIRST_PICTURE_ID and after == before + 1


class StoredRun(NamedTuple):
    """A run on the path of a sequence."""

    name: str
    start: int
    num_tokens: int  # those that agree with the sequence
    head: RunHead


class StoredPrefix(NamedTuple):
    """The stored part of a sequence: its runs, one after the other from position 0 on."""

    length: int
    runs: list[StoredRun]
    next_name: str  # of the run that would continue it; "" where all is stored

    @property
    def parent(self) -> str:
        """Of the run that would continue it, see `KVRun`."""
        return self.runs[-1].name.rpartition("/")[2] if self.runs else ""


class StoredPrefixes:
    """Any thread may call. Only `known` never reads or writes the store."""

    def __init__(
        self,
        store: RunStore,
        model: str,
        layout: KVLayout,
        as_stored: Callable[[IntArray], IntArray] | None = None,
    ) -> None:
        """`model`: see `set_model`. `as_stored`: see `PictureTable`; None: there are no
        pictures."""
        self.store = store
        self._as_stored = _before_pictures if as_stored is None else as_stored
        self.layout = layout
        self.num_refused = 0  # files that were damaged or not what their names say
        self._model = model
        self._models = {model}  # that it has had
        self._heads: OrderedDict[str, RunHead] = OrderedDict()  # of runs, by name
        self._namespaces: dict[str, tuple[str, hashlib.blake2b]] = {}  # folder, hash of no tokens

    def set_model(self, model: str) -> None:
        """Set the fingerprint of what computes the K/V from now on, in hexadecimal digits. While
        nothing is written."""
        self._model = model
        self._models.add(model)
        self._heads.clear()
        self._namespaces.clear()

    def known(self, tokens: IntArray, namespace: str = "") -> StoredPrefix:
        """The longest stored prefix whose heads were read or written before. O(tokens)."""
        return self._match(tokens, namespace, lambda name, _: self._heads.get(name))

    def match(self, tokens: IntArray, namespace: str = "", until: float = math.inf) -> StoredPrefix:
        """The longest stored prefix. O(tokens), and a small read for each run seen first; none
        after `until`, by time.monotonic(). Damaged files are put aside. Raises OSError."""

        def find(name: str, start: int) -> RunHead | None:
            head = self._heads.get(name)
            if head is None and time.monotonic() <= until:
                head = self._read_head(name, namespace, start)
                if head is not None:
                    self._keep_head(name, head)
            return head

        return self._match(tokens, namespace, find)

    def _match(
        self, tokens: IntArray, namespace: str, find: Callable[[str, int], RunHead | None]
    ) -> StoredPrefix:
        given, tokens = tokens, self._as_stored(tokens)
        folder, hasher = self.folder(namespace), self._hasher(namespace)
        runs: list[StoredRun] = []
        position = 0
        while position < len(tokens):
            name = _name(folder, hasher, int(tokens[position]))
            head = find(name, position)
            count = 0 if head is None else _num_equal(head.tokens, tokens[position:])
            if head is None or not count:
                return self._without_part(StoredPrefix(position, runs, name), given, namespace)
            runs.append(StoredRun(name, position, count, head))
            begin, position = position, position + count
            if position < len(tokens):
                hasher.update(_as_bytes(tokens[begin:position]))
        return StoredPrefix(position, runs, "")

    def num_storable(self, tokens: IntArray) -> int:
        """How many leading tokens a store may have: those after are of this process alone."""
        return len(self._as_stored(tokens[: num_before_mark(tokens)]))

    def _without_part(self, prefix: StoredPrefix, tokens: IntArray, namespace: str) -> StoredPrefix:
        """Returns a prefix without a picture that `tokens` go on with: only whole ones are sure to
        be the same."""
        length, runs = prefix.length, list(prefix.runs)
        while 0 < length < len(tokens) and _is_inside(tokens, length):
            length -= 1
        if length == prefix.length:
            return prefix
        while runs and runs[-1].start >= length:
            runs.pop()
        if runs:
            runs[-1] = runs[-1]._replace(num_tokens=length - runs[-1].start)
        hasher, own = self._hasher(namespace), self._as_stored(tokens)
        hasher.update(_as_bytes(own[:length]))
        return StoredPrefix(length, runs, _name(self.folder(namespace), hasher, int(own[length])))

    def put(
        self, tokens: IntArray, namespace: str, stored: StoredPrefix, kv: Iterable[ByteArray]
    ) -> Iterator[StoredRun]:
        """Write the tokens after their stored prefix as runs, and yield each once it is written.

        kv  of each run [layers, 2, MAX_RUN_TOKENS, row bytes]; the last may have fewer tokens. An
            array is not used any more once its run was yielded. Raises OSError.
        """
        tokens = self._as_stored(tokens)
        start, parent = stored.length, stored.parent
        folder, hasher = self.folder(namespace), self._hasher(namespace)
        hasher.update(_as_bytes(tokens[:start]))
        begins = range(start, len(tokens), MAX_RUN_TOKENS)
        for begin, run_kv in zip(begins, kv, strict=True):
            end = min(begin + MAX_RUN_TOKENS, len(tokens))
            name, own = _name(folder, hasher, int(tokens[begin])), tokens[begin:end]
            parts = encode_run(KVRun(namespace, begin, parent, own, run_kv), self.layout)
            first = next(parts)
            head = decode_head(first)
            self.store.put(name, chain((first,), parts))
            self._keep_head(name, head)
            yield StoredRun(name, begin, end - begin, head)
            hasher.update(_as_bytes(own))
            parent = name.rpartition("/")[2]

    @property
    def max_file_bytes(self) -> int:
        """Bytes of the largest file of a run."""
        return MAX_RUN_TOKENS * (self.layout.token_bytes + 4) + _MAX_HEAD_BYTES

    def read(
        self, run: StoredRun, tokens: IntArray, into: memoryview | None = None
    ) -> ByteArray | None:
        """The K/V [layers, 2, run.num_tokens, row bytes] of a run of `tokens`, a whole sequence.
        It is a view of `into` where that has `max_file_bytes`.

        None if it is gone, or by now has other tokens or is of another version. Raises BadRun, and
        puts the file aside, if it is damaged; OSError.
        """
        try:
            data = self.store.get(run.name, self.max_file_bytes, into)
            if data is None:
                self._heads.pop(run.name, None)
                return None
            stored = decode_run(data, self.layout, run.head)
        except OtherRun:
            self._heads.pop(run.name, None)
            return None
        except (BadRun, NotAFile) as error:
            self._refuse(run.name, error)
            raise BadRun(f"{run.name} was put aside: {error}") from error
        if stored.tokens is not run.head.tokens:  # another engine has written the run again
            self._heads.pop(run.name, None)
            own = self._as_stored(tokens)[run.start : run.start + run.num_tokens]
            if stored.start != run.start or _num_equal(stored.tokens, own) < run.num_tokens:
                return None  # with another continuation
        return stored.kv[:, :, : run.num_tokens]

    def touch(self, prefix: StoredPrefix) -> None:
        """Its runs were used now; a run counts as used after those that follow it."""
        for run in reversed(prefix.runs):
            self.store.touch(run.name)

    def forget(self, namespace: str | None) -> None:
        """Drop what is stored of a namespace and those below it, or all, of each model that it has
        had. Reads the head of a run of each other namespace. Raises OSError."""
        self._heads.clear()
        for model in list(self._models):
            for folder in [model] if namespace is None else self._folders_within(model, namespace):
                self.store.drop_folder(folder)
        self._heads.clear()  # of what was read meanwhile

    def _folders_within(self, model: str, namespace: str) -> list[str]:
        is_within_it = {_folder(model, namespace): True}
        for file in self.store.list(model):
            folder = file.name.rpartition("/")[0]
            if folder not in is_within_it and (head := self._read_head(file.name)) is not None:
                is_within_it[folder] = is_within(head.namespace, namespace)
        return [folder for folder, is_gone in is_within_it.items() if is_gone]

    def paths(self) -> Iterator[tuple[str, IntArray]]:
        """(namespace, tokens) of each stored sequence that no other one continues, the last used
        first. Reads all runs' heads; damaged files are put aside. Raises OSError where the store
        fails again and again."""
        heads: dict[tuple[str, str], RunHead] = {}
        num_errors = 0
        for file in sorted(self.store.list(self._model), key=lambda file: -file.used_at):
            try:
                head = self._read_head(file.name)
            except OSError:
                num_errors += 1
                if num_errors >= _MAX_ERRORS:
                    raise
                continue
            if head is not None:
                _, folder, name = file.name.split("/")
                heads[folder, name] = head
        begins = {(folder, head.parent, head.start) for (folder, _), head in heads.items()}
        for (folder, name), head in heads.items():
            end = head.start + len(head.tokens)
            if (folder, name, end) not in begins:  # none begins where it ends
                tokens = _path(heads, folder, name)
                if tokens is not None and len(tokens := _before_pictures(tokens)):
                    yield head.namespace, tokens

    def folder(self, namespace: str) -> str:
        """Where the runs of a namespace lie: a hash, which does not reveal the namespace."""
        return self._of_namespace(namespace)[0]

    def _hasher(self, namespace: str) -> hashlib.blake2b:
        return self._of_namespace(namespace)[1].copy()

    def _of_namespace(self, namespace: str) -> tuple[str, hashlib.blake2b]:
        known = self._namespaces.get(namespace)
        if known is None:
            key, name = self._model.encode()[:64], namespace.encode()
            hasher = hashlib.blake2b(name + b"\0", digest_size=_DIGEST_BYTES, key=key)
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            known = self._namespaces[namespace] = _folder(self._model, namespace), hasher
        return known

    def _read_head(
        self, name: str, namespace: str | None = None, start: int | None = None
    ) -> RunHead | None:
        """The head of a file that is what its name says; None where the file is gone or of another
        version, or was put aside. `namespace`, `start`: what it must say. Raises OSError."""
        num_bytes = _HEAD_BYTES
        while True:
            try:
                data = self.store.get(name, num_bytes)
                if data is None:
                    return None
                try:
                    head = decode_head(data)
                except ShortHead as short:
                    if len(data) < num_bytes:
                        raise BadRun("it ends within its header or tokens") from None
                    num_bytes = short.num_bytes
                    continue
                self._check_head(name, head, namespace, start)
                return head
            except OtherRun:
                return None
            except (BadRun, NotAFile) as error:
                self._refuse(name, error)
                return None

    def _check_head(
        self, name: str, head: RunHead, namespace: str | None, start: int | None
    ) -> None:
        """Raises BadRun for a head, whole as it may be, that is not this name's."""
        folder, _, own = name.rpartition("/")
        model = folder.partition("/")[0]
        if namespace not in (None, head.namespace) or _folder(model, head.namespace) != folder:
            raise BadRun("it is of another namespace")
        if head.layout != self.layout.as_list():
            raise BadRun(f"its K/V is {head.layout}, not {self.layout.as_list()}")
        if start not in (None, head.start) or (head.start == 0) != (head.parent == ""):
            raise BadRun(f"it does not begin at position {head.start}")
        if not own.endswith(f"-{int(head.tokens[0]):08x}"):
            raise BadRun("it is of other tokens")

    def _refuse(self, name: str, reason: object) -> None:
        """Put a file aside that is not what it should be."""
        self.num_refused += 1
        _log.debug("kv_store: %s was put aside: %s", name, reason)
        self._heads.pop(name, None)
        self.store.set_aside(name)

    def _keep_head(self, name: str, head: RunHead) -> None:
        self._heads[name] = head
        if len(self._heads) > _MAX_HEADS:
            with contextlib.suppress(KeyError):  # another thread has cleared it
                self._heads.popitem(last=False)


def _path(heads: dict[tuple[str, str], RunHead], folder: str, name: str) -> IntArray | None:
    """The tokens from position 0 to the end of a run; None where a run before it is missing, or
    does not begin before it."""
    parts: list[IntArray] = []
    end: int | None = None
    while name:
        head = heads.get((folder, name))
        if head is None or (end is not None and not head.start < end):
            return None
        parts.append(head.tokens if end is None else head.tokens[: end - head.start])
        name, end = head.parent, head.start
    return np.concatenate(parts[::-1]) if end == 0 else None


def _folder(model: str, namespace: str) -> str:
    key, name = model.encode()[:64], namespace.encode()
    return f"{model}/{hashlib.blake2b(name, digest_size=_DIGEST_BYTES, key=key).hexdigest()}"


def _name(folder: str, hasher: hashlib.blake2b, first_token: int) -> str:
    return f"{folder}/{hasher.hexdigest()}-{first_token & 0xFFFFFFFF:08x}"


def _as_bytes(tokens: IntArray) -> bytes:
    return np.ascontiguousarray(tokens, "<i4").tobytes()


def _num_equal(first: IntArray, second: IntArray) -> int:
    """Leading tokens that both share."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    index = int(differs.argmax()) if size else 0
    return index if size and differs[index] else size
