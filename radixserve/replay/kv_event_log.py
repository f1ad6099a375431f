"""`stored_requests`: requests, as far as recorded KV events of vLLM or SGLang show them.

A record has one batch of events after another, as it was published: the msgpack payloads one behind
the other, or a batch a line as JSON. Batches and events are maps or arrays:

    {"ts": 1.5, "events": [{"type": "BlockStored", "block_hashes": [7], "token_ids": [...], ...}]}
    [1.5, [["BlockStored", [7], null, [...], 16, null]]]

An event tells which blocks were computed, with their tokens, and none tells what was reused. So a
request is what stored blocks behind others that were cached: its prompt are all tokens up to the
last new block. A request that found everything cached left no event, and tokens behind the last
whole block are unknown. Blocks that are stored one by one, soon after the first ones, are the
answer's.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.replay.lines import Line, open_plain, raw_lines, warn_cut_off
from radixserve.replay.trace import block_tokens

_log = logging.getLogger("radixserve")

_GAP_S = 2.0  # between two steps that store blocks of one request
_ANSWER_S = 600.0  # SGLang stores an answer when it is complete
_FIELDS = {  # in the order of events that are arrays
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_JSON_BATCH = re.compile(rb'\s*(?:\[\s*[\d.eE+]+\s*,\s*\[|\{[^\[{]*"events"\s*:\s*\[)')
_OTHER_LAYERS = ("sliding", "mamba", "chunked")  # kinds of groups whose blocks are stored beside


def is_event_log(start: bytes) -> bool:
    """Whether a file that begins so has batches of KV events."""
    return b"\x81" <= start[:1] <= b"\x9f" or _JSON_BATCH.match(start) is not None


class _Block(NamedTuple):
    parent: Any  # the hash of the block before; None: the first one
    tokens: tuple[int, ...]
    namespace: str


class _Piece(NamedTuple):
    """Blocks of one path that one batch stores."""

    parent: Any
    hashes: list[Any]
    is_one_by_one: bool  # whether each block has an event of its own


@dataclass(slots=True)
class _Storing:
    """A request that may store more blocks."""

    line: Line
    began: float
    last: float
    num_prompt: int  # tokens
    pieces: int = 1
    hashes: list[Any] = field(default_factory=list)


def stored_requests(path: str) -> Iterator[Line]:
    """The requests of a record, as lines of a trace. Raises InvalidRequest, with the line or the
    number of the batch, for what is not a batch of events. About 250 bytes a block."""
    blocks = _Blocks()
    number = 0
    for line, batch in _batches(path):
        number += 1
        seconds, events, rank = _batch_parts(line, batch)
        yield from blocks.add(line, seconds, events, rank)
    yield from blocks.close()
    if blocks.num_unknown:
        _log.warning(
            "%s: %d paths begin in blocks that were stored before the record",
            path,
            blocks.num_unknown,
        )
    if not number:
        raise Line(path, 1, {}).error("the record has no batch of events")


def _batches(path: str) -> Iterator[tuple[Line, Any]]:
    with closing(open_plain(path)) as file:
        is_json = file.read(1)[:1] < b"\x80"
    if is_json:
        for number, data in enumerate(raw_lines(path), 1):
            line = Line(path, number, {})
            if data.strip():
                try:
                    yield line, json.loads(data)
                except (ValueError, RecursionError) as error:
                    raise line.error(f"not a batch of KV events: {error}") from None
        return
    import msgpack

    with closing(open_plain(path)) as file:
        unpacker = msgpack.Unpacker(file, strict_map_key=False, unicode_errors="replace")
        number = end = 0
        while True:
            number += 1
            try:
                batch = unpacker.unpack()
            except msgpack.OutOfData:
                if file.tell() > end:
                    warn_cut_off(path, number)
                return
            except (ValueError, TypeError, EOFError, OSError, zlib.error) as error:
                raise Line(path, number, {}).error(f"not a batch of KV events: {error}") from None
            end = unpacker.tell()
            yield Line(path, number, {}), batch


def _batch_parts(line: Line, batch: Any) -> tuple[float, list[dict[str, Any]], Any]:
    """Seconds, events as maps, and the rank of a batch. Raises InvalidRequest."""
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")]
    is_good = isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[1], list)
    if not is_good or isinstance(batch[0], bool) or not isinstance(batch[0], int | float):
        raise line.error(
            f"a batch of KV events has a time and a list of events, got {shown(batch)}"
        )
    rank = batch[2] if len(batch) > 2 else None
    if not isinstance(rank, int | None):
        raise line.error(f"data_parallel_rank must be an integer, got {shown(rank)}")
    return float(batch[0]), [_event(line, event) for event in batch[1]], rank


def _event(line: Line, event: Any) -> dict[str, Any]:
    if isinstance(event, list) and event and event[0] in [*_FIELDS]:
        event = dict(zip(("type", *_FIELDS[event[0]]), event, strict=False))
    if not isinstance(event, dict) or event.get("type") not in [*_FIELDS]:
        raise line.error(f"an event must be one of {', '.join(_FIELDS)}, got {shown(event)}")
    return event


class _Blocks:
    """The blocks that were ever stored, and the requests that store some."""

    def __init__(self) -> None:
        self._blocks: dict[Any, _Block] = {}
        self._storing: dict[Any, _Storing] = {}  # by (rank, last hash), the last used one last
        self._group: Any = None  # the one whose blocks count, of a model with several
        self.num_unknown = 0

    def add(
        self, line: Line, seconds: float, events: Sequence[Mapping[str, Any]], rank: Any
    ) -> Iterator[Line]:
        """Add a batch. Yields the requests that store nothing more."""
        while self._storing:
            oldest = next(iter(self._storing))
            if self._storing[oldest].last >= seconds - _ANSWER_S:
                break
            yield self._request(self._storing.pop(oldest))
        pieces: dict[Any, _Piece] = {}  # by last hash
        for event in events:
            if event["type"] == "BlockStored" and self._counts(event):
                self._store(line, event, pieces)
        for piece in pieces.values():
            yield from self._extend(line, seconds, rank, piece)

    def close(self) -> Iterator[Line]:
        yield from map(self._request, self._storing.values())
        self._storing.clear()

    def _counts(self, event: Mapping[str, Any]) -> bool:
        """Whether these are blocks of the tier and the layers that requests are told by."""
        kind = event.get("kv_cache_spec_kind") or ""
        if event.get("medium") not in (None, "GPU") or str(kind).startswith(_OTHER_LAYERS):
            return False
        if self._group is None:
            self._group = event.get("group_idx")
        return event.get("group_idx") == self._group

    def _store(self, line: Line, event: Mapping[str, Any], pieces: dict[Any, _Piece]) -> None:
        hashes, ids, size = _stored_blocks(line, event)
        parent = above = event.get("parent_block_hash")
        if parent is not None and parent not in self._blocks:
            self.num_unknown += 1
            seed = zlib.crc32(repr(parent).encode())
            self._blocks[parent] = _Block(None, tuple(block_tokens(seed, size).tolist()), "")
        namespace = self._blocks[parent].namespace if parent is not None else _namespace(event)
        keys = event.get("extra_keys") or [None] * len(hashes)
        for number, (one, key) in enumerate(zip(hashes, keys, strict=True)):
            tokens = ids[number * size : (number + 1) * size]
            if key:  # a picture, or a salt: the same tokens are another block
                tokens[0] ^= zlib.crc32(repr(key).encode()) >> 1
            self._blocks[one] = _Block(above, tuple(tokens), namespace)
            above = one
        before = pieces.pop(parent, None)
        is_single = len(hashes) == 1 and (before is None or before.is_one_by_one)
        joined = [*before.hashes, *hashes] if before else hashes
        pieces[hashes[-1]] = _Piece(before.parent if before else parent, joined, is_single)

    def _extend(self, line: Line, seconds: float, rank: Any, piece: _Piece) -> Iterator[Line]:
        end = (rank, piece.hashes[-1])
        one = self._storing.pop((rank, piece.parent), None)
        if end in self._storing:  # the same blocks again
            yield self._request(self._storing.pop(end))
        if one is not None:
            is_whole_answer = piece.is_one_by_one and len(piece.hashes) > 1 and one.pieces == 1
            if seconds - one.last > (_ANSWER_S if is_whole_answer else _GAP_S):
                yield self._request(one)
                one = None
        num_tokens = sum(len(self._blocks[each].tokens) for each in piece.hashes)
        if one is None:
            num_before = sum(len(block.tokens) for block in self._path(line, piece.parent))
            one = _Storing(line, seconds, seconds, num_before + num_tokens)
        else:
            one.pieces += 1
            if not piece.is_one_by_one:
                one.num_prompt += num_tokens
        one.last = seconds
        one.hashes += piece.hashes
        self._storing[end] = one

    def _path(self, line: Line, last: Any) -> list[_Block]:
        """The blocks up to one, the last one first. Raises InvalidRequest where they are a ring."""
        path: list[_Block] = []
        while last is not None:
            if len(path) == len(self._blocks):
                raise line.error("a stored block is behind itself")
            path.append(self._blocks[last])
            last = path[-1].parent
        return path

    def _request(self, one: _Storing) -> Line:
        path = self._path(one.line, one.hashes[-1])
        tokens = [token for block in reversed(path) for token in block.tokens]
        fields = {
            "tokens": tokens[: one.num_prompt],
            "output_tokens": tokens[one.num_prompt :],
            "time": one.began,
            "namespace": path[-1].namespace,
        }
        return one.line._replace(fields=fields)


def _stored_blocks(line: Line, event: Mapping[str, Any]) -> tuple[list[Any], list[int], int]:
    """The hashes, token ids and block size of a BlockStored. Raises InvalidRequest."""
    hashes, ids, size = map(event.get, ("block_hashes", "token_ids", "block_size"))
    if (
        not (isinstance(hashes, list) and isinstance(ids, list) and isinstance(size, int))
        or min(size, len(hashes)) < 1
        or len(ids) != size * len(hashes)
    ):
        raise line.error("BlockStored must have block_size token ids for each of its hashes")
    if not all(isinstance(one, int) and 0 <= one < 2**31 for one in ids):
        raise line.error("token ids must be integers from 0 to 2**31 - 1")
    above, keys = event.get("parent_block_hash"), event.get("extra_keys")
    if not all(isinstance(block_hash, int | str | bytes) for block_hash in hashes):
        raise line.error("block hashes must be integers, text or bytes")
    if not isinstance(above, int | str | bytes | None):
        raise line.error(f"parent_block_hash must be a block hash, got {shown(above)}")
    if keys and not (isinstance(keys, list) and len(keys) == len(hashes)):
        raise line.error("extra_keys must be a list with a value for each block hash")
    return hashes, ids, size


def _namespace(event: Mapping[str, Any]) -> str:
    """Of the first block of a path: its adapter and its salt."""
    lora = event.get("lora_name") or event.get("lora_id") or ""
    return ":".join(str(part) for part in (lora, event.get("cache_salt")) if part)
