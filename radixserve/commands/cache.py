"""`radixserve cache`: lists, verifies, prunes, saves and loads a folder of K/V (a kv_store)."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.commands.flags import (
    EXPORTS,
    add_command,
    add_engine_flags,
    add_flags,
    given_engine,
)
from radixserve.commands.jsonl import read_batch
from radixserve.config import format_bytes, parse_bytes
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.store import FolderStore, KVRun, StoredFile

ACTIONS = ("list", "verify", "prune", "save", "load")
_ACTIONS_OF = {  # by a flag's name
    "drop": ("verify",),
    "size": ("prune",),
    "model": ("save", "load"),
    "jsonl": ("save",),
}
_UNBOUNDED = 1 << 62
_EPILOG = """\
actions:
  list      files, tokens and bytes by model and namespace
  verify    read every file and check its sums; --drop removes damaged files
  prune     remove the least recently used files, down to --size
  save      compute --jsonl's prompts with --model, write their K/V to the folder
  load      load the folder's K/V for --model, and print how many tokens it has

FOLDER is that of `radixserve serve --kv-store FOLDER`, `Runtime(kv_store=...)` or
`Runtime.save_cache`. The exit code of verify is 1 where a file is damaged.

examples:
  radixserve cache list ~/kv
  radixserve cache verify ~/kv --drop
  radixserve cache prune ~/kv --size 4GB
  radixserve cache save ~/kv --model Qwen/Qwen3-0.6B --jsonl system-prompts.jsonl
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "cache",
        "list, verify, prune, save or load K/V that is kept on disk",
        "Look after a folder of K/V: the kv_store of an engine, or a saved cache.",
        _EPILOG,
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("folder", metavar="FOLDER", help="of the K/V")
    flags = {
        "--drop": "verify: remove damaged files",
        "--size BYTES": 'prune: the size to leave, such as "4GB"',
        "--model MODEL": "save, load: the model, as of `radixserve serve` (default: demo)",
        "--jsonl FILE": "save: the prompts, as JSON lines of `radixserve generate`",
        "--json": "print one JSON document instead",
    }
    add_flags(parser, flags)
    add_engine_flags(parser, without=(*EXPORTS, "kv_store"))
    return parser


def run(args: argparse.Namespace) -> int:
    for name, actions in _ACTIONS_OF.items():
        if getattr(args, name) and args.action not in actions:
            raise InvalidRequest(f"--{name} does not go with {args.action}")
    if args.action == "save":
        return _save(args)
    if not Path(args.folder).is_dir():
        raise InvalidRequest(f"{args.folder} is not a folder")
    if args.action == "load":
        return _load(args)
    from radixserve.store import FolderStore

    store = FolderStore(args.folder, _UNBOUNDED)
    if args.action == "list":
        return _list(store, args)
    return _verify(store, args) if args.action == "verify" else _prune(store, args)


def _list(store: FolderStore, args: argparse.Namespace) -> int:
    groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(
        lambda: {"files": 0, "tokens": 0, "bytes": 0, "used_s_ago": float("inf")}
    )
    problems, now = _Problems(), time.time()
    for file, run in _read_runs(store, problems):
        group = groups[file.name.split("/")[0], run.namespace]
        group["files"] += 1
        group["tokens"] += len(run.tokens)
        group["bytes"] += file.num_bytes
        group["used_s_ago"] = round(min(group["used_s_ago"], max(0.0, now - file.used_at)), 1)
    num_damaged = len(problems.damaged)
    if args.json:
        listed = [
            {"model": model, "namespace": namespace, **group}
            for (model, namespace), group in sorted(groups.items())
        ]
        document = {"groups": listed, "damaged_files": num_damaged, "not_checked": problems.other}
        print(json.dumps(document, indent=2))
        return 0
    for (model, namespace), group in sorted(groups.items()):
        print(
            f"model {model[:12]}  namespace {namespace!r}: {group['tokens']} tokens in "
            f"{group['files']} files, {format_bytes(group['bytes'])}, "
            f"last used {group['used_s_ago']:.0f} s ago"
        )
    problems.print_other()
    print(f"{format_bytes(store.num_bytes)} in all, {num_damaged} damaged files")
    return 0


def _verify(store: FolderStore, args: argparse.Namespace) -> int:
    problems = _Problems()
    num_files = sum(1 for _ in _read_runs(store, problems))
    num_files += len(problems.damaged) + sum(problems.other.values())
    damaged = {str(store.path_of(name)): error for name, error in problems.damaged.items()}
    if args.drop:
        for name in problems.damaged:
            store.drop(name)
    if args.json:
        document = {"files": num_files, "damaged": damaged, "not_checked": problems.other}
        print(json.dumps({**document, "dropped": args.drop}, indent=2))
    else:
        for path, reason in damaged.items():
            print(f"{path}: {reason}{', dropped' if args.drop else ''}")
        problems.print_other()
        print(f"{num_files} files, {len(damaged)} damaged")
    return 1 if damaged else 0


class _Problems:
    """Files that `_read_runs` could not read."""

    def __init__(self) -> None:
        self.damaged: dict[str, str] = {}  # why, by name
        # How many may be whole but cannot be checked here, by the reason: see `OtherRun`.
        self.other: Counter[str] = Counter()

    def print_other(self) -> None:
        for reason, count in self.other.items():
            print(f"{count} files were not checked: {reason}")


def _read_runs(store: FolderStore, problems: _Problems) -> Iterator[tuple[StoredFile, KVRun]]:
    """Yields the files of a store with their runs, checked, and notes the others. A file that an
    engine removes meanwhile is left out."""
    from radixserve.store import BadRun, OtherRun, decode_run

    for file in store.list():
        try:
            data = store.get(file.name)
            if data is None:
                continue
            run = decode_run(data)
        except OtherRun as error:
            problems.other[str(error)] += 1
        except (BadRun, OSError) as error:
            problems.damaged[file.name] = str(error)
        else:
            yield file, run


def _prune(store: FolderStore, args: argparse.Namespace) -> int:
    if args.size is None:
        raise InvalidRequest("prune needs --size: the bytes to be left")
    before = store.num_bytes
    num_dropped = store.prune(parse_bytes(args.size, "--size"))
    counts = {"dropped_files": num_dropped, "bytes_before": before, "bytes": store.num_bytes}
    if args.json:
        print(json.dumps(counts, indent=2))
    else:
        print(f"{num_dropped} files removed; {format_bytes(store.num_bytes)} left")
    return 0


def _save(args: argparse.Namespace) -> int:
    if args.jsonl is None:
        raise InvalidRequest("save needs --jsonl: a file with the prompts")
    from radixserve.api.runtime import Runtime

    with Runtime(args.model or "demo", **given_engine(args)) as runtime:
        lines = read_batch(Path(args.jsonl).read_bytes(), {}, lambda text: text)
        for line in lines:
            if line.error is not None:
                raise InvalidRequest(f"line {line.number}: {line.error}")
        num_tokens = 0
        for line in lines:  # the pool need not have room for all of them
            runtime.generate([line.prompt], SamplingParams(max_tokens=1, temperature=0.0))
            num_tokens += runtime.save_cache(args.folder, prompts=[line.prompt])
    _print_tokens(args, "written", num_tokens)
    return 0


def _load(args: argparse.Namespace) -> int:
    from radixserve.api.runtime import Runtime

    with Runtime(args.model or "demo", **given_engine(args)) as runtime:
        num_tokens = runtime.load_cache(args.folder)
    _print_tokens(args, "loaded", num_tokens)
    return 0


def _print_tokens(args: argparse.Namespace, verb: str, num_tokens: int) -> None:
    print(
        json.dumps({f"{verb}_tokens": num_tokens}) if args.json else f"{num_tokens} tokens {verb}"
    )
