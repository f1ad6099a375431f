"""Everything that only a GPU can tell, in one command: first what is right, then what is fast.

    python benchmarks/gpu/run.py --out DIR [--parts limits,kernels,...] [--quick] [--dry-run]
        [--backend flashinfer|triton] [--page-size N]

Installs and downloads nothing. Each part runs in processes of its own, under a time limit: one that
crashes, hangs or runs out of memory does not hide the others. What is found lies in DIR as soon as
it is there: results.json, results.md, and log.txt with what the parts printed. Parts that an
earlier run on the same machine left in DIR are kept, so that a run can be made in several pieces:

    limits      copy bandwidth and bf16 product: what all figures are held against
    kernels     every kernel and every backend against float64
    parity      tokens of the engine: backends, page sizes, graphs, overlap, cascade, cold and warm
    tests       the repository's tests that use a CUDA device
    decode      a step at many batch sizes and contexts
    prefill     time to first token, cold and cached
    shared      one long prefix under many rows: cascade against flat, and from where on it pays
    throughput  many requests through Runtime, with the cache and without
    beam        beam search

Ends with 0 when all parts ran (a missed target is marked and no error), 1 when one failed, 2 when
there is no GPU. --dry-run walks through all parts on the CPU, with the kernels' torch twins and a
tiny model: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_jobs import METHODS, Job, run_jobs
from gpu_limits import Ceilings
from gpu_parts import PARTS, Spec
from gpu_report import NOTES, Part, Report, Row, load_parts
from gpu_settings import Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ASSUMED = Ceilings(4.3e12, 790e12)  # of an H200, where they could not be measured
LOG_BYTES = 4 << 20  # most that is kept of the log
FACTS = Job("gpu_machine", "machine", 180.0)


def set_paths() -> None:
    """The jobs find what they import, also when nothing is installed."""
    folders = [str(folder) for folder in (HERE, HERE.parent, ROOT, ROOT / "kernels")]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, given] if given else folders)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a card uses none


def run_part(spec: Spec, settings: Settings, report: Report, method: str) -> Part:
    """One part; its rows are in the report as soon as they are told."""
    part = Part(spec.name, spec.title, is_brief=spec.is_brief)
    report.parts[spec.name] = part
    report.sort(PARTS)
    rows: dict[str, list[Row]] = {group: [] for group in spec.groups}
    began = time.monotonic()

    def tell(group: str, kind: str, value: Any) -> None:
        if kind == "row":
            rows[group].append(value)
            part.rows = [row for found in rows.values() for row in found]
        elif kind == "note":
            part.notes.append(value)
        part.seconds = time.monotonic() - began
        report.save()

    jobs = [Job(spec.module, group, spec.limit_s) for group in spec.groups]
    width = 1 if settings.is_dry else spec.width
    log = report.folder / "log.txt"
    ended = run_jobs(jobs, settings, log, tell, width=width, method=method)
    for group in spec.groups:
        end = ended[group]
        if end.trouble:
            part.troubles.append(end.trouble)
        elif end.skipped and (group or len(spec.groups) == 1):
            rows[group].append(Row(group or spec.name, section="skipped", skipped=end.skipped))
    part.rows = [row for found in rows.values() for row in found]
    part.seconds, part.is_done = time.monotonic() - began, True
    report.save()
    return part


def find_machine(settings: Settings, log: Path) -> tuple[dict[str, Any], str, str]:
    """Hardware and versions, why there are none, and the method of starting jobs that works."""
    facts: dict[str, Any] = {}
    why = ""
    for method in METHODS:
        ended = run_jobs(
            [FACTS], settings, log, lambda _, __, told: facts.update(told), method=method
        )
        end = ended[FACTS.group]
        if not end.trouble:
            return facts, end.skipped, method
        why = why or end.trouble
    return facts, why, METHODS[0]


def run_all(args: argparse.Namespace) -> int:
    """The exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "log.txt"
    log.write_bytes(b"")
    settings = Settings(args.dry_run, args.quick, args.backend, args.page_size)
    facts, why, method = find_machine(settings, log)
    if why:
        print(f"nothing can be run: {why}", file=sys.stderr)
        return 2
    chosen = {"backend": args.backend, "page_size": args.page_size}
    modes = {"quick": args.quick, "dry_run": args.dry_run}
    report = Report({**facts, **chosen, **modes}, args.out)
    report.parts = load_parts(args.out, report.settings, [spec.name for spec in PARTS])
    _show("\n".join([*report.header(), NOTES, ""]))
    wanted = [spec for spec in PARTS if spec.name in args.parts]
    if wanted[0].name != "limits" and find_ceilings(report) is None:
        wanted.insert(0, PARTS[0])
    for spec in wanted:
        is_assumed = False
        if spec.name != "limits" and settings.ceilings is None:
            found = find_ceilings(report)
            settings, is_assumed = replace(settings, ceilings=found or ASSUMED), found is None
        part = run_part(spec, settings, report, method)
        if is_assumed:
            part.notes.append("no ceilings were measured: those of an H200 are assumed")
        _show(part.table())
    _show(report.summary())
    report.save()
    _shorten(log)
    return int(any(part.failures for part in report.parts.values()))


def find_ceilings(report: Report) -> Ceilings | None:
    """As the part `limits` told them."""
    part = report.parts.get("limits")
    for row in part.rows if part is not None else ():
        if "bandwidth" in row.details:
            return Ceilings(row.details["bandwidth"], row.details["flops"])
    return None


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [spec.name for spec in PARTS]
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--parts", default=",".join(names), metavar="A,B", help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--dry-run", action="store_true", help="walk through on the CPU")
    parser.add_argument("--backend", choices=("auto", "flashinfer", "triton"), default="auto")
    parser.add_argument("--page-size", type=int, default=1, help="of the engines (default: 1)")
    args = parser.parse_args(given)
    args.parts = args.parts.split(",")
    if unknown := sorted(set(args.parts) - set(names)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    if not 1 <= args.page_size <= 64:
        parser.error("--page-size must be from 1 to 64")
    return args


def _show(text: str) -> None:
    print(text, flush=True)


def _shorten(log: Path) -> None:
    """Keep the beginning and the end of a long log."""
    text = log.read_bytes()
    if len(text) > LOG_BYTES:
        half = LOG_BYTES // 2
        log.write_bytes(text[:half] + b"\n-- cut here --\n" + text[-half:])


if __name__ == "__main__":
    set_paths()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the jobs with it
    sys.exit(run_all(arguments()))
