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
_MAX_TOKEN_ARRAYS = 65_536
_DIGEST_BYTES = 16


class StoredRun(NamedTuple):
    """A run on the path of a sequence."""

    name: str
    start: int
    num_tokens: int  # those that agree with the sequence


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
        self._tokens: OrderedDict[str, IntArray] = OrderedDict()  # of runs, by name

    def match(self, tokens: IntArray, namespace: str = "") -> StoredPrefix:
        """The longest stored prefix. O(tokens), and a small read for each run seen first."""
        folder, hasher = self.folder(namespace), self._hasher(namespace)
        runs: list[StoredRun] = []
        position, name = 0, ""
        while position < len(tokens):
            name = _name(folder, hasher, int(tokens[position]))
            run_tokens = self._tokens_of(name)
            count = 0 if run_tokens is None else _num_equal(run_tokens, tokens[position:])
            if not count:
                break
            runs.append(StoredRun(name, position, count))
            hasher.update(_as_bytes(tokens[position : position + count]))
            position += count
        return StoredPrefix(position, runs, name if position < len(tokens) else "")

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
            run = KVRun(namespace, begin, parent, own, run_kv)
            self.store.put(name, encode_run(run, self.layout))
            self._keep_tokens(name, own.copy())
            yield StoredRun(name, begin, end - begin)
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
            self._tokens.pop(run.name, None)
            return None
        try:
            stored = decode_run(data, self.layout)
        except BadRun as error:
            self._tokens.pop(run.name, None)
            self.store.drop(run.name)
            raise BadRun(f"{run.name} was dropped: {error}") from error
        own = tokens[run.start : run.start + run.num_tokens]
        if stored.start != run.start or not np.array_equal(stored.tokens[: len(own)], own):
            self._tokens.pop(run.name, None)  # another engine has written another continuation
            return None
        return stored.kv[:, :, : run.num_tokens]

    def touch(self, prefix: StoredPrefix) -> None:
        """Its runs were used now; a run counts as used after those that follow it."""
        for run in reversed(prefix.runs):
            self.store.touch(run.name)

    def forget(self, namespace: str | None) -> None:
        """Drop what is stored of a namespace, or all of this model."""
        self.store.drop_folder(self._model if namespace is None else self.folder(namespace))
        self._tokens.clear()

    def paths(self) -> Iterator[tuple[str, IntArray]]:
        """(namespace, tokens) of each stored sequence that no other one continues, the last used
        first. Reads all runs' tokens; damaged files are left out."""
        heads: dict[tuple[str, str], RunHead] = {}
        for file in sorted(self.store.list(self._model), key=lambda file: -file.used_at):
            head = self._head_of(file.name)
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
        key = self._model.encode()[:64]
        digest = hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, key=key)
        return f"{self._model}/{digest.hexdigest()}"

    def _hasher(self, namespace: str) -> hashlib.blake2b:
        key = self._model.encode()[:64]
        hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)
        hasher.update(namespace.encode() + b"\0")
        return hasher

    def _tokens_of(self, name: str) -> IntArray | None:
        tokens = self._tokens.get(name)
        if tokens is not None:
            return tokens
        head = self._head_of(name)
        if head is None:
            return None
        self._keep_tokens(name, head.tokens)
        return head.tokens

    def _head_of(self, name: str) -> RunHead | None:
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

    def _keep_tokens(self, name: str, tokens: IntArray) -> None:
        self._tokens[name] = tokens
        if len(self._tokens) > _MAX_TOKEN_ARRAYS:
            with contextlib.suppress(KeyError):  # another thread has cleared it
                self._tokens.popitem(last=False)


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
