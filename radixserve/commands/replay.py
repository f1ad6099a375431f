"""`radixserve replay`: replays traces of requests through cache and scheduler, without a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__
from radixserve.checks import check_choice, check_float, check_int
from radixserve.commands.flags import add_command, add_flags
from radixserve.commands.terminal import as_path, make_console
from radixserve.config import ADMISSIONS, EVICTION_POLICIES, SWA_FULL_TOKENS_RATIO, parse_bytes
from radixserve.errors import InvalidRequest

if TYPE_CHECKING:
    from radixserve.replay.caches import CacheSpec, WindowSpec
    from radixserve.replay.paths import PathTable
    from radixserve.replay.replicas import Cluster
    from radixserve.replay.scheduled import Serving, StepModel
    from radixserve.replay.trace import Trace

_EPILOG = """\
A trace is a file of JSON lines, plain or gzip. A line has "tokens": [ids] or "prompt": text, and
where known "output_tokens", "output" or "output_length", "time" (seconds) or "timestamp"
(milliseconds), "session" and "namespace". Runtime(trace="requests.jsonl") records one. Traces of
block hashes ("hash_ids", "input_length", "output_length") are read, too, and so are request logs of
vLLM and SGLang and recorded KV events. workload:NAME stands for a made one: chat, multi-turn, rag,
code, summaries, agents, random, or all; workload:rag:7 has another seed.

Requests are replayed one after another; with --order they overlap, in the real scheduler, and the
time of a step is modelled.

examples:
  radixserve replay requests.jsonl
  radixserve replay requests.jsonl --advise --model-config ./my-checkpoint
  radixserve replay requests.jsonl --diagnose --tokenizer ./my-checkpoint
  radixserve replay workload:all --baseline
  radixserve replay requests.jsonl --cache-tokens 1M,4M,16M --policy lru,arc --sessions
  radixserve replay requests.jsonl --index radix,hash --page-size 1,16 --json
  radixserve replay requests.jsonl --order lpm,fcfs --cache-tokens 500k --plot hits.png
  radixserve replay requests.jsonl --closed-loop --admission greedy,priced --cache-tokens 500k
  radixserve replay requests.jsonl --replicas 4,16 --cache-tokens 500k
  radixserve replay requests.jsonl --replicas 8 --cache-tokens 500k --failures 3600
  radixserve replay requests.jsonl --replicas 4 --cache-tokens 500k \\
      --autoscaling max_replicas=16,target_ongoing_requests=4,downscale_delay_s=120
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "replay",
        "traces of requests through the cache and the scheduler, without a model",
        "Replay traces of requests without a model: how much is reusable, what cache "
        "sizes, policies and page sizes make of it, and how far that is from the best possible.",
        _EPILOG,
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="file of JSON lines; - is standard input; workload:NAME is a made one",
    )
    trace = parser.add_argument_group("trace")
    caches = parser.add_argument_group("caches, each combination is replayed; lists with commas")
    cluster = parser.add_argument_group(
        "replicas, in place of the other replays: --cache-tokens is that of each one"
    )
    scheduler = parser.add_argument_group("scheduler, with a modelled time of a step")
    flags = add_flags(cluster, _CLUSTER)
    for group, usages in ((parser, _OUTPUTS), (trace, _TRACE), (caches, _CACHES)):
        flags += add_flags(group, usages)
    stitch = "take an output of unknown tokens from the request that continues this one"
    flags += add_flags(
        trace, {"--stitch": stitch}, action=argparse.BooleanOptionalAction, default=True
    )
    for usage, (text, value) in _LISTS.items():
        flags += add_flags(caches, {usage: f"{text} (default: {value})"}, default=value)
    flags += add_flags(scheduler, {"--order NAMES": "orders of admission: lpm,fcfs,dfs-weight"})
    flags += add_flags(scheduler, _LOOP)
    options = [(usage, *flag[:2]) for usage, flag in _SERVING.items()]
    options += [(usage, *flag[:2]) for usage, flag in _STEP.items()]
    for usage, text, number in options:
        text += "" if number is None else f" (default: {number:g})"
        flags += add_flags(scheduler, {usage: text}, default=number)
    parser.mark_rare(flag for flag in flags if flag.option_strings[0] not in _COMMON)
    return parser


DEFAULT_INTERVAL = 512  # tokens between kept recurrent states, with --state-tokens
_COMMON = (
    "--json",
    "--advise",
    "--diagnose",
    "--baseline",
    "--plot",
    "--limit",
    "--cache-tokens",
    "--policy",
    "--page-size",
    "--index",
    "--sessions",
    "--bytes-per-token",
    "--model-config",
    "--order",
    "--closed-loop",
    "--replicas",
)
_OUTPUTS = {
    "--json": "print one JSON document instead",
    "--advise": "instead of the other replays: the cache size that this traffic needs, what more "
    "memory or another cache is worth; sizes in --cache-tokens are replayed and compared",
    "--diagnose": "instead of the other replays: what makes prompts part although the same text "
    "follows, and what mending it is worth; --page-size is that of a cache of whole pages",
    "--tokenizer MODEL": "with --diagnose, the tokenizer of a log of token ids, to show texts: a "
    "checkpoint folder or GGUF file",
    "--baseline": "instead of the other replays: hit rate and time to first token with a cache and "
    "with none, a row for each trace",
    "--plot FILE": "draw plots into FILE (needs matplotlib)",
    "--save-plot FILE": "with --advise: draw the hit rate by size; with the first of "
    "--cache-tokens, by default the advised size, why tokens are computed over time, the time to "
    "the first token with and without the cache, and the tree with its hot and lost edges",
    "--report FILE": "with --advise or --diagnose: write tables and pictures into one HTML file",
}
_TRACE = {"--limit N": "only the first N requests; of a made trace so many (default: 400)"}
_CACHES = {
    "--cache-tokens SIZES": "cache sizes in tokens, such as 250k,1M "
    "(default: five that suit the trace)",
    "--state-checkpoints N": "also replay each radix cache for a model with recurrent layers, "
    "whose states are kept every N tokens, where prompts branch and where they end",
    "--states N": "recurrent states that have room (default: 64, and 2 for each interval)",
    "--state-tokens SIZES": "memory of a state, in tokens of K/V, such as 3168,10: states take a "
    "third of the cache's memory; one replay keeps them by the rule for this size, another one "
    "every --state-checkpoints tokens (512)",
    "--windows SIZE:SHARE": "also replay each radix cache, with the same memory, for a model in "
    "which layers with a window of SIZE positions have this share of the K/V, such as 1024:0.83",
    "--swa-full-tokens-ratio X": "with --windows, tokens whose K/V of such layers has room, as a "
    "part of all tokens (default: 0.5)",
    "--sessions": "also replay each cache with the sessions of the trace, open until they end",
    "--lease-s SECONDS": "how long an idle open session is preferred (default: the cache's own)",
    "--bytes-per-token SIZE": 'bytes of K/V per token, "128KB" works '
    "(default: 128 KiB, as Llama-3-8B in bfloat16)",
    "--model-config PATH": "compute the bytes per token from a checkpoint folder or its "
    "config.json",
    "--kv-dtype NAME": 'with --model-config, the dtype of K/V: "auto" (that of the config), '
    '"bfloat16", "int8" or "fp8_e4m3"',
}
_MODES = (
    "--advise",
    "--diagnose",
    "--baseline",
    "--closed-loop",
)  # kinds of replays, of which one is given
_OF_ADVICE = (  # of the caches' and the scheduler's options
    "--cache-tokens SIZES",
    "--bytes-per-token SIZE",
    "--model-config PATH",
    "--kv-dtype NAME",
    "--chunked-prefill-size N",
)
_CLUSTER = {
    "--replicas NUMBERS": "numbers of replicas, such as 4,16,64; each is compared with one cache "
    "of the size of all replicas together",
    "--event-delay-s SECONDS": "delay of cache events on their way to the router, in time of the "
    "trace (default: 0.1)",
    "--failures SECONDS": "a replica's mean time to failure; its requests continue on others",
    "--autoscaling SETTINGS": "fields of Ray Serve's autoscaling_config, such as "
    "max_replicas=16,target_ongoing_requests=4; --replicas is their number at the beginning",
    "--start-s SECONDS": "time until an added or lost replica serves (default: 60)",
}
_LISTS = {  # by usage: help, default
    "--policy NAMES": (f"eviction policies: {','.join(EVICTION_POLICIES)}", "lru"),
    "--page-size SIZES": ("tokens a page; for the hash index a block", "1"),
    "--index NAMES": ("radix, hash (whole blocks found by their hash), or off", "radix"),
}
_SERVING: dict[str, tuple[str, float | None, float]] = {  # by usage: help, default, least
    "--chunked-prefill-size N": ("prefill tokens a step", 2048, 1),
    "--max-running-requests N": ("requests that run at the same time", 64, 1),
    "--max-overtake N": (
        "no request is overtaken by more than this many (default: 64; with priced admission 4096)",
        None,
        0,
    ),
    "--time-scale X": ("arrivals are this many times as far apart as recorded", 1.0, 0.0),
}
_LOOP = {
    "--closed-loop": "instead of the other replays: a session sends its next request a think time "
    "after the last answer, which is that of the trace",
    "--admission NAMES": "greedy,priced: with priced, a request waits if it would evict K/V that "
    "is worth more (default: priced)",
    "--prefill-rate X": "prefill tokens per second, instead of --prefill-us",
    "--decode-rate X": "tokens per second of a request that runs alone, instead of --step-ms",
    "--step-costs FILE": "seconds of a step as JSON: fixed_s, prefill_token_s, decode_row_s, "
    "kv_token_s",
}
_STEP = {  # by usage: help, default, units a second, field of StepModel
    "--step-ms X": ("milliseconds of every step", 7.0, 1e3, "fixed_s"),
    "--prefill-us X": ("microseconds of a prefilled token", 27.0, 1e6, "prefill_token_s"),
    "--decode-us X": ("microseconds of a decoded row", 20.0, 1e6, "decode_row_s"),
    "--kv-ns X": ("nanoseconds of a K/V token that a row reads", 50.0, 1e9, "kv_token_s"),
}


def run(args: argparse.Namespace) -> int:
    from radixserve.replay import study_document, study_trace
    from radixserve.replay.plots import check_plot_path, draw
    from radixserve.replay.report import print_study

    _check_combination(args)
    specs, servings, size = _specs(args), _servings(args), _bytes_per_token(args)
    limit, lease = args.limit, args.lease_s
    if limit is not None:
        check_int("--limit", limit, 1)
    if lease is not None:
        check_float("--lease-s", lease, 0.0, float("inf"))
    of_report = "advice.svg" if args.advise and args.report is not None else None
    for picture in (args.plot, args.save_plot, of_report):
        if picture is not None:
            check_plot_path(picture)
    for path in (args.plot, args.save_plot, args.report):  # now, not after an hour of replays
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise InvalidRequest(f"{path} cannot be written: its folder does not exist")
    if args.replicas is not None:
        return _run_replicas(args)
    if args.closed_loop:
        return _run_closed_loops(args)
    if args.advise:
        return _run_advice(args)
    if args.diagnose:
        return _run_diagnosis(args)
    if args.baseline:
        return _run_baseline(args)
    studies, documents = [], []
    for trace in _traces(args):
        caches = partial(specs, trace)
        studies.append(study_trace(trace, caches, servings, lease_s=lease, watch=_bar))
        documents.append(study_document(studies[-1], size))
        if not args.json:
            console = make_console()
            if len(studies) > 1:
                console.print()
            print_study(console, documents[-1])
    if args.plot is not None:
        draw(studies, args.plot)
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _check_combination(args: argparse.Namespace) -> None:
    """Raise InvalidRequest for an option that has no effect with the others."""
    lists = {usage: default for usage, (_, default) in _LISTS.items()}
    scheduling = {usage: flag[1] for usage, flag in {**_SERVING, **_STEP}.items()}
    mode = _mode(args)
    if mode is not None:
        others: dict[str, Any] = dict.fromkeys(("--plot FILE", "--replicas NUMBERS"))
        others |= {flag: False for flag in _MODES if flag != mode}
        _refuse(args, others, f"does not go with {mode}")
    if not args.closed_loop:
        _refuse(args, {"--admission NAMES": None}, "needs --closed-loop")
    if args.order is None and mode is None:
        _refuse(args, dict.fromkeys(list(_LOOP)[2:]) | scheduling, "needs --order")
    if args.advise:
        unused: dict[str, Any] = dict.fromkeys(("--order NAMES", *_CACHES))
        unused |= {"--sessions": False} | {usage: flag[1] for usage, flag in _SERVING.items()}
        unused = {usage: value for usage, value in unused.items() if usage not in _OF_ADVICE}
        _refuse(args, unused, "does not go with --advise")
    if not args.diagnose:
        _refuse(args, {"--tokenizer MODEL": None}, "needs --diagnose")
    else:
        unused = dict.fromkeys(("--order NAMES", *_CACHES)) | {"--sessions": False}
        unused |= scheduling | dict.fromkeys(list(_LOOP)[2:])
        unused |= {usage: lists[usage] for usage in ("--policy NAMES", "--index NAMES")}
        _refuse(args, unused, "does not go with --diagnose")
    if not args.advise:
        _refuse(args, {"--save-plot FILE": None}, "needs --advise")
        if not args.diagnose:
            _refuse(args, {"--report FILE": None}, "needs --advise or --diagnose")
    if args.windows is None:
        _refuse(args, {"--swa-full-tokens-ratio X": None}, "needs --windows")
    if args.state_checkpoints is None and args.state_tokens is None:
        _refuse(args, {"--states N": None}, "needs --state-checkpoints or --state-tokens")
    if not args.sessions:
        _refuse(args, {"--lease-s SECONDS": None}, "needs --sessions")
    steps = {usage: flag[1] for usage, flag in _STEP.items()}
    if args.step_costs is not None:
        _refuse(args, steps, "does not go with --step-costs")
    if args.prefill_rate is not None:
        _refuse(
            args, {"--prefill-us X": steps["--prefill-us X"]}, "does not go with --prefill-rate"
        )
    if args.decode_rate is not None:
        _refuse(args, {"--step-ms X": steps["--step-ms X"]}, "does not go with --decode-rate")
    if args.replicas is None:
        _refuse(args, dict.fromkeys(_CLUSTER), "needs --replicas")
        return
    unlike = dict.fromkeys(("--plot FILE", "--order NAMES", *_CACHES)) | {"--sessions": False}
    del unlike["--cache-tokens SIZES"]
    _refuse(args, unlike | lists, "does not go with --replicas")


def _mode(args: argparse.Namespace) -> str | None:
    """The flag among _MODES that is given."""
    return next((flag for flag in _MODES if _given(args, flag)[2]), None)


def _refuse(args: argparse.Namespace, defaults: Mapping[str, Any], reason: str) -> None:
    """Raise InvalidRequest for the first of these options, {usage: default}, that is given."""
    for usage, default in defaults.items():
        flag, _, value = _given(args, usage)
        if value != default:
            raise InvalidRequest(f"{flag} {reason}")


def _run_replicas(args: argparse.Namespace) -> int:
    from radixserve.replay import parse_tokens
    from radixserve.replay.caches import CacheSpec
    from radixserve.replay.report import (
        changes_finding,
        cluster_finding,
        replay_clusters,
    )

    if args.cache_tokens is None:
        raise InvalidRequest("--replicas needs --cache-tokens, the size of each one's cache")
    sizes = [parse_tokens(text) for text in _items("--cache-tokens", args.cache_tokens)]
    clusters = _clusters(args)
    specs = [CacheSpec(size) for size in sizes]
    documents = []
    for trace in _traces(args):
        rows = replay_clusters(trace, specs, clusters, watch=_bar)
        documents.append({"trace": trace.name, "requests": len(trace), "replicas": rows})
        if not args.json:
            console = make_console()
            cluster_finding(documents[-1]).print(console)
            if (changes := changes_finding(documents[-1])) is not None:
                changes.print(console)
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _run_closed_loops(args: argparse.Namespace) -> int:
    from radixserve.replay import build_paths
    from radixserve.replay.report import loop_finding, replay_closed_loops

    specs, servings, documents = _specs(args), _servings(args), []
    for trace in _traces(args):
        paths = build_paths(trace)
        rows = replay_closed_loops(
            trace, paths, specs(trace, paths), servings, lease_s=args.lease_s, watch=_bar
        )
        documents.append({"trace": trace.name, "requests": len(trace), "closed_loops": rows})
        if not args.json:
            loop_finding(documents[-1]).print(make_console())
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _traces(args: argparse.Namespace) -> Iterator[Trace]:
    """The traces that the command line names, one after another."""
    from radixserve.replay import read_trace
    from radixserve.replay.workloads import PREFIX, expand_names, read_workload

    for name in expand_names(args.traces):
        if name.startswith(PREFIX):
            yield read_workload(name, args.limit)
        else:
            yield read_trace(as_path(name), limit=args.limit, stitch=args.stitch)


def _run_advice(args: argparse.Namespace) -> int:
    from radixserve.replay import parse_tokens
    from radixserve.replay.advice_plots import Pictured, draw_advice, write_report
    from radixserve.replay.edges import edge_finding
    from radixserve.replay.losses import losses_over_time
    from radixserve.replay.sizing import Pricing, advice_document, advice_findings, advise

    serving = _servings(args)[0]
    pricing = Pricing(
        bytes_per_token=_bytes_per_token(args),
        step=serving.step,
        chunk=serving.chunked_prefill_size,
    )
    sizes = []
    if args.cache_tokens is not None:
        sizes = [parse_tokens(text) for text in _items("--cache-tokens", args.cache_tokens)]
    documents: list[dict[str, Any]] = []
    contents: list[Any] = []
    for trace in _traces(args):
        kinds = _other_kinds(args, has_sessions=trace.num_sessions > 0)
        advice = advise(trace, pricing, sizes=sizes, kinds=kinds, watch=_bar)
        documents.append(advice_document(advice))
        findings = advice_findings(documents[-1])
        if not args.json:
            for finding in findings:
                finding.print(make_console())
        if args.save_plot is not None or args.report is not None:
            size = (sizes or [advice.recommended.cache_tokens])[0]
            pictured = Pictured(advice, losses_over_time(trace, size), size)
            decode = partial(_join, trace.words) if trace.words else None
            edges = edge_finding(trace, pictured.edges, decode)
            contents.append(([*findings, edges], pictured))
    if args.save_plot is not None:
        draw_advice(contents[0][1], args.save_plot)
    if args.report is not None:
        write_report(contents, args.report)
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _run_diagnosis(args: argparse.Namespace) -> int:
    from radixserve.replay.advice_plots import write_report
    from radixserve.replay.prefix_faults import (
        diagnosis_document,
        diagnosis_findings,
        find_faults,
    )

    pages = [_page_size(text) for text in _items("--page-size", args.page_size)]
    if len(pages) > 1:
        raise InvalidRequest("--diagnose takes one --page-size")
    tokenizer = None if args.tokenizer is None else _decoder(args.tokenizer)
    documents, contents = [], []
    for trace in _traces(args):
        decode = partial(_join, trace.words) if trace.words else tokenizer
        diagnosis = find_faults(trace, decode=decode, page_size=pages[0])
        documents.append(diagnosis_document(diagnosis))
        findings = diagnosis_findings(documents[-1])
        contents.append((findings, None))
        if not args.json:
            for finding in findings:
                finding.print(make_console())
    if args.report is not None:
        write_report(contents, args.report)
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    return 0


def _join(words: Mapping[int, str], token_ids: Sequence[int]) -> str:
    return "".join(words.get(token, "\ufffd") for token in token_ids)


def _decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Token ids to text, with the tokenizer of a model. Raises InvalidRequest for one without."""
    from radixserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(as_path(model)))
    if tokenizer is None:
        raise InvalidRequest(f"--tokenizer: {model} has no tokenizer")
    return tokenizer.decode


def _other_kinds(
    args: argparse.Namespace, *, has_sessions: bool
) -> list[tuple[str, str, int, bool]]:
    """The caches that an advice compares with LRU and pages of one token: those of --policy,
    --page-size and --index, each in one respect; the usual ones if none of the three is given."""
    if all(_given(args, usage)[2] == default for usage, (_, default) in _LISTS.items()):
        policies, pages, indexes = ["arc", "slru"], [16], ["hash", "off"]
    else:
        policies = [name for name in _items("--policy", args.policy) if name != "lru"]
        pages = [_page_size(text) for text in _items("--page-size", args.page_size)]
        indexes = [name for name in _items("--index", args.index) if name != "radix"]
    kinds = [("radix", policy, 1, False) for policy in policies]
    kinds += [("radix", "lru", page, False) for page in pages if page != 1]
    kinds += [("radix", "lru", 1, True)] if has_sessions else []
    block = max([16, *pages])
    return kinds + [(index, "lru", block if index == "hash" else 1, False) for index in indexes]


def _run_baseline(args: argparse.Namespace) -> int:
    from radixserve.replay.baseline import baseline_finding, compare_off

    specs, serving = _specs(args), _servings(args)[0]
    documents = [
        compare_off(trace, partial(specs, trace), serving, lease_s=args.lease_s, watch=_bar)
        for trace in _traces(args)
    ]
    if args.json:
        print(json.dumps({"radixserve": __version__, "traces": documents}, indent=2))
    else:
        baseline_finding(documents).print(make_console())
    return 0


def _clusters(args: argparse.Namespace) -> list[Cluster]:
    """A cluster for each number in --replicas. Raises InvalidRequest."""
    from radixserve.fleet.autoscaling import Autoscaling
    from radixserve.replay.replicas import Cluster, Failures

    common: dict[str, Any] = {}
    for usage in ("--event-delay-s", "--start-s"):
        flag, name, value = _given(args, usage)
        if value is not None:
            common[name] = check_float(flag, value, 0.0, 1e6)
    if args.failures is not None:
        common["failures"] = Failures(check_float("--failures", args.failures, 1e-3, 1e9))
    if args.autoscaling is not None:
        common["autoscaling"] = Autoscaling.read("--autoscaling", args.autoscaling)
    numbers = [_count("--replicas", text) for text in _items("--replicas", args.replicas)]
    return [Cluster(number, **common) for number in numbers]


def _count(flag: str, text: str) -> int:
    """A positive integer of a list in `flag`. Raises InvalidRequest."""
    if not text.isdecimal():
        raise InvalidRequest(f"{flag} must be numbers such as 4,16, got {text!r}")
    return check_int(flag, int(text), 1)


def _specs(args: argparse.Namespace) -> Callable[[Trace, PathTable], Sequence[CacheSpec]]:
    """A function that returns the caches for a trace. The options are checked now, before a trace
    is read. Raises InvalidRequest."""
    from radixserve.replay import cross, parse_tokens
    from radixserve.replay.study import default_sizes

    given = None
    if args.cache_tokens is not None:
        given = [parse_tokens(text) for text in _items("--cache-tokens", args.cache_tokens)]
    pages = [_page_size(text) for text in _items("--page-size", args.page_size)]
    policies, indexes = _items("--policy", args.policy), _items("--index", args.index)
    make = partial(cross, policies=policies, page_sizes=pages, indexes=indexes)
    interval, num_states = args.state_checkpoints, args.states
    if args.state_tokens is not None:
        make = partial(make, state_tokens=_state_tokens(args.state_tokens))
        interval = DEFAULT_INTERVAL if interval is None else interval
    if interval is not None:
        check_int("--state-checkpoints", interval, 1)
        make = partial(make, checkpoint_interval=interval)
    if num_states is not None:
        check_int("--states", num_states, 1)
        make = partial(make, num_states=num_states)
    if args.windows is not None:
        make = partial(make, windows=_windows(args))
    make(given or [max(pages)], use_sessions=False)  # refuses wrong names and sizes

    def specs(trace: Trace, paths: PathTable) -> Sequence[CacheSpec]:
        sizes = given or sorted({max([size, *pages]) for size in default_sizes(paths, trace)})
        return make(sizes, use_sessions=args.sessions)

    return specs


def _state_tokens(text: str) -> list[float]:
    try:
        sizes = [float(item) for item in _items("--state-tokens", text)]
    except ValueError:
        raise InvalidRequest(
            f"--state-tokens takes numbers of tokens such as 3168,10, got {text!r}"
        ) from None
    return [check_float("--state-tokens", size, 1.0, 1e9) for size in sizes]


def _windows(args: argparse.Namespace) -> WindowSpec:
    from radixserve.replay.caches import WindowSpec

    size, _, share = str(args.windows).partition(":")
    try:
        layers = int(size), float(share)
    except ValueError:
        raise InvalidRequest(
            f"--windows takes positions and a share of the K/V, such as 1024:0.83, "
            f"got {args.windows!r}"
        ) from None
    ratio = args.swa_full_tokens_ratio
    return WindowSpec(*layers, SWA_FULL_TOKENS_RATIO if ratio is None else ratio)


def _servings(args: argparse.Namespace) -> list[Serving]:
    from radixserve.replay.scheduled import ORDERS, Serving, StepModel

    if args.order is None and not (args.closed_loop or args.advise or args.baseline):
        return []
    orders = _items("--order", args.order or "lpm")
    usual = "priced" if args.closed_loop else "greedy"
    admissions = _items("--admission", args.admission or usual)
    for admission in admissions:
        check_choice("--admission", admission, ADMISSIONS)
    for order in orders:
        check_choice("--order", order, ORDERS)
    settings: dict[str, Any] = {}
    for usage, (_, _, least) in _SERVING.items():
        flag, name, value = _given(args, usage)
        if value is not None:
            check_float(flag, value, least, 1e6)
            settings[name] = value
    step = {}
    for usage, (_, _, per_second, field) in _STEP.items():
        flag, _, value = _given(args, usage)
        step[field] = check_float(flag, value, 0.0, 1e3 * per_second) / per_second
    model = StepModel(**step) if args.step_costs is None else _step_costs(args)
    for flag, value, field in (
        ("--prefill-rate", args.prefill_rate, "prefill_token_s"),
        ("--decode-rate", args.decode_rate, "fixed_s"),
    ):
        if value is not None:
            model = replace(model, **{field: 1.0 / check_float(flag, value, 1e-6, 1e12)})
    return [
        Serving(order=order, admission=admission, step=model, **settings)
        for order in orders
        for admission in admissions
    ]


def _step_costs(args: argparse.Namespace) -> StepModel:
    from radixserve.replay.closed_loop import read_step_costs

    return read_step_costs(as_path(args.step_costs))


def _given(args: argparse.Namespace, usage: str) -> tuple[str, str, Any]:
    """The flag, the name and the value of an option, given as "--name METAVAR"."""
    flag = usage.split()[0]
    name = flag.strip("-").replace("-", "_")
    return flag, name, getattr(args, name)


def _bytes_per_token(args: argparse.Namespace) -> int:
    from radixserve.replay.caches import DEFAULT_KV_BYTES
    from radixserve.replay.kv_bytes import kv_bytes_per_token

    if args.kv_dtype is not None and args.model_config is None:
        raise InvalidRequest("--kv-dtype needs --model-config")
    if args.model_config is not None:
        if args.bytes_per_token is not None:
            raise InvalidRequest("give --bytes-per-token or --model-config, not both")
        return kv_bytes_per_token(as_path(args.model_config), args.kv_dtype or "auto")
    if args.bytes_per_token is None:
        return DEFAULT_KV_BYTES
    return parse_bytes(args.bytes_per_token, "--bytes-per-token")


def _items(flag: str, text: str) -> list[str]:
    """The items of a list with commas, without repetitions. Raises InvalidRequest for none."""
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
    """A progress bar, if standard error is a terminal. Yields a function that counts a request."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="req", desc=title, dynamic_ncols=True, leave=False) as bar:
        yield bar.update
