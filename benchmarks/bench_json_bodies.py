"""For how long a request's JSON body holds the event loop, by parser.

    python benchmarks/bench_json_bodies.py [--megabytes 32] [--repeats 5] [--json]

Bodies have the server's largest size and its bounds on values, objects and texts. A parser in a
thread holds the GIL for all of its call, so its figure is the CPU time of the call. The last column
is the server's own: a child process parses, and the loop writes the body and reads the value; its
figure is the most CPU time that the loop takes without a wake between. In ms, the least of the
repeats: CPU time, since other work on the machine does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

from harness.arguments import parse
from harness.report import print_table

from radixserve.server.gate.json_body import JsonParser
from radixserve.server.gate.json_parse import MAX_IDS

_PART = 64 * 1024  # bytes of a body that arrive together
_TEXT = 4 << 20  # bytes of the longest text
Parse = Callable[[bytes], Any]


def make_bodies(size: int) -> dict[str, bytes]:
    """A body of each shape, of about `size` bytes or as many as the bounds allow."""

    def rows(item: str, count: int) -> bytes:
        """Lists of at most 1,000 items each."""
        row = f"[{','.join([item] * min(count, 1000))}]"
        return f"[{','.join([row] * max(1, count // 1000))}]".encode()

    def texts(unit: str, length: int = _TEXT - 64) -> bytes:
        text = f'"{unit * (length // len(unit.encode()))}"'
        return rows(text, max(1, size // (len(text.encode()) + 1)))

    def objects(count: int, member: str) -> bytes:
        fill = '"t":"' + "x" * max(0, size // count - len(member) - 9) + '"'
        return rows(f"{{{member},{fill}}}", count)

    digits = max(1, size // 131_000 - 4)
    nest = "[" * 190 + "]" * 190
    return {
        "plain texts": texts("abcdefgh"),
        "escapes": texts("\\u00e9"),
        "surrogate pairs": texts("\\ud83d\\ude00"),
        "backslashes": texts("\\\\"),
        "UTF-8": texts("\u65e5"),
        "texts of 1 KB with escapes": texts('a\\"b\\n\\u00e9', 1000),
        "texts of 250 bytes": texts("abcdefgh", 250),
        "objects": objects(65_000, '"a":1'),
        "long decimals": rows("0." + "7" * digits, 130_000),
        "long integers": rows("7" * min(4_300, size // 7_100), 7_000),
        "token ids": json.dumps({"prompt": list(range(MAX_IDS))}).encode(),
        "nests": f"[{','.join([nest] * 340)}]".encode(),
    }


def find_parsers() -> dict[str, Parse]:
    """Those that are installed."""
    found: dict[str, Parse] = {}
    if importlib.util.find_spec("msgspec"):
        import msgspec

        found["msgspec"] = msgspec.json.decode
    if importlib.util.find_spec("orjson"):
        import orjson

        found["orjson"] = orjson.loads
    from pydantic_core import from_json

    return {**found, "pydantic_core": from_json, "json": json.loads}


def call_s(parse: Parse, body: bytes) -> float:
    """CPU seconds of one call."""
    before = time.thread_time()
    with contextlib.suppress(ValueError):  # a refused shape
        parse(body)
    return time.thread_time() - before


async def hold_s(server: JsonParser, body: bytes) -> float:
    """The most CPU seconds of the loop between two of its wakes while the server parses."""
    parts = [body[start : start + _PART] for start in range(0, len(body), _PART)]
    task, longest = asyncio.ensure_future(server.parse(parts, "")), 0.0
    while not task.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
    task.exception()
    return longest


async def measure(
    bodies: dict[str, bytes], parsers: dict[str, Parse], repeats: int
) -> list[list[str | float]]:
    """Rows of a shape and each parser's figure, the server's last."""
    server = JsonParser()
    await server.parse([b'["' + b"a" * 40_000 + b'"]'], "")  # starts the process
    rows: list[list[str | float]] = []
    for shape, body in bodies.items():
        least = [float("inf")] * (len(parsers) + 1)
        for _ in range(repeats):
            for index, parse_body in enumerate(parsers.values()):
                gc.collect()
                least[index] = min(least[index], call_s(parse_body, body))
            gc.collect()
            least[-1] = min(least[-1], await hold_s(server, body))
        rows.append([f"{shape}, {len(body) / 1e6:.3g} MB", *(1000 * held for held in least)])
    server.close()
    await asyncio.sleep(0.1)  # for its transport
    return rows


def main() -> None:
    args = parse(__doc__, megabytes=32.0, repeats=5, json=False)
    bodies, parsers = make_bodies(int(args.megabytes * 1e6)), find_parsers()
    rows = asyncio.run(measure(bodies, parsers, args.repeats))
    columns = ["ms", *parsers, "child process"]
    print_table(args, columns, rows, ("msgspec", "orjson", "pydantic_core"))


if __name__ == "__main__":
    main()
