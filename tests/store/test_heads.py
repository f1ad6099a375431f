"""Whatever a file's head says, with a right checksum or a wrong one: it is refused and put aside,
or it is the run that its name says; nothing else is disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest

from radixserve.arrays import IntArray
from radixserve.runner.kv_layout import KVLayout
from radixserve.store import BadRun, FolderStore, HostStore, KVRun, StoredPrefixes, encode_run
from radixserve.store.run_file import ShortHead, checksum_of, decode_head, encode_head

LAYOUT = KVLayout(2, 1, 2, "float32", 4)
MODEL = "0" * 32
FIXED = struct.Struct("<4sI4sII")
HEADER_AT = FIXED.size + 8
SEQUENCE = np.arange(3, 43, dtype=np.int32)
OTHER = np.arange(900, 930, dtype=np.int32)  # of another sequence, which is never damaged
NUMBERS = [
    "0", "-0", "-1", "-5", "1", "7", "20", "2147483647", "2147483648", "-2147483649", "1e999",
    "-1e999", "1e3", "20.0", "0.5", "1e-999", "NaN", "Infinity", "-Infinity", "9" * 40, "9" * 5000,
    "18446744073709551616", "true", "false", "null", "0x10", "01", "--1", "",
]  # fmt: skip
TEXTS = [
    '""', '"a"', '"\\u0000"', '"\\ud800"', '"../../x"', '"' + "x" * 5000 + '"',
    '"' + "é" * 300 + '"', '"\\"', '"a/b"', f'"{"0" * 32}"',
]  # fmt: skip


def kv_of(tokens: IntArray, start: int) -> np.ndarray:
    numbers = np.zeros((2, 2, len(tokens), 2), np.float32)
    numbers += (tokens * 100.0 + np.arange(start, start + len(tokens)))[None, None, :, None]
    return numbers.view(np.uint8).reshape(2, 2, len(tokens), 8)


def nested(rng: random.Random) -> str:
    depth = rng.choice([1, 2, 10, 1000, 30_000])
    kind = rng.choice(["[]", "{}", "[["])
    if kind == "[[":
        return "[" * depth  # never closed
    if kind == "[]":
        return "[" * depth + "]" * depth
    return '{"a":' * depth + "1" + "}" * depth


def value(rng: random.Random) -> str:
    """JSON of any type, or nearly JSON."""
    kind = rng.randrange(6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return nested(rng)
    items = [
        rng.choice([*NUMBERS[:24], *TEXTS]) for _ in range(rng.choice([0, 1, 3, 4, 5, 6, 200]))
    ]
    if kind == 4:
        return f"[{','.join(items)}]"
    return "{" + ",".join(f'"k{number}":{item}' for number, item in enumerate(items)) + "}"


def layout(rng: random.Random) -> str:
    """A layout with one value changed."""
    items = ["2", "2", "1", "2", '"float32"']
    if rng.random() < 0.3:
        items = ["1", "2", rng.choice(["[[1,2],[1,2]]", "[[1,2],[1]]", "[]", value(rng)]), items[4]]
    items[rng.randrange(len(items))] = value(rng)
    return f"[{','.join(items)}]"


def header(rng: random.Random, fields: dict[str, str]) -> bytes:
    fields = dict(fields)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        name = rng.choice(list(fields) or ["start"])
        change = rng.randrange(5)
        if change < 3:
            fields[name] = layout(rng) if name == "layout" and change else value(rng)
        elif change == 3:
            del fields[name]
        else:
            fields[rng.choice(["extra", name.upper(), ""])] = value(rng)
    text = "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in fields.items()) + "}"
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data if rng.random() < 0.95 else rng.choice([b"", b"[]", b"null", data[:-1]]))


def damaged(rng: random.Random, run: KVRun) -> bytes:
    """The file of a run with a head that is wrong in some way, mostly with right checksums."""
    fields = {
        "namespace": json.dumps(run.namespace),
        "start": str(run.start),
        "parent": json.dumps(run.parent),
        "layout": json.dumps(LAYOUT.as_list()),
    }
    tokens = run.tokens
    if rng.random() < 0.2:
        cut = rng.randrange(len(tokens))
        tokens = rng.choice([tokens[:cut], tokens + 1, -tokens, np.repeat(tokens, 9), tokens[::-1]])
    algorithm = rng.choice(["xxh3_64", "crc32"])
    head = bytearray(encode_head(header(rng, fields), tokens, algorithm))
    if rng.random() < 0.3:  # the numbers before the header
        magic, version, mark, size, count = FIXED.unpack(head[: FIXED.size])
        changed = [
            magic,
            rng.choice([version, version, 2, 4, 2**32 - 1]),
            rng.choice([mark, mark, b"xxh9", b"\0\0\0\0"]),
            rng.choice([size, 0, size - 1, size + 1, size + 64, 1 << 16, 2**31, 2**32 - 1]),
            rng.choice([count, 0, count - 1, count + 1, 1 << 16, (1 << 16) + 1, 2**32 - 5]),
        ]
        head[: FIXED.size] = FIXED.pack(*(number % 2**32 if isinstance(number, int) else number
                                          for number in changed))  # fmt: skip
    is_right = rng.random() < 0.8
    if is_right:
        checksum = checksum_of(bytes(head[: FIXED.size] + head[HEADER_AT:]), algorithm)
        head[FIXED.size : HEADER_AT] = checksum.to_bytes(8, "little")
    elif head:
        head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
    body = bytes(head) + kv_of(run.tokens, run.start).tobytes()
    body += checksum_of(body, algorithm).to_bytes(8, "little")
    return body if rng.random() < 0.9 else body[: rng.randrange(len(body) + 1)]


class Prefixes(StoredPrefixes):
    """Two sequences: one of two runs, of which the second is damaged, and one that is whole."""

    def __init__(self) -> None:
        super().__init__(HostStore(1 << 24), MODEL, LAYOUT)
        for tokens, count in ((SEQUENCE[:20], 20), (SEQUENCE, 20), (OTHER, 30)):
            stored = self.match(tokens, "ns")
            list(self.put(tokens, "ns", stored, [kv_of(tokens[-count:], stored.length)]))
        first, second = self.match(SEQUENCE, "ns").runs
        self.name = second.name
        self.run = KVRun("ns", 20, first.name.rpartition("/")[2], SEQUENCE[20:], np.empty(0))

    def again(self, data: bytes) -> StoredPrefixes:
        """As after a restart, with these bytes in the second run's place."""
        self.store.put(self.name, [data])
        return StoredPrefixes(self.store, MODEL, LAYOUT)


def fuzz(num_heads: int, seed: int) -> Counter[str]:
    rng, prefixes, counts = random.Random(seed), Prefixes(), Counter[str]()
    for _ in range(num_heads):
        data = damaged(rng, prefixes.run)
        try:
            decode_head(data)
        except BadRun as error:
            counts[re.sub("[0-9]+", "N", str(error).split(":")[0])[:24]] += 1
        except ShortHead:
            counts["short"] += 1
        again = prefixes.again(data)
        stored = again.match(SEQUENCE, "ns")
        assert stored.length >= 20
        if stored.length > 20:
            try:
                kv = again.read(stored.runs[1], SEQUENCE)
            except BadRun:
                counts["K/V refused"] += 1
            else:
                assert kv is not None
                assert (kv == kv_of(SEQUENCE[20 : stored.length], 20)).all()
                counts["accepted"] += 1
        elif again.num_refused:
            assert not prefixes.store.has(prefixes.name), "a refused file was not put aside"
            counts["refused"] += 1
        else:
            counts["of another version"] += 1
        if rng.random() < 0.05:
            prefixes.again(data)
            paths = [tokens.tolist() for _, tokens in again.paths()]
            assert OTHER.tolist() in paths
    assert again.match(OTHER, "ns").length == 30
    assert again.match(SEQUENCE, "ns").length >= 20
    return counts


def test_heads_that_are_wrong_in_every_way() -> None:
    counts = fuzz(2_000, 0)
    assert counts["refused"] > 1_000
    assert counts["accepted"] > 20  # those that say the same in another way
    assert counts["K/V refused"] > 20


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_heads_that_are_wrong_in_every_way() -> None:
    counts = fuzz(100_000, int(os.environ.get("RADIXSERVE_SEED", "1")))
    print(dict(counts.most_common()))
    assert counts["refused"] > 50_000


@pytest.mark.parametrize(
    "fields",
    [
        {"start": float("inf")},
        {"start": "1e999"},
        {"start": 20.0},
        {"start": True},
        {"start": -5},
        {"start": 10**30},
        {"start": None},
        {"namespace": 7},
        {"namespace": "another"},
        {"parent": ["x"]},
        {"parent": ""},
        {"layout": [2, 2, 1, 2, "int8"]},
        {"layout": [2.0, 2, 1, 2, "float32"]},
        {"layout": [[2]]},
        {"layout": 3},
    ],
)
def test_a_field_that_is_wrong_costs_its_file_alone(tmp_path: Any, fields: dict[str, Any]) -> None:
    """With a right checksum. The file is put aside, beside the store; it can be written again."""
    whole = Prefixes()
    store = FolderStore(tmp_path, 1 << 20)
    for file in whole.store.list():
        store.put(file.name, [bytes(whole.store.get(file.name) or b"")])
    known = {"namespace": "ns", "start": 20, "parent": whole.run.parent}
    text = json.dumps({**known, "layout": LAYOUT.as_list(), **fields})
    text = text.replace('"1e999"', "1e999")
    body = encode_head(text.encode(), SEQUENCE[20:], "crc32") + kv_of(SEQUENCE[20:], 20).tobytes()
    store.put(whole.name, [body + checksum_of(body, "crc32").to_bytes(8, "little")])
    prefixes = StoredPrefixes(store, MODEL, LAYOUT)
    assert prefixes.match(SEQUENCE, "ns").length == 20
    assert prefixes.num_refused == 1
    (aside,) = (tmp_path / "damaged").iterdir()
    assert aside.read_bytes().startswith(body[:100])
    store.check()
    stored = prefixes.match(SEQUENCE, "ns")
    list(prefixes.put(SEQUENCE, "ns", stored, [kv_of(SEQUENCE[20:], 20)]))
    assert StoredPrefixes(store, MODEL, LAYOUT).match(SEQUENCE, "ns").length == 40
    assert len(list(prefixes.paths())) == 2


def test_runs_that_name_each_other_as_parents_make_no_path() -> None:
    prefixes = Prefixes()
    folder = prefixes.folder("ns")
    names = [f"{digit * 32}-00000003" for digit in "ab"]
    for name, parent in (names, names[::-1]):
        run = KVRun("ns", 5, parent, SEQUENCE[:5], kv_of(SEQUENCE[:5], 5))
        prefixes.store.put(f"{folder}/{name}", encode_run(run, LAYOUT))
    assert sorted(len(tokens) for _, tokens in prefixes.paths()) == [30, 40]


def test_a_file_of_an_older_version_is_left_and_written_again() -> None:
    prefixes = Prefixes()
    old = b"RSKV" + (120).to_bytes(4, "little") + b'{"version": 2, "start": 1e999}' + bytes(100)
    again = prefixes.again(old)
    assert again.match(SEQUENCE, "ns").length == 20
    assert again.num_refused == 0
    stored = again.match(SEQUENCE, "ns")
    list(again.put(SEQUENCE, "ns", stored, [kv_of(SEQUENCE[20:], 20)]))
    assert again.match(SEQUENCE, "ns").length == 40


def test_a_file_that_a_newer_version_rewrites_before_it_is_read_is_left() -> None:
    prefixes = Prefixes()
    data = bytes(prefixes.store.get(prefixes.name) or b"")
    again = prefixes.again(data)
    stored = again.match(SEQUENCE, "ns")
    prefixes.store.put(prefixes.name, [data[:4] + b"\xff" + data[5:]])
    assert again.read(stored.runs[1], SEQUENCE) is None
    assert (again.num_refused, prefixes.store.has(prefixes.name)) == (0, True)
    assert again.known(SEQUENCE, "ns").length == 20
