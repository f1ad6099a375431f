"""A run on a GPU: its parts in their order, each in jobs of its own, and their report."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.jobs import Job, Settings
from gpu.limits import H200, Ceilings
from gpu.report import NOTES, Part, Report, load_parts
from harness.arguments import Names, parse

END_S = 8.0  # kept before the deadline, to end the jobs and to write the report
ROOT = Path(__file__).resolve().parents[2]
KERNEL_CHOICE = ROOT / "kernels/radixserve_kernels/gpu/kernel_choice.json"
BACKENDS = ("", "triton")  # the run's own, and Triton's beside FlashInfer's
TESTS = ("kernels", "attention", "engine", "flashinfer", "triton", "torch")


@dataclass(frozen=True)
class Spec:
    """`run(bench, group)` of the module gpu.part_MODULE does it."""

    title: str
    limit_s: float  # of each group
    groups: tuple[str, ...] = ("",)
    at_once: bool = False  # its groups; what is timed has the card for itself
    module: str = ""  # default: the part's name


_8B = "Llama-3-8B shapes, bf16"
PARTS = {
    "limits": Spec("copy bandwidth and bf16 product of this card", 60),
    "choose": Spec("which attention kernels are fastest here", 240, ("decode", "extend")),
    "tests": Spec("the tests that run on a CUDA device", 400, TESTS, at_once=True),
    "host": Spec("CPU time of the host in a decode step", 180, ("qwen3-0.6b", "llama-3.1-8b")),
    "decode": Spec(f"decode step, {_8B}, random weights", 180, BACKENDS),
    "prefill": Spec(f"time to first token, {_8B}, one request", 120, BACKENDS),
    "shared": Spec(
        f"shared prefix: cascade against flat, {_8B}", 240, ("attention", "step", "crossover")
    ),
    "throughput": Spec(
        "throughput, Qwen3-0.6B shapes, bf16, cache on and off", 240, ("lengths", "workloads")
    ),
    "sharegpt": Spec(
        f"1,000 requests as long as ShareGPT's, {_8B}", 240, ("sharegpt",), module="throughput"
    ),
    "beam": Spec(f"beam search, width 4, {_8B}", 300, ("beam",), module="throughput"),
}


def run_part(
    name: str, settings: Settings, report: Report, until: float = math.inf, patience: float = 1.0
) -> Part:
    """One part; what a group told is in the report when it ends. patience: how many times its time
    limits it may take."""
    spec = PARTS[name]
    part = report.parts[name] = Part(spec.title)
    report.parts = {name: report.parts[name] for name in PARTS if name in report.parts}
    began = time.monotonic()

    def start(group: str) -> Job:
        module, limit_s = f"gpu.part_{spec.module or name}", patience * spec.limit_s
        return Job(module, group, settings, report.folder, limit_s, until)

    def finish(job: Job) -> None:
        try:
            job.finish()
        finally:
            collect(part, name, job)
            part.seconds = time.monotonic() - began
            report.save()

    if spec.at_once and not settings.is_dry:
        jobs = [start(group) for group in spec.groups]
        for job in jobs:
            finish(job)
    else:
        for group in spec.groups:
            if time.monotonic() < until:
                finish(start(group))
            else:
                part.troubles.append(f"{group}: not begun before the deadline")
    part.is_done = True
    report.save()
    return part


def collect(part: Part, name: str, job: Any) -> None:
    """Put what a job told into its part."""
    for kind, value in job.told():
        if kind == "row":
            part.rows.append(value)
        elif kind == "note":
            part.notes.append(value)
        elif kind == "trouble":
            part.troubles.append(f"{job.group}: {value}" if job.group else value)
        elif kind == "skipped" and (job.group or len(PARTS[name].groups) == 1):
            told: dict[str, Any] = {"section": "skipped", "cells": {}, "checks": []}
            part.rows.append({"name": job.group or name, **told, "skipped": value})


def run_all(args: argparse.Namespace) -> int:
    """The exit code."""
    if args.kernel_cache is not None:  # of the jobs, which inherit it
        os.environ["TRITON_CACHE_DIR"] = str(args.kernel_cache.resolve() / "triton")
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(args.kernel_cache.resolve())
    until = time.monotonic() + (args.deadline or math.inf) - END_S
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "log.txt").write_bytes(b"")
    settings = Settings(args.dry_run, args.backend, args.page_size)
    job = Job("gpu.bench", "machine", settings, args.out, 180.0, until)
    job.finish()
    told = dict(job.told())
    if "machine" not in told:
        print(f"nothing can be run: {told.get('skipped') or told['trouble']}", file=sys.stderr)
        return 2
    chosen = {name: getattr(args, name) for name in ("backend", "page_size", "dry_run")}
    report = Report({**told["machine"], **chosen}, args.out)
    report.parts = load_parts(args.out, report.settings, PARTS)
    print("\n".join([*report.header(), NOTES, ""]), flush=True)
    wanted = [name for name in PARTS if name in args.parts]
    if wanted[0] != "limits" and find_ceilings(report) is None:
        wanted.insert(0, "limits")
    for name in wanted:
        ceilings = find_ceilings(report)
        if name != "limits":
            settings = replace(settings, ceilings=ceilings or H200)
        part = run_part(name, settings, report, until, args.patience)
        if name != "limits" and ceilings is None:
            part.notes.append("no ceilings were measured: those of an H200 are assumed")
        print(report.text(name), flush=True)
    write_choice(report)
    print(report.summary(), flush=True)
    report.save()
    return int(any(part.failures for part in report.parts.values()))


def write_choice(report: Report) -> None:
    """The table of kernels with what the part `choose` found for this card."""
    choice: dict[str, Any] = {}
    for row in report.parts["choose"].rows if "choose" in report.parts else ():
        choice |= row.get("details", {}).get("choice", {})
    if choice and "gpu" in report.settings:
        table = json.loads(KERNEL_CHOICE.read_text()) | {report.settings["gpu"]: choice}
        text = json.dumps(table, indent=1) + "\n"
        (report.folder / KERNEL_CHOICE.name).write_text(text)


def find_ceilings(report: Report) -> Ceilings | None:
    """As the part `limits` told them."""
    for row in report.parts["limits"].rows if "limits" in report.parts else ():
        if "bandwidth" in row.get("details", {}):
            return Ceilings(**row["details"])
    return None


def parse_arguments(
    given: Sequence[str] | None = None, doc: str | None = None
) -> argparse.Namespace:
    """The command is explained by `doc`."""
    return parse(
        doc,
        given,
        required=("out",),
        check=_check,
        out=Path,
        parts=Names("part", PARTS),
        deadline=float,
        patience=1.0,
        kernel_cache=Path,
        dry_run=False,
        backend=("auto", "flashinfer", "triton"),
        page_size=1,
    )


def _check(args: argparse.Namespace) -> str:
    if args.deadline is not None and args.deadline <= END_S:
        return f"--deadline must be more than {END_S:g} seconds"
    if not args.patience > 0:
        return "--patience must be more than 0"
    return "" if 1 <= args.page_size <= 64 else "--page-size must be from 1 to 64"
