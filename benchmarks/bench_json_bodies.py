"""For how long a request's JSON body holds the event loop, by parser.

    python benchmarks/bench_json_bodies.py [--megabytes 32] [--repeats 5] [--json]

Bodies have the server's largest size and its bounds on values, objects and texts. Each parser runs
in a thread beside an event loop that wakes every millisecond: it keeps the GIL while it parses. The
last column is the server's own: a child process parses, the loop reads the result. Figures: the
longest gap between two wakes beyond the millisecond, in ms, the least of the repeats.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from harness.arguments import parse
from harness.report import print_table

from radixserve.server.gate.json_body import JsonParser
from radixserve.server.gate.json_parse import MAX_IDS

_TICK_S = 0.001
_TEXT = 4 << 20  # bytes of the longest text
Parse = Callable[[bytes], Any]


def make_bodies(size: int) -> dict[str, bytes]:
    """A body of each shape, of about `size` bytes or as many as the bounds allow."""

    def texts(unit: str, length: int = _TEXT - 64) -> bytes:
        text = f'"{unit * (length // len(unit.encode()))}"'
        count = max(1, size // (len(text.encode()) + 1))
        return f"[{','.join([text] * count)}]".encode()

    def objects(count: int, member: str) -> bytes:
        fill = '"t":"' + "x" * max(0, size // count - len(member) - 9) + '"'
        return f"[{','.join([f'{{{member},{fill}}}'] * count)}]".encode()

    def numbers(count: int, number: str) -> bytes:
        rows = ",".join([f"[{','.join([number] * 1000)}]"] * (count // 1000))
        return f"[{rows}]".encode()

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
        "long decimals": numbers(130_000, "0." + "7" * digits),
        "long integers": numbers(7_000, "7" * min(4_300, size // 7_100)),
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


async def longest_gap_s(work: Callable[[], Awaitable[Any]]) -> float:
    """The longest time between two wakes of the loop, less the wait itself, while `work` runs."""
    task, longest = asyncio.ensure_future(work()), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        longest = max(longest, time.perf_counter() - before - _TICK_S)
    task.exception()  # a parser may refuse a shape: then it was quick
    return longest


async def measure(
    bodies: dict[str, bytes], parsers: dict[str, Parse], repeats: int
) -> list[list[str | float]]:
    """Rows of a shape and the gap of each parser, the server's last, in ms."""
    server = JsonParser()
    await server.parse([b"[" + b"1," * 40_000 + b"1]"], "")  # starts the process
    rows: list[list[str | float]] = []
    for shape, body in bodies.items():
        works: list[Callable[[], Awaitable[Any]]] = [
            lambda parse=parse, body=body: asyncio.to_thread(parse, body)
            for parse in parsers.values()
        ]
        works.append(lambda body=body: server.parse([body], ""))
        least = [float("inf")] * len(works)
        for _ in range(repeats):
            for index, work in enumerate(works):
                gc.collect()
                least[index] = min(least[index], await longest_gap_s(work))
        rows.append([f"{shape}, {len(body) / 1e6:.3g} MB", *(1000 * gap for gap in least)])
    server.close()
    return rows


def main() -> None:
    args = parse(__doc__, megabytes=32.0, repeats=5, json=False)
    bodies, parsers = make_bodies(int(args.megabytes * 1e6)), find_parsers()
    rows = asyncio.run(measure(bodies, parsers, args.repeats))
    columns = ["longest gap, ms", *parsers, "child process"]
    print_table(args, columns, rows, ("msgspec", "orjson", "pydantic_core"))


if __name__ == "__main__":
    main()
