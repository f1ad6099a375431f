"""`StoredPrefixes`: which prefixes of token sequences a store holds.

A run is named by a hash of all tokens before it and by its first token. So a sequence is found run
by run from its beginning, however the tree was split when the runs were written, and at any page
size. Where a sequence leaves a stored run in its middle, the tokens up to there are used, and the
next run is named by the hash at that position.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.store.run_file import (
    BadRun,
    ByteArray,
    KVLayout,
    KVRun,
    RunHead,
    ShortHead,
    decode_head,
    decode_run,
    encode_run,
)
from radixserve.store.run_store import RunStore

MAX_RUN_TOKENS = 512  # longer runs are divided, so that reading one overlaps with loading another
_HEAD_BYTES = 4096
_MAX_HEADS = 65_536  # that are kept
_MAX_NAMESPACES = 4096  # whose folders are kept
_DIGEST_BYTES = 16


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
    """One thread calls `match`, any thread the others."""

    def __init__(self, store: RunStore, model: str, layout: KVLayout) -> None:
        """`model`: the fingerprint of what computes the K/V, in hexadecimal digits."""
        self.store = store
        self.layout = layout
        self._model = model
        self._heads: OrderedDict[str, RunHead] = OrderedDict()  # of runs, by name
        self._namespaces: dict[str, tuple[str, hashlib.blake2b]] = {}  # folder, hash of no tokens

    def match(self, tokens: IntArray, namespace: str = "") -> StoredPrefix:
        """The longest stored prefix. O(tokens), and a small read for each run seen first."""
        folder, hasher = self.folder(namespace), self._hasher(namespace)
        runs: list[StoredRun] = []
        position = 0
        while position < len(tokens):
            name = _name(folder, hasher, int(tokens[position]))
            head = self._known_head(name)
            count = 0 if head is None else _num_equal(head.tokens, tokens[position:])
            if head is None or not count:
                return StoredPrefix(position, runs, name)
            runs.append(StoredRun(name, position, count, head))
            begin, position = position, position + count
            if position < len(tokens):
                hasher.update(_as_bytes(tokens[begin:position]))
        return StoredPrefix(position, runs, "")

    def put(
        self, tokens: IntArray, namespace: str, stored: StoredPrefix, kv: Iterable[ByteArray]
    ) -> Iterator[StoredRun]:
        """Write the tokens after their stored prefix as runs, and yield each once it is written.

        kv  of each run [layers, 2, MAX_RUN_TOKENS, row bytes]; the last may have fewer tokens. An
            array is not used any more once its run was yielded. Raises OSError.
        """
        start, parent = stored.length, stored.parent
        folder, hasher = self.folder(namespace), self._hasher(namespace)
        hasher.update(_as_bytes(tokens[:start]))
        begins = range(start, len(tokens), MAX_RUN_TOKENS)
        for begin, run_kv in zip(begins, kv, strict=True):
            end = min(begin + MAX_RUN_TOKENS, len(tokens))
            name, own = _name(folder, hasher, int(tokens[begin])), tokens[begin:end]
            parts = encode_run(KVRun(namespace, begin, parent, own, run_kv), self.layout)
            first = next(parts)
            self.store.put(name, chain((first,), parts))
            head = decode_head(first)
            self._keep_head(name, head)
            yield StoredRun(name, begin, end - begin, head)
            hasher.update(_as_bytes(own))
            parent = name.rpartition("/")[2]

    @property
    def max_file_bytes(self) -> int:
        """Bytes of the largest file of a run, about."""
        return MAX_RUN_TOKENS * (self.layout.token_bytes + 4) + _HEAD_BYTES

    def read(
        self, run: StoredRun, tokens: IntArray, into: memoryview | None = None
    ) -> ByteArray | None:
        """The K/V [layers, 2, run.num_tokens, row bytes] of a run of `tokens`, a whole sequence.
        It is a view of `into` where that has `max_file_bytes`.

        None if it is gone or has other tokens by now. Raises BadRun, and drops the file, if it is
        damaged; OSError.
        """
        data = self.store.get(run.name, into=into)
        if data is None:
            self._heads.pop(run.name, None)
            return None
        try:
            stored = decode_run(data, self.layout, run.head)
        except BadRun as error:
            self._heads.pop(run.name, None)
            self.store.drop(run.name)
            raise BadRun(f"{run.name} was dropped: {error}") from error
        if stored.tokens is not run.head.tokens:  # another engine has written the run again
            self._heads.pop(run.name, None)
            own = tokens[run.start : run.start + run.num_tokens]
            if stored.start != run.start or _num_equal(stored.tokens, own) < run.num_tokens:
                return None  # with another continuation
        return stored.kv[:, :, : run.num_tokens]

    def touch(self, prefix: StoredPrefix) -> None:
        """Its runs were used now; a run counts as used after those that follow it."""
        for run in reversed(prefix.runs):
            self.store.touch(run.name)

    def forget(self, namespace: str | None) -> None:
        """Drop what is stored of a namespace, or all of this model."""
        self.store.drop_folder(self._model if namespace is None else self.folder(namespace))
        self._heads.clear()

    def paths(self) -> Iterator[tuple[str, IntArray]]:
        """(namespace, tokens) of each stored sequence that no other one continues, the last used
        first. Reads all runs' tokens; damaged files are left out."""
        heads: dict[tuple[str, str], RunHead] = {}
        for file in sorted(self.store.list(self._model), key=lambda file: -file.used_at):
            head = self._read_head(file.name)
            if head is not None and head.layout == self.layout.as_list():
                _, folder, name = file.name.split("/")
                heads[folder, name] = head
        begins = {(folder, head.parent, head.start) for (folder, _), head in heads.items()}
        for (folder, name), head in heads.items():
            end = head.start + len(head.tokens)
            if (folder, name, end) not in begins:  # none begins where it ends
                tokens = _path(heads, folder, name)
                if tokens is not None:
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
            digest = hashlib.blake2b(name, digest_size=_DIGEST_BYTES, key=key).hexdigest()
            hasher = hashlib.blake2b(name + b"\0", digest_size=_DIGEST_BYTES, key=key)
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            known = self._namespaces[namespace] = f"{self._model}/{digest}", hasher
        return known

    def _known_head(self, name: str) -> RunHead | None:
        """As `_read_head`, which is asked only once."""
        head = self._heads.get(name)
        if head is None and (head := self._read_head(name)) is not None:
            self._keep_head(name, head)
        return head

    def _read_head(self, name: str) -> RunHead | None:
        """None where the file is gone or cannot be read."""
        num_bytes = _HEAD_BYTES
        while True:
            try:
                data = self.store.get(name, num_bytes)
                return None if data is None else decode_head(data)
            except ShortHead as short:
                if num_bytes >= short.num_bytes:
                    return None  # the file ends there
                num_bytes = short.num_bytes
            except (BadRun, OSError):
                return None

    def _keep_head(self, name: str, head: RunHead) -> None:
        self._heads[name] = head
        if len(self._heads) > _MAX_HEADS:
            with contextlib.suppress(KeyError):  # another thread has cleared it
                self._heads.popitem(last=False)


def _path(heads: dict[tuple[str, str], RunHead], folder: str, name: str) -> IntArray | None:
    """The tokens from position 0 to the end of a run; None where a run before it is missing."""
    parts: list[IntArray] = []
    end: int | None = None
    while name:
        head = heads.get((folder, name))
        if head is None:
            return None
        parts.append(head.tokens if end is None else head.tokens[: end - head.start])
        name, end = head.parent, head.start
    return np.concatenate(parts[::-1]) if end == 0 else None


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
