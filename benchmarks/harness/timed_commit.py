"""One commit's side of compare_commits.py: does a piece of work for each line of its input.

    python timed_commit.py               with the commit's packages and benchmarks on PYTHONPATH

A line is a JSON list: what, and its arguments. Answered by the CPU seconds of one call. It uses
what commits have had in common since 6396dd4.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from harness.cpu_model import CpuModel

from radixserve import Runtime, SamplingParams
from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.source import find_model
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_attention import PagedAttention

NUM_PREFILL = 512
FORMS = {  # dtype of activations, K and V; weight_dtype
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "file": (torch.bfloat16, "auto"),
}
LEAST_S, MAX_CALLS = 0.2, 50  # of one answer
POOL_BYTES = 96e6  # of K and V of attention alone, so that no cache holds them


@cache
def _model(name: str, form: str, activation_bits: int) -> CpuDecoder:
    arguments = [find_model(name), *FORMS[form]]
    if "activation_bits" in inspect.signature(load_cpu_decoder).parameters:
        arguments.append(activation_bits)
    return load_cpu_decoder(*arguments)


def decoder(name: str, form: str, bits: int, step: str, depth: int, rows: int) -> float:
    """A prefill of 512 tokens, or a decode step of `rows` sequences, after `depth` tokens each."""
    model, count = _model(name, form, bits), NUM_PREFILL if step == "prefill" else 1
    state = _filled(model, rows, depth + count)
    ids = np.arange(count, dtype=np.int32) * 97 % model.info.vocab_size
    return _seconds(lambda: state.forward(range(rows), ids, depth, 1))


def _filled(model: CpuDecoder, rows: int, length: int) -> CpuModel:
    """With random K and V, the same for every commit."""
    state = CpuModel(model, rows, length)
    generator = torch.Generator().manual_seed(0)
    for layer in state._backend.slots:
        for of in layer:
            of.copy_(torch.randn(of.shape, generator=generator))
    return state


def attention(dtype: str, order: str, depth: int, count: int) -> float:
    """A layer of one row of 9 query heads on 3 K/V heads of 64: `count` tokens after `depth`."""
    kind, length = FORMS[dtype][0], depth + count
    layer = torch.randn(2, length, 1, 3, 64).to(kind)
    pool = layer.expand(max(1, int(POOL_BYTES / layer.nbytes)), *layer.shape).contiguous()
    backend, runner = CpuBackend(pool, 9), PagedAttention(kind)
    slots, rng = np.arange(length, dtype=np.int32), np.random.default_rng(0)
    pages = rng.permutation(slots) if order == "scattered" else slots
    new = np.zeros(count, np.int32)
    row = ScheduledRequest("", new, depth, pages, None, new[-1:])
    backend.plan(build_forward_batch([row], 1, torch.device("cpu")))
    q = torch.randn(count, 9, 64).to(kind)

    def layers() -> None:
        for k, v in backend.slots:
            runner.run(backend.planned, q, k, v, 0.125)

    return _seconds(layers) / len(backend.slots)


@cache
def _runtime(name: str) -> Runtime:
    return Runtime(name)


def engine(name: str, rows: int, shared: int, own: int, new: int) -> float:
    """`rows` prompts at once that begin with `shared` tokens; their answers of `new` tokens."""
    runtime, rng = _runtime(name), np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)

    def ids(count: int) -> list[int]:
        return list(map(int, rng.integers(5, 250, count)))

    def work() -> None:
        begin = ids(shared)
        runtime.generate([begin + ids(own) for _ in range(rows)], params)

    return _seconds(work)


def _seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call, after one that is not counted: the median of some."""
    call()
    spent: list[float] = []
    while sum(spent) < LEAST_S and len(spent) < MAX_CALLS:
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return float(np.median(spent))


KINDS: dict[str, Callable[..., float]] = {
    "decoder": decoder,
    "attention": attention,
    "engine": engine,
}


def main() -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        for line in sys.stdin:
            kind, *arguments = json.loads(line)
            print(KINDS[kind](*arguments), flush=True)


if __name__ == "__main__":
    main()
