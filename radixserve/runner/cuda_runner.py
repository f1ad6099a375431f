"""`CudaModelRunner`: steps are queued on a device by `launch` and read by `collect`.

Between the two the host is free, to prepare the next step. On CPU tensors the same code runs with
the kernels' references: for tests and dry runs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend
from radixserve.attention.choice import make_backend
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models.parallel import TPGroup
from radixserve.runner.base import SingleDeviceRunner, load_on_device
from radixserve.runner.cuda_graph import DecodeGraphs, capture_decode_steps, capture_sizes
from radixserve.runner.device import choose_device
from radixserve.runner.device_batch import BatchUploader, PageTable
from radixserve.runner.device_sampler import DeviceSampler, PendingSample
from radixserve.runner.input_batch import prepare_inputs
from radixserve.runner.kv_pool import KVPool, choose_num_pages
from radixserve.runner.profile_run import (
    MemoryUse,
    fitting_pages,
    graph_bytes,
    max_pages,
    measure,
    num_profile_pages,
    profile_schedules,
    reset_peak,
)
from radixserve.runner.sample_plan import SamplePlan, plan_samples
from radixserve.runner.system_memory import keep_freed_memory
from radixserve.runner.transfers import DeviceQueue
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput
from radixserve_kernels import gpu_ops

logger = logging.getLogger("radixserve")

GRAPH_PAGES = 1 << 24  # page ids of a decode step's rows, shared ones once a row: 64 MiB


@dataclass(slots=True)
class PendingStep:
    """A queued step. Collect it once."""

    sample: PendingSample | None  # None: nothing is drawn here
    num_outputs: int
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prepare", "forward", "sample"), 0.0)
    )


class CudaModelRunner(SingleDeviceRunner):
    """See `ModelRunner`. Loads the model, runs the largest step once (profile_run.py), takes the
    memory that the pool may have and captures decode steps.

    tp_group: this runner is one of several that compute each layer together. `queue` takes the
    place of the device's own, for tests. Raises what `load_on_device` raises, InvalidRequest if
    there is no room for the pool, ModelNotSupported if no attention backend can be made ready.
    """

    overlap_depth = 1

    def __init__(
        self,
        model_path: str,
        config: EngineConfig,
        tp_group: TPGroup | None = None,
        *,
        queue: DeviceQueue | None = None,
    ) -> None:
        device = choose_device(config.device, config.attention_backend)
        to_load = config
        if device.type == "cpu":
            keep_freed_memory()
            if config.attention_backend == "auto":
                to_load = replace(config, attention_backend="triton")
        parts = load_on_device(model_path, to_load, device, tp_group)
        super().__init__(parts, config)
        self._tp_group, self._draws = tp_group, tp_group is None or tp_group.rank == 0
        self._queue = DeviceQueue(device) if queue is None else queue
        self._graphs = DecodeGraphs()
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # of the last step
        self._is_known = np.zeros(0, bool)  # which of them the device has
        with self._queue.active():
            self._start(parts.backend_name)
        self._describe(self._graphs.sizes)
        if device.type != "cpu" and config.dtype == "auto" and self.info.dtype == torch.float32:
            logger.info('the checkpoint is in float32; dtype="bfloat16" is far faster on a GPU')

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> PendingStep:
        """Queue a step: page prefixes are copied, all rows go through the model, tokens are drawn.

        A row's `future_index` means an output of the schedule launched before.
        """
        began = time.perf_counter()
        with self._queue.active():
            if schedule.rows:
                return self._launch(schedule, began)
            if len(schedule.cow_copies):
                copies = torch.from_numpy(np.ascontiguousarray(schedule.cow_copies, np.int32))
                gpu_ops.copy_page_prefixes(self.pool.kv, copies.to(self._device))
            return PendingStep(None, 0)

    @torch.inference_mode()
    def collect(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for a launched step and read what it drew."""
        if pending.sample is None:
            return ModelRunnerOutput((None,) * pending.num_outputs, pending.seconds)
        began = time.perf_counter()
        with self._queue.active():
            pending.sample.transfer.event.wait()
            arrived = time.perf_counter()
            outputs = self._sampler.collect(pending.sample)
        pending.seconds["forward"] += arrived - began
        pending.seconds["sample"] += time.perf_counter() - arrived
        return ModelRunnerOutput(outputs, pending.seconds)

    def _launch(self, schedule: SchedulerOutput, began: float) -> PendingStep:
        inputs = prepare_inputs(schedule.rows, self.pool.page_size)
        graph = self._graphs.pick(inputs)
        if graph is not None:
            inputs = inputs.padded(graph.num_rows)
        assert self._is_known[inputs.future_tokens()[1]].all(), "a token was drawn on the host"
        plan = None
        if self._draws:
            plan = plan_samples(inputs, self.info.vocab_size)
        extra = {} if plan is None else self._sampler.plan(plan, schedule.rows)
        if len(schedule.cow_copies):
            extra["copies"] = np.ascontiguousarray(schedule.cow_copies, np.int32)
        batch, device_tensors = self._uploader.upload(
            inputs, extra, self._tokens, is_fixed=graph is not None
        )
        if "copies" in device_tensors:
            gpu_ops.copy_page_prefixes(self.pool.kv, device_tensors["copies"])
        if graph is None:
            self.backend.plan(batch)
            prepared = time.perf_counter()
            logits = self.model.forward(batch, self.backend)
        else:
            replay = graph.plan(batch)
            prepared = time.perf_counter()
            logits = replay()
        inputs.host.release()
        computed = time.perf_counter()
        pending = self._sample(schedule, plan, logits, device_tensors, graph is not None)
        pending.seconds["prepare"] = prepared - began
        pending.seconds["forward"] = computed - prepared
        pending.seconds["sample"] = time.perf_counter() - computed
        return pending

    def _sample(
        self,
        schedule: SchedulerOutput,
        plan: SamplePlan | None,
        logits: Tensor,
        device_tensors: dict[str, Tensor],
        in_graph_buffer: bool,
    ) -> PendingStep:
        num_rows = len(schedule.rows)
        if plan is None:  # rank 0 draws
            assert self._tp_group is not None
            self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
            self._is_known = np.ones(num_rows, bool)
            self._tp_group.broadcast(self._tokens)
            return PendingStep(None, num_rows)
        sample = self._sampler.launch(
            logits, plan, device_tensors, self._tokens, in_graph_buffer=in_graph_buffer
        )
        self._tokens = sample.tokens
        if self._tp_group is not None:
            self._tp_group.broadcast(self._tokens[:num_rows])
        self._is_known = np.zeros(plan.num_outputs, bool)
        self._is_known[plan.outputs] = True
        return PendingStep(sample, plan.num_outputs)

    # -- start: profile run, pool, graphs ---------------------------------------------------------

    def _start(self, backend_name: str) -> None:
        config, info, device = self._config, self.info, self._device
        size, max_rows = config.page_size, config.max_running_requests
        num_pages = self._given_pages()
        longest = min(config.max_seq_len or info.max_positions, info.max_positions)
        row_pages = min(-(-longest // size), num_pages or max_pages(device, info, size))
        sizes = capture_sizes(max_rows) if config.cuda_graphs and self.model.can_capture else ()
        table = PageTable(max_rows, row_pages, device)
        self._uploader = BatchUploader(self._queue, table, size, max(sizes, default=0))
        self._sampler = DeviceSampler(self._queue, max_rows, info.vocab_size)
        longest = min(longest, row_pages * size)
        use, backend_name = self._profile_run(backend_name, longest, sizes)
        if num_pages is None:
            share, page_bytes = config.gpu_memory_utilization, info.kv_bytes_per_token * size
            num_pages = fitting_pages(use, share, page_bytes, size)
        if self._tp_group is not None:
            num_pages = self._tp_group.agree(num_pages)
        self.pool = KVPool(info, num_pages, size, device)
        self.backend = self._make_backend(backend_name)
        if sizes and self.backend.can_capture:
            logger.info("capturing decode steps of %s rows", ", ".join(map(str, sizes)))
            began = time.perf_counter()
            self._graphs = capture_decode_steps(
                self.model,
                self.backend,
                self._uploader,
                sizes,
                lambda rows: min(rows * row_pages, max(4 * num_pages, GRAPH_PAGES) + rows),
                shares=config.cascade_attention,
            )
            logger.info("decode steps captured in %.1f s", time.perf_counter() - began)

    def _given_pages(self) -> int | None:
        """The pool's pages where the settings or the CPU's memory decide them; None: measure."""
        config = self._config
        is_given = config.num_pages is not None or config.kv_cache_memory is not None
        if not is_given and self._device.type == "cuda":
            return None
        return choose_num_pages(config, self.info)

    def _profile_run(
        self, backend_name: str, longest: int, sizes: tuple[int, ...]
    ) -> tuple[MemoryUse, str]:
        """Run the profile schedules over a pool of their own, which goes; what they needed, and the
        backend's name. longest: most tokens of a row. sizes: of the graphs to come."""
        logger.info("warming up on %s: kernels are compiled when they first run", self._device)
        began, config = time.perf_counter(), self._config
        reset_peak(self._device)
        limits = config.chunked_prefill_size, config.max_running_requests
        num_pages = num_profile_pages(*limits, config.page_size)
        self.pool = KVPool(self.info, num_pages, config.page_size, self._device)
        self.backend = self._first_ready(backend_name)
        for schedule in profile_schedules(*limits, longest, config.page_size):
            self.collect(self.launch(schedule))
        pool_bytes, backend_name = self.pool.num_bytes, self.backend.name
        self._release_pool()
        logger.info("warmed up in %.1f s", time.perf_counter() - began)
        graphs = graph_bytes(max(sizes, default=0), self.info.vocab_size)
        return measure(self._device, pool_bytes, graphs), backend_name

    def _release_pool(self) -> None:
        """Hold no pool: its memory is free for another one."""
        del self.pool, self.backend

    def _first_ready(self, name: str) -> AttentionBackend:
        """The backend of that name, prepared; where the settings left the choice open and its
        kernels cannot be had, Triton's, which brings its compiler along."""
        backend = self._make_backend(name)
        try:
            backend.prepare()
        except ModelNotSupported as reason:
            if self._config.attention_backend != "auto" or name != "flashinfer":
                raise
            logger.warning("%s: the next backend is tried", reason)
            return self._first_ready("triton")
        return backend

    def _make_backend(self, name: str) -> AttentionBackend:
        shares = self._config.cascade_attention
        return make_backend(name, self.pool.kv, self.info.num_heads, shares=shares)
