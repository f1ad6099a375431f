"""What an update of the weights takes, beside loading them at a start.

    python benchmarks/bench_weight_updates.py [--model smollm2] [--form bfloat16] [--rounds 5]
        [--threads 1] [--json]

form: of the weights in memory; file: as they are stored, where tensors do not fit.

In turns, from the same files: `load` reads the weights as a start does; `folder` updates a running
engine from the folder; `tensors` from tensors in memory; `buckets` from these in eight calls. The
ratio is the median of the pairs'. Memory is the largest of the process beside that before, the
caller's own tensors apart, in multiples of the weights.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.arguments import parse
from harness.report import print_table
from safetensors.torch import load_file, save_file

from radixserve import Runtime
from radixserve.config import EngineConfig
from radixserve.models.registry import load_model
from radixserve.models.source import ModelSource, find_model

NUM_BUCKETS = 8
PAGE = 4096


def write_dense(source: ModelSource, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Write a checkpoint with all weights in one dtype. Returns them by name."""
    source.transformers_config().save_pretrained(folder)
    if (widened := source.widened(dtype)) is not None:
        tensors = dict(widened.tensors)
    else:
        assert source.path is not None
        files = sorted(source.path.glob("*.safetensors"))
        tensors = {name: x.to(dtype) for file in files for name, x in load_file(file).items()}
    save_file({name: x.clone() for name, x in tensors.items()}, folder / "model.safetensors")
    return tensors


def private_bytes() -> int:
    """Of the process, pages of files apart."""
    _, resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - of_files) * PAGE


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and bytes that it took at most."""
    before, is_over = private_bytes(), threading.Event()
    most = [before]

    def watch() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    is_over.set()
    thread.join()
    return seconds, most[0] - before


def main() -> None:
    forms = ("bfloat16", "float32", "file")
    args = parse(__doc__, model="smollm2", form=forms, rounds=5, threads=1, json=False)
    torch.set_num_threads(args.threads)
    source, given, settings = find_model(args.model, 0), {}, {}
    folder = Path(tempfile.mkdtemp())
    assert source.path is not None
    path, device = str(source.path), torch.device("cpu")
    if args.form != "file":
        path, settings = str(folder), {"dtype": args.form}
        given = write_dense(source, folder, getattr(torch, args.form))
        source = find_model(path, 0)
    config = EngineConfig(**settings)
    names = [*given]
    size = -(-len(names) // NUM_BUCKETS)

    with Runtime(path, num_pages=2_000, **settings) as rt:

        def buckets() -> None:
            for start in range(0, len(names), size):
                some = {name: given[name] for name in names[start : start + size]}
                rt.update_weights(some, is_last=start + size >= len(names))

        cases: dict[str, Callable[[], object]] = {
            "load": lambda: load_model(source, config, device),
            "folder": lambda: rt.update_weights(path),
        }
        if given:
            cases |= {"tensors": lambda: rt.update_weights(given), "buckets": buckets}
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
        for _ in range(args.rounds + 1):
            for name, call in cases.items():
                found[name].append(measured(call))
    weight_bytes = load_model(source, config, device)[0].info.weight_bytes
    shutil.rmtree(folder)
    rows: list[list[Any]] = []
    for name, each in found.items():
        pairs = zip(each[1:], found["load"][1:], strict=True)
        ratio = median(own / load for (own, _), (load, _) in pairs)
        most = max(memory for _, memory in each[1:]) / weight_bytes
        seconds = median(seconds for seconds, _ in each[1:])
        rows.append([name, f"{seconds:.3f}", f"{ratio:.2f}", f"{most:.2f}"])
    print_table(args, ["", "seconds", "of a load", "memory, x weights"], rows)


if __name__ == "__main__":
    main()
