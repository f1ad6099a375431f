"""The host's CPU time of a decode step of 256 rows, from scheduling it to its outputs.

One thread does it all; while the device computes longer than this, it costs nothing. It depends on
the host alone: a stub of CUDA whose kernels do nothing gives the same figures as a card.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from gpu.bench import LLAMA, QWEN, Bench
from harness.step_loop import StepLoop

from radixserve.config import EngineConfig
from radixserve.runner.cuda_runner import CudaModelRunner

TARGETS_MS = {QWEN: 2.5, LLAMA: 3.0}
CASES = {"flat": 0, "shared prefix": 4_096}  # tokens that all rows begin with
POOL = 294_912  # tokens; fit 80 GB beside either model


def run(bench: Bench, group: str) -> None:
    """group: the model."""
    num_rows, own, num_steps = bench.pick((256, 512, 200), (4, 8, 3))
    settings = {"max_seq_len": bench.pick(8_192, 256), "pool": bench.pick(POOL, 2_048)}
    config = EngineConfig(**bench.engine_settings(max_running_requests=num_rows, **settings))
    bench.check_memory(group, config.num_pages or 0)
    runner = CudaModelRunner(bench.model(group), config)
    loop = StepLoop(runner, config, runner.info.vocab_size)
    for name, shared in CASES.items():
        prefix = loop.tokens(bench.pick(shared, shared // 128))
        with bench.case(what := f"{group}, {num_rows} rows, {name}"):
            prompts = [np.concatenate((prefix, loop.tokens(own))) for _ in range(num_rows)]
            if shared:  # computed once, found by all
                loop.add(prefix, 1)
                loop.drain()
            loop.start_decoding(prompts, num_steps + num_rows)
            samples = []
            for _ in range(num_steps):
                began = time.thread_time()
                loop.step()
                samples.append((time.thread_time() - began) * 1e3)
            loop.abort_all()
            loop.engine.reset_cache()  # a full pool is another matter: each page evicts one
            spent = median(samples)
            cells = {"host ms": spent, "least": min(samples), "us a row": spent * 1e3 / num_rows}
            bench.row(what, cells, bench.at_most("host ms", spent, TARGETS_MS[group]))
