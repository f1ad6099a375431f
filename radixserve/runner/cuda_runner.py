"""`CudaModelRunner`: steps are queued on a device by `launch` and read by `collect`.

Between the two the host is free, to prepare the next step. On CPU tensors the same code runs with
the kernels' references: for tests and dry runs.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.attention.choice import BACKENDS, make_backend
from radixserve.config import EngineConfig
from radixserve.errors import EngineDead
from radixserve.models.device_lora import lora_arrays
from radixserve.models.parallel import TPGroup
from radixserve.runner.adapter_rows import adapter_rows
from radixserve.runner.base import SingleDeviceRunner, load_on_device
from radixserve.runner.cuda_graph import DecodeGraphs, capture_decode_steps, capture_sizes
from radixserve.runner.device import choose_device
from radixserve.runner.device_batch import BatchUploader, PageTable
from radixserve.runner.device_sampler import DeviceSampler, PendingSample
from radixserve.runner.grammar_bitmask import GrammarBitmaskFuture
from radixserve.runner.input_batch import prepare_inputs
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.piecewise_graph import GRAPH_BYTES, PiecewiseGraphs, capture_tokens
from radixserve.runner.pool_sizing import (
    MemoryUse,
    PoolSize,
    adapter_bytes,
    choose_device_sizes,
    divide_pool,
    given_sizes,
    graph_bytes,
    max_pages,
)
from radixserve.runner.profile_run import measure, num_profile_pages, profile_schedules, reset_peak
from radixserve.runner.recurrent_states import RecurrentStates, StepStates
from radixserve.runner.sample_plan import SamplePlan, begin_device_bitmask, plan_device_samples
from radixserve.runner.system_memory import keep_freed_memory
from radixserve.runner.transfers import DeviceQueue
from radixserve.runner.window_table import DeviceWindows
from radixserve.schedule import (
    ModelRunnerOutput,
    SampleOutput,
    SchedulerOutput,
    WindowLayers,
)
from radixserve_kernels import gpu_ops

logger = logging.getLogger("radixserve")

GRAPH_PAGES = 1 << 24  # page ids of a decode step's rows, shared ones once a row: 64 MiB


# What a runner holds on its device.
_ON_DEVICE = (
    *("model", "pool", "backend", "_states", "_graphs", "_adapter_graphs", "_piecewise", "_tokens"),
    *("_deferred", "_uploader", "_sampler", "_rounding_check", "_adapters"),
)


@dataclass(frozen=True, slots=True)
class DeferredSample:
    """Sampling that is not queued yet: masks may need tokens that the host does not know."""

    plan: SamplePlan
    logits: Tensor
    device_tensors: dict[str, Tensor]
    in_graph_buffer: bool


@dataclass(slots=True)
class PendingStep:
    """A queued step. Collect it once."""

    sample: PendingSample | None  # None: nothing is sampled here, or not yet
    num_outputs: int
    deferred: DeferredSample | None = None  # queued when the step before is collected
    error: Exception | None = None  # of queueing that: `collect` raises it
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
        if config.attention_backend == "auto" and (
            device.type == "cpu" or config.is_exact_on("cuda") or config.kv_dtype == "int8"
        ):
            to_load = replace(config, attention_backend="triton")
        parts = load_on_device(model_path, to_load, device, tp_group)
        super().__init__(parts, config)
        self._tp_group, self._samples = tp_group, tp_group is None or tp_group.rank == 0
        self._queue = DeviceQueue(device) if queue is None else queue
        self._graphs = DecodeGraphs()
        self._adapter_graphs: DecodeGraphs | None = None  # of steps with adapters
        self._piecewise: PiecewiseGraphs | None = None
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # of the last step
        self._is_known = np.zeros(0, bool)  # which of them the device has
        self._deferred: PendingStep | None = None  # the last step, while its sampling is not queued
        with self._queue.active():
            self._start(parts.backend_name)
        self._describe(self._graphs.sizes, max(self._piecewise.sizes) if self._piecewise else 0)
        if device.type != "cpu" and config.dtype == "auto" and self.info.dtype == torch.float32:
            logger.info('the checkpoint is in float32; dtype="bfloat16" is far faster on a GPU')

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> PendingStep:
        """Queue a step: page prefixes are copied, rows go through the model, tokens are sampled.

        A row's `future_index` means an output of the schedule launched before. Raises EngineDead,
        as `collect` does, once the device is out of order.
        """
        began = time.perf_counter()
        with self._queue.active(), self._checked():
            self._sample_deferred(None)
            if self._uploader.windows is not None and schedule.windows is not None:
                self._uploader.windows.update(schedule.windows)  # the next upload applies it
            if schedule.rows:
                return self._launch(schedule, began)
            if len(schedule.cow_copies):
                copies = torch.from_numpy(np.ascontiguousarray(schedule.cow_copies, np.int32))
                gpu_ops.copy_page_prefixes(self.pool.kv, copies.to(self._device))
            self._states.copy(schedule.state_copies)
            return PendingStep(None, 0)

    @torch.inference_mode()
    def collect(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for a launched step and read what it sampled; then queue the sampling that
        waits for these tokens."""
        with self._queue.active(), self._checked():
            if pending is self._deferred:
                self._sample_deferred(None)
            if pending.error is not None:
                raise pending.error
        if pending.sample is None:
            return ModelRunnerOutput((None,) * pending.num_outputs, pending.seconds)
        began = time.perf_counter()
        with self._queue.active(), self._checked():
            pending.sample.transfer.event.wait()
            arrived = time.perf_counter()
            outputs = self._sampler.collect(pending.sample)
            self._check_rounding()
            self._sample_deferred(outputs)
        pending.seconds["forward"] += arrived - began
        pending.seconds["sample"] += time.perf_counter() - arrived
        return ModelRunnerOutput(outputs, pending.seconds)

    def close(self) -> None:
        """Give the device's memory back, so that the next model finds it free."""
        if self._device.type == "cpu":
            return
        for name in _ON_DEVICE:
            self.__dict__.pop(name, None)
        gc.collect()  # graphs and wrappers of kernels refer to each other
        torch.cuda.empty_cache()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """An error that the device does not survive becomes EngineDead. With several ranks each one
        does, see TPModelRunner, and to wait for a collective that a rank left could take forever.
        """
        try:
            yield
        except Exception as error:
            if self._tp_group is None:
                self._queue.check_alive(error)
            raise

    def _launch(self, schedule: SchedulerOutput, began: float) -> PendingStep:
        states = self._plan_states(schedule)
        inputs = prepare_inputs(schedule.rows, self.pool.page_size)
        given = None if self.pictures is None else self.pictures.take(inputs)
        groups = adapter_rows(inputs, self._adapters) if schedule.rows.adapters else []
        graphs = self._graphs_with_adapters() if groups else self._graphs
        graph = graphs.pick(inputs) if given is None else None
        if graph is not None:
            inputs = inputs.padded(graph.num_rows)
        lora = None
        if groups:
            lora = lora_arrays(groups, None if graph is None else graph.num_rows)
        future = inputs.future_tokens()
        assert self._is_known[future[1]].all(), "a token was sampled on the host"
        plan = None
        if self._samples:
            plan = plan_device_samples(inputs, self.info.vocab_size)
        extra = {} if plan is None else self._sampler.plan(plan, schedule.rows)
        masks = None
        if plan is not None and plan.has_grammar and not plan.awaits_tokens:
            masks = begin_device_bitmask(plan, self.info.vocab_size)
        if len(schedule.cow_copies):
            extra["copies"] = np.ascontiguousarray(schedule.cow_copies, np.int32)
        if states is not None:
            extra |= states.arrays
        batch, device_tensors = self._uploader.upload(
            inputs, extra, self._tokens, future, lora=lora, is_fixed=graph is not None
        )
        if "copies" in device_tensors:
            gpu_ops.copy_page_prefixes(self.pool.kv, device_tensors["copies"])
        if states is not None:
            recurrent = self._states.begin(states, device_tensors)
            if batch.recurrent is None:
                batch = replace(batch, recurrent=recurrent)
        if given is not None:
            batch = replace(batch, given=given)
        if graph is None:
            self.backend.plan(batch)
            prepared = time.perf_counter()
            logits = self._forward(batch)
        else:
            replay = graph.plan(batch)
            prepared = time.perf_counter()
            logits = replay()
        if self._rounding_check is not None:
            self._rounding_check.note(inputs.host)
        inputs.host.release()
        computed = time.perf_counter()
        if plan is None:
            pending = self._receive_tokens(len(schedule.rows))
        else:
            pending = PendingStep(None, plan.num_outputs)
            deferred = DeferredSample(plan, logits, device_tensors, graph is not None)
            if plan.awaits_tokens:
                pending.deferred, self._deferred = deferred, pending
            else:
                pending.sample = self._queue_sampling(deferred, masks)
        pending.seconds["prepare"] = prepared - began
        pending.seconds["forward"] = computed - prepared
        pending.seconds["sample"] = time.perf_counter() - computed
        return pending

    def put_adapter(self, number: int, weights: Any | None) -> None:
        super().put_adapter(number, weights)
        if weights is not None and self._deferred is None:  # else its logits are still needed
            with self._queue.active(), self._checked():
                self._graphs_with_adapters()

    def _graphs_with_adapters(self) -> DecodeGraphs:
        """The decode steps with adapters, captured when the first one comes. No graph where the
        device has no room for them."""
        if self._adapter_graphs is None:
            self._adapter_graphs = DecodeGraphs()
            if self._graphs.sizes:
                began = time.perf_counter()
                try:
                    graphs = self._graphs.with_adapters(self.model, self._uploader)
                    self._adapter_graphs = graphs
                    seconds = time.perf_counter() - began
                    logger.info("captured decode steps with adapters in %.1f s", seconds)
                except torch.OutOfMemoryError:
                    logger.warning("no room for graphs of steps with adapters: they run without")
        return self._adapter_graphs

    def _plan_states(self, schedule: SchedulerOutput) -> StepStates | None:
        """Of layers that read StateRows the uploader sends these."""
        if self._uploader.states is not None:
            return self._states.plan_copies(schedule.state_copies)
        return self._states.plan(schedule.rows, schedule.state_copies)

    def _make_states(self, num_states: int) -> None:
        self._states = RecurrentStates(self.info, num_states, self._device)
        has_ids = self.model.reads_state_rows and self._states.tensors
        self._uploader.states = self._states if has_ids else None

    def _forward(self, batch: ForwardBatch) -> Tensor:
        graphs = self._piecewise
        is_short = graphs is not None and batch.num_tokens <= graphs.sizes[-1]
        if graphs is not None and is_short and batch.lora is None and batch.given is None:
            return graphs.forward(batch, self.backend)
        return self.model.forward(batch, self.backend)

    def _receive_tokens(self, num_rows: int) -> PendingStep:
        """The step of a rank that does not sample."""
        assert self._tp_group is not None
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self._is_known = np.ones(num_rows, bool)
        self._tp_group.broadcast(self._tokens)
        return PendingStep(None, num_rows)

    def _sample_deferred(self, previous: Sequence[SampleOutput | None] | None) -> None:
        """Queue the sampling that was left, if any was. previous: the outputs of the step
        before; None where it failed, and its requests with it."""
        pending, self._deferred = self._deferred, None
        if pending is not None:
            assert pending.deferred is not None
            began = time.perf_counter()
            try:
                masks = begin_device_bitmask(pending.deferred.plan, self.info.vocab_size, previous)
                pending.sample = self._queue_sampling(pending.deferred, masks)
            except Exception as error:  # of that step, not of the one that is collected now
                pending.error = error
                self._is_known = np.zeros(pending.num_outputs, bool)
            pending.deferred = None
            pending.seconds["sample"] += time.perf_counter() - began

    def _queue_sampling(
        self, deferred: DeferredSample, masks: GrammarBitmaskFuture | None
    ) -> PendingSample:
        plan = deferred.plan
        sample = self._sampler.launch(
            *(deferred.logits, plan, deferred.device_tensors, self._tokens),
            in_graph_buffer=deferred.in_graph_buffer,
            masks=None if masks is None else masks.get(),
        )
        self._tokens = sample.tokens
        if self._tp_group is not None:
            self._tp_group.broadcast(self._tokens[: plan.num_outputs])
        self._is_known = np.zeros(plan.num_outputs, bool)
        self._is_known[plan.sampled_outputs] = True
        return sample

    # -- start: profile run, pool, graphs ---------------------------------------------------------

    def _start(self, backend_name: str) -> None:
        config, info, device = self._config, self.info, self._device
        size, max_rows = config.page_size, config.max_running_requests
        num_pages, num_states = given_sizes(config, info, device)
        longest = min(config.max_seq_len or info.max_positions, info.max_positions)
        most = max_pages(device, info, size) if num_pages is None else num_pages
        if num_pages is not None:
            most = max(most, divide_pool(config, info, num_pages).num_pages)
        row_pages = min(-(-longest // size), most)
        sizes = capture_sizes(max_rows) if config.cuda_graphs and self.model.can_capture else ()
        if config.cuda_graphs and not self.model.can_capture:
            logger.info("%s runs in transformers' code, without graphs", info.architecture)
        table = PageTable(max_rows, row_pages, device)
        self._uploader = BatchUploader(self._queue, table, size, max(sizes, default=0))
        self._sampler = DeviceSampler(self._queue, max_rows, info.vocab_size)
        longest = min(longest, row_pages * size)
        use, backend_name = self._profile_run(backend_name, longest, sizes)
        num_pages, num_states = choose_device_sizes(config, info, use, num_pages, num_states)
        self.num_states = num_states
        pool_size = self._pool_size(backend_name, num_pages)
        num_pages = pool_size.num_pages
        self.pool = KVPool(info, pool_size, size, device)
        if pool_size.num_window_pages:
            self.windows = WindowLayers(pool_size.num_window_pages, info.window_size)
            self._uploader.windows = DeviceWindows(self.pool, device)
        self._make_states(self.num_states)
        self.backend = self._make_backend(backend_name)
        self._start_rounding_check()
        if sizes and self.backend.can_capture:
            logger.info("capturing decode steps of %s rows", ", ".join(map(str, sizes)))
            began = time.perf_counter()
            self._graphs = capture_decode_steps(
                self.model,
                self.backend,
                self._uploader,
                sizes,
                lambda rows: min(rows * row_pages, max(4 * num_pages, GRAPH_PAGES) + rows),
                shares=self._shares,
            )
            logger.info("decode steps captured in %.1f s", time.perf_counter() - began)
        layered = self.model.by_layers()
        if sizes and layered is not None:
            most = config.chunked_prefill_size + max_rows
            began = time.perf_counter()
            self._piecewise = PiecewiseGraphs(layered, self.backend, capture_tokens(most))
            logger.info("pieces of steps captured in %.1f s", time.perf_counter() - began)

    def _pool_size(self, backend_name: str, num_pages: int) -> PoolSize:
        if self._tp_group is not None:
            return PoolSize(self._tp_group.all_reduce_min(num_pages))
        size = divide_pool(self._config, self.info, num_pages)
        has_none = self.num_states or self._config.cache == "hash"
        if has_none or not size.num_window_pages:
            return PoolSize(num_pages)
        if not BACKENDS[backend_name].has_window_pages:
            logger.info("no window pages: the %s backend has none", backend_name)
            return PoolSize(num_pages)
        return size

    def _profile_run(
        self, backend_name: str, longest: int, sizes: tuple[int, ...]
    ) -> tuple[MemoryUse, str]:
        """Run the profile schedules over a pool of their own, which goes; what they needed, and the
        backend's name: where the settings left the choice open and FlashInfer's kernels cannot be
        had or fail, Triton's, which brings its compiler along.

        longest: most tokens of a row. sizes: of the graphs to come.
        """
        logger.info("warming up on %s: kernels are compiled when they first run", self._device)
        began, config = time.perf_counter(), self._config
        reset_peak(self._device)
        limits = config.chunked_prefill_size, config.max_running_requests
        num_pages = num_profile_pages(*limits, config.page_size)
        self.pool = KVPool(self.info, PoolSize(num_pages), config.page_size, self._device)
        self._make_states(config.max_running_requests)
        try:
            self.backend = self._make_backend(backend_name)
            self.backend.prepare(frozenset(self.info.attention_features))
            for schedule in profile_schedules(*limits, longest, config.page_size):
                self.collect(self.launch(schedule))
            is_ready = True
        except Exception as reason:
            is_open = config.attention_backend == "auto" and backend_name == "flashinfer"
            if not is_open or isinstance(reason, EngineDead | torch.OutOfMemoryError):
                raise
            logger.warning("%s: the next backend is tried", reason)
            is_ready = False
        if not is_ready:  # the error, which holds the pool, is gone by now
            self._release_pool()
            return self._profile_run("triton", longest, sizes)
        pool_bytes = self.pool.num_bytes + self._states.num_bytes
        backend_name = self.backend.name
        self._release_pool()
        logger.info("warmed up in %.1f s", time.perf_counter() - began)
        graphs = graph_bytes(max(sizes), self.info.vocab_size) + GRAPH_BYTES if sizes else 0
        later = graphs + adapter_bytes(self._config)
        return measure(self._device, pool_bytes, later), backend_name

    def _release_pool(self) -> None:
        """Hold no pool and no states: their memory is free for others."""
        del self.pool, self._states
        self._uploader.states = None
        self.__dict__.pop("backend", None)

    def _make_backend(self, name: str) -> AttentionBackend:
        more: dict[str, Any] = {} if self.info.kv_dtype is None else {"dtype": self.info.dtype}
        return make_backend(
            name,
            self.pool.kv,
            self.info.num_heads,
            windows=self.pool.windows,
            variants=self.info.attention_variants,
            shares=self._shares,
            is_exact=self._config.is_exact_on("cuda"),
            **more,
        )

    def _inexact_reason(self) -> str:
        if not self._config.is_exact_on("cuda"):
            return "kernels of a device take other block sizes for other numbers of rows"
        if self.backend_name != "triton":
            return f"{self.backend_name} takes other block sizes for other numbers of rows"
        if not self.info.is_native:
            return "PyTorch's products sum in another order for another number of rows"
        if self._tp_group is not None and self._device.type == "cuda":
            return "NCCL sums in another order for another number of rows"
        return ""

    @property
    def _shares(self) -> bool:
        """Whether rows attend together to pages in common: not with windows, which go by place."""
        spans = {"sliding_window", "attention_chunk_size"}
        return self._config.cascade_attention and spans.isdisjoint(self.info.attention_features)
