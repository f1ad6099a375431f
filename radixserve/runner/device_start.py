"""From a loaded model to a runner that is ready on a device: trial, pool, backend, graphs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from radixserve.attention.base import AttentionBackend
from radixserve.attention.choice import make_backend
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.parallel import TPGroup
from radixserve.runner.cuda_graph import ladder
from radixserve.runner.device_batch import BatchSender
from radixserve.runner.device_memory import (
    MemoryUse,
    fitting_pages,
    forget_peak,
    graph_bytes,
    measure,
    most_pages,
)
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.device_steps import DeviceSteps
from radixserve.runner.kv_pool import KVPool, choose_num_pages
from radixserve.runner.page_table import PageTable
from radixserve.runner.warm_up import num_trial_pages, trial_schedules

logger = logging.getLogger("radixserve")

GRAPH_PAGES = 1 << 24  # page ids of a decode step's rows, shared ones once a row: 64 MiB


@dataclass(frozen=True, slots=True)
class Started:
    """A runner's parts on a device."""

    steps: DeviceSteps
    pool: KVPool
    backend: AttentionBackend


def start_on_device(
    model: LanguageModel,
    backend_name: str,
    config: EngineConfig,
    queue: DeviceQueue,
    ranks: TPGroup | None = None,
) -> Started:
    """Warm up, take the memory that the pool may have, record decode steps.

    backend_name: where the settings left the choice open and it cannot be made ready, the next one
    is used. Raises InvalidRequest if there is no room for the pool, ModelNotSupported if no backend
    can be made ready.
    """
    info, size = model.info, config.page_size
    num_pages = _given_pages(config, info, queue)
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    line_pages = min(-(-longest // size), num_pages or most_pages(queue.device, info, size))
    longest = min(longest, line_pages * size)
    sizes = ladder(config.max_running_requests) if config.cuda_graphs and model.can_capture else ()
    with queue.active():
        table = PageTable(config.max_running_requests, line_pages, queue.device)
        sender = BatchSender(queue, table, size, max(sizes, default=0))
        steps = DeviceSteps(model, queue, sender, table, ranks)

        later = graph_bytes(max(sizes, default=0), info.vocab_size)
        names = [backend_name]
        if config.attention_backend == "auto" and backend_name == "flashinfer":
            names.append("triton")  # which brings its compiler along
        use, backend_name = _try_out(steps, names, config, queue, longest, later)
        if num_pages is None:
            share, page_bytes = config.gpu_memory_utilization, info.kv_bytes_per_token * size
            num_pages = fitting_pages(use, share, page_bytes, size)
        if ranks is not None:
            num_pages = ranks.agree(num_pages)
        pool = KVPool(info, num_pages, size, queue.device)
        backend = make_backend(
            backend_name, pool.kv, info.num_heads, shares=config.cascade_attention
        )
        steps.use(pool, backend)
        if sizes and backend.can_capture:
            logger.info("recording decode steps of %s rows", _shown(sizes))
            began = time.perf_counter()
            steps.graphs.record(
                model,
                backend,
                sizes,
                lambda rows: min(rows * line_pages, max(4 * pool.num_pages, GRAPH_PAGES) + rows),
                shares=config.cascade_attention,
            )
            spent = time.perf_counter() - began
            logger.info("decode steps recorded in %.1f s", spent)
    return Started(steps, pool, backend)


def _given_pages(config: EngineConfig, info: ModelInfo, queue: DeviceQueue) -> int | None:
    """The pool's pages where the settings or the CPU's memory say them; None: to be measured."""
    is_given = config.num_pages is not None or config.kv_cache_memory is not None
    if not is_given and queue.device.type == "cuda":
        return None
    return choose_num_pages(config, info)


def _try_out(
    steps: DeviceSteps,
    backend_names: list[str],
    config: EngineConfig,
    queue: DeviceQueue,
    longest: int,
    later: int,
) -> tuple[MemoryUse, str]:
    """Run the trial schedules over a pool of their own; what they needed, and the backend's name.

    backend_names: the first that can be made ready is used. longest: most tokens of a row. later:
    bytes that will be taken behind the pool.
    """
    logger.info("warming up on %s: kernels are compiled when they first run", queue.device)
    began, info, size = time.perf_counter(), steps.info, config.page_size
    forget_peak(queue.device)
    count = num_trial_pages(config.chunked_prefill_size, config.max_running_requests, size)
    pool = KVPool(info, count, size, queue.device)
    backend = _first_ready(backend_names, pool, info, config)
    steps.use(pool, backend)
    for schedule in trial_schedules(
        config.chunked_prefill_size, config.max_running_requests, longest, size
    ):
        steps.collect(steps.launch(schedule))
    steps.let_go()
    logger.info("warmed up in %.1f s", time.perf_counter() - began)
    return measure(queue.device, pool.num_bytes, later), backend.name


def _first_ready(
    names: list[str], pool: KVPool, info: ModelInfo, config: EngineConfig
) -> AttentionBackend:
    """The first of the backends whose kernels can be had; ModelNotSupported if none's can."""
    for name in names:
        backend = make_backend(name, pool.kv, info.num_heads, shares=config.cascade_attention)
        try:
            backend.prepare()
        except ModelNotSupported as reason:
            if name == names[-1]:
                raise
            logger.warning("%s: the next backend is tried", reason)
        else:
            return backend
    raise ValueError("no backend was named")


def _shown(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
