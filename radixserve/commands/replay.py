"""`radixserve replay`: traces of requests through the cache and the scheduler, without a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__
from radixserve.checks import check_choice, check_float, check_int
from radixserve.commands.terminal import make_console
from radixserve.config import parse_bytes
from radixserve.errors import InvalidRequest

if TYPE_CHECKING:
    from radixserve.replay.caches import CacheSpec
    from radixserve.replay.paths import PathTable
    from radixserve.replay.serving import Serving
    from radixserve.replay.trace import Trace

_EPILOG = """\
A trace is a file of JSON lines, plain or gzip. A line has "tokens": [ids] or "prompt": text, and
where known "output_tokens", "output" or "output_length", "time" (seconds) or "timestamp"
(milliseconds), "session" and "namespace". Runtime(trace="requests.jsonl") records one. Traces of
block hashes ("hash_ids", "input_length", "output_length") are read, too.

Requests are replayed one after another; with --order they overlap, in the real scheduler, and the
time of a step is modelled.

examples:
  radixserve replay requests.jsonl
  radixserve replay requests.jsonl --cache-tokens 1M,4M,16M --policy lru,arc --sessions
  radixserve replay requests.jsonl --index radix,hash --page-size 1,16 --json
  radixserve replay requests.jsonl --order lpm,fcfs --cache-tokens 500k --plot hits.png
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="traces of requests through the cache and the scheduler, without a model",
        description="Replay traces of requests without a model: how much is reusable, what cache "
        "sizes, policies and page sizes make of it, and how far that is from the best possible.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="file of JSON lines")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--plot", metavar="FILE", help="draw pictures into FILE (needs matplotlib)")
    _add_trace_flags(parser)
    _add_cache_flags(parser)
    _add_order_flags(parser)
    return parser


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trace")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    group.add_argument(
        "--stitch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a trace of hashes, take a request's output from the request that continues it",
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("caches, each combination is replayed; lists with commas")
    group.add_argument(
        "--cache-tokens",
        metavar="SIZES",
        help="cache sizes in tokens, such as 250k,1M (default: five that suit the trace)",
    )
    group.add_argument(
        "--policy", default="lru", metavar="NAMES", help="eviction policies (default: lru)"
    )
    group.add_argument(
        "--page-size",
        default="1",
        metavar="SIZES",
        help="tokens a page; for the hash index a block (default: 1)",
    )
    group.add_argument(
        "--index",
        default="radix",
        metavar="NAMES",
        help="radix, or hash: whole blocks found by their hash (default: radix)",
    )
    group.add_argument(
        "--sessions",
        action="store_true",
        help="replay each once more with the hint which sessions are still open",
    )
    group.add_argument(
        "--lease-s",
        type=float,
        metavar="SECONDS",
        help="how long an idle open session is preferred (default: the cache's own)",
    )
    group.add_argument(
        "--bytes-per-token",
        metavar="SIZE",
        help='bytes of K/V a token, "128KB" works (default: 128 KiB, as Llama-3-8B in bfloat16)',
    )
    group.add_argument(
        "--model-config",
        metavar="PATH",
        help="take the bytes a token from a checkpoint folder or its config.json",
    )


def _add_order_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduler, with a modelled time of a step")
    group.add_argument("--order", metavar="NAMES", help="orders of admission: lpm,fcfs,dfs-weight")
    for flag, default, what in (
        ("--chunked-prefill-size", 2048, "prefill tokens a step"),
        ("--max-running-requests", 64, "requests that run at the same time"),
        ("--max-overtake", 64, "no request is overtaken by more than this many"),
    ):
        text = f"{what} (default: {default})"
        group.add_argument(flag, type=int, default=default, metavar="N", help=text)
    for flag, value, what in (
        ("--time-scale", 1.0, "arrivals are this many times as far apart as recorded"),
        ("--step-ms", 7.0, "milliseconds of every step"),
        ("--prefill-us", 27.0, "microseconds of a prefilled token"),
        ("--decode-us", 20.0, "microseconds of a decoded row"),
        ("--kv-ns", 50.0, "nanoseconds of a K/V token that a row reads"),
    ):
        text = f"{what} (default: {value:g})"
        group.add_argument(flag, type=float, default=value, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    from radixserve.replay import read_trace, study_trace
    from radixserve.replay.pictures import check_picture, draw
    from radixserve.replay.report import print_study, study_document

    specs, servings, size = _specs(args), _servings(args), _bytes_per_token(args)
    limit = None if args.limit is None else check_int("--limit", args.limit, 1)
    lease = args.lease_s
    if lease is not None:
        check_float("--lease-s", lease, 0.0, float("inf"))
    if args.plot is not None:
        check_picture(args.plot)
    studies = []
    for path in args.traces:
        trace = read_trace(path, limit=limit, stitch=args.stitch)
        caches = partial(specs, trace)
        studies.append(study_trace(trace, caches, servings, lease_s=lease, watch=_bar))
        if not args.json:
            console = make_console()
            if len(studies) > 1:
                console.print()
            print_study(console, studies[-1], size)
    if args.plot is not None:
        draw(studies, args.plot)
    if args.json:
        documents = [study_document(study, size) for study in studies]
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _specs(args: argparse.Namespace) -> Callable[[Trace, PathTable], Sequence[CacheSpec]]:
    """The caches for a trace. Everything is checked now, before a trace is read."""
    from radixserve.replay import cross, parse_tokens
    from radixserve.replay.study import default_sizes

    sizes = None
    if args.cache_tokens is not None:
        sizes = [parse_tokens(text) for text in _items("--cache-tokens", args.cache_tokens)]
    pages = [_page_size(text) for text in _items("--page-size", args.page_size)]
    policies, indexes = _items("--policy", args.policy), _items("--index", args.index)
    cross([max(pages)], policies, pages, indexes, use_sessions=False)  # the names are checked
    make = partial(cross, policies=policies, page_sizes=pages, indexes=indexes)
    if sizes is not None:
        given = make(sizes, use_sessions=args.sessions)
        return lambda _trace, _paths: given

    def suitable(trace: Trace, paths: PathTable) -> Sequence[CacheSpec]:
        fitting = sorted({max([size, *pages]) for size in default_sizes(paths, trace)})
        return make(fitting, use_sessions=args.sessions)

    return suitable


def _servings(args: argparse.Namespace) -> list[Serving]:
    from radixserve.replay.serving import ORDERS, Serving, StepModel

    if args.order is None:
        return []
    orders = _items("--order", args.order)
    for order in orders:
        check_choice("--order", order, ORDERS)
    step = StepModel(
        fixed_s=check_float("--step-ms", args.step_ms, 0.0, 1e6) / 1e3,
        prefill_token_s=check_float("--prefill-us", args.prefill_us, 0.0, 1e9) / 1e6,
        decode_row_s=check_float("--decode-us", args.decode_us, 0.0, 1e9) / 1e6,
        kv_token_s=check_float("--kv-ns", args.kv_ns, 0.0, 1e12) / 1e9,
    )
    make = partial(
        Serving,
        chunked_prefill_size=check_int("--chunked-prefill-size", args.chunked_prefill_size, 1),
        max_running_requests=check_int("--max-running-requests", args.max_running_requests, 1),
        max_overtake=check_int("--max-overtake", args.max_overtake, 0),
        time_scale=check_float("--time-scale", args.time_scale, 0.0, 1e6),
        step=step,
    )
    return [make(order=order) for order in orders]


def _bytes_per_token(args: argparse.Namespace) -> int:
    from radixserve.replay.caches import DEFAULT_KV_BYTES, kv_bytes_per_token

    if args.model_config is not None:
        if args.bytes_per_token is not None:
            raise InvalidRequest("give --bytes-per-token or --model-config, not both")
        return kv_bytes_per_token(args.model_config)
    if args.bytes_per_token is None:
        return DEFAULT_KV_BYTES
    text: str = args.bytes_per_token
    return parse_bytes(text, "--bytes-per-token")


def _items(flag: str, text: str) -> list[str]:
    """The parts of a list with commas, each once."""
    items = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not items:
        raise InvalidRequest(f"{flag} needs at least one value")
    return items


def _page_size(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(f"--page-size must be numbers of tokens such as 1,16, got {text!r}")
    return check_int("--page-size", int(text), 1, 4096)


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[], object]]:
    """A progress bar where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="req", desc=title, dynamic_ncols=True, leave=False) as bar:
        yield bar.update
