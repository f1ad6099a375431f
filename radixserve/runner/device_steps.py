"""A runner's steps on a device: queued by `launch`, read by `collect`.

Between the two the host is free, to prepare the step after. Steps run in the order of their
launches, one after the other; nothing of a schedule is kept once its launch has returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.parallel import TPGroup
from radixserve.runner.cuda_graph import DecodeGraphs
from radixserve.runner.device_batch import BatchSender
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.device_sampler import DeviceSampler, Drawing
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.page_table import PageTable
from radixserve.runner.sample_plan import SamplePlan, plan_samples
from radixserve.runner.step_layout import lay_out, pad
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput
from radixserve_kernels import gpu_ops


@dataclass(slots=True)
class PendingStep:
    """A step that was queued. Collect it once."""

    drawing: Drawing | None  # None: nothing is drawn here
    num_outputs: int
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prepare", "forward", "sample"), 0.0)
    )


class DeviceSteps:
    """Of one model, over one pool at a time: `use` comes first."""

    def __init__(
        self,
        model: LanguageModel,
        queue: DeviceQueue,
        sender: BatchSender,
        table: PageTable,
        ranks: TPGroup | None = None,
    ) -> None:
        self._model, self._queue, self._sender, self._table = model, queue, sender, table
        self._sampler = DeviceSampler(queue, ranks)
        self._over: tuple[KVPool, AttentionBackend] | None = None
        self._draws = ranks is None or ranks.rank == 0
        self.graphs = DecodeGraphs(queue, sender)
        self._tokens = torch.zeros(0, dtype=torch.int64, device=queue.device)  # of the last step
        self._is_known = np.zeros(0, bool)  # which of them the device has

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    def use(self, pool: KVPool, backend: AttentionBackend) -> None:
        """Run over this pool from now on: nothing is known of its pages."""
        self._over = pool, backend
        self._table.clear()

    def let_go(self) -> None:
        """Hold no pool: there is to be another one."""
        self._over = None

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> PendingStep:
        """Queue a step: page heads are copied, all rows go through the model, tokens are drawn.

        A row's `source` means an output of the schedule launched before. Raises ValueError on a row
        whose pages do not fit it; nothing was queued then.
        """
        began = time.perf_counter()
        with self._queue.active():
            if not schedule.rows:
                self._copy_heads(schedule)
                return PendingStep(None, 0)
            try:
                return self._launch(schedule, began)
            except BaseException:
                self._table.forget(schedule.rows)
                raise

    @torch.inference_mode()
    def collect(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for a launched step and read what it drew."""
        if pending.drawing is None:
            return ModelRunnerOutput((None,) * pending.num_outputs, pending.seconds)
        began = time.perf_counter()
        with self._queue.active():
            pending.drawing.parcel.mark.wait()
            arrived = time.perf_counter()
            outputs = self._sampler.collect(pending.drawing)
        pending.seconds["forward"] += arrived - began
        pending.seconds["sample"] += time.perf_counter() - arrived
        return ModelRunnerOutput(outputs, pending.seconds)

    def _launch(self, schedule: SchedulerOutput, began: float) -> PendingStep:
        assert self._over is not None
        rows, (pool, backend) = schedule.rows, self._over
        layout = lay_out(rows, pool.page_size)
        graph = self.graphs.pick(layout)
        if graph is not None:
            layout = pad(layout, graph.num_rows)
        assert self._is_known[layout.late[1]].all(), "a token was drawn on the host"
        plan = plan_samples(schedule, layout, self._model.info.vocab_size) if self._draws else None
        extra = {} if plan is None else dict(plan.arrays)
        if len(schedule.cow_copies):
            extra["copies"] = np.ascontiguousarray(schedule.cow_copies, np.int32)
        batch, there = self._sender.send(layout, extra, self._tokens, is_fixed=graph is not None)
        if "copies" in there:
            gpu_ops.copy_heads(pool.kv, there["copies"])
        if graph is None:
            backend.plan(batch)
            prepared = time.perf_counter()
            logits = self._model.forward(batch, backend)
        else:
            replay = graph.plan(batch)
            prepared = time.perf_counter()
            logits = replay()
        layout.host.close()
        computed = time.perf_counter()
        pending = self._sample(schedule, plan, logits, there, is_lent=graph is not None)
        pending.seconds["prepare"] = prepared - began
        pending.seconds["forward"] = computed - prepared
        pending.seconds["sample"] = time.perf_counter() - computed
        return pending

    def _sample(
        self,
        schedule: SchedulerOutput,
        plan: SamplePlan | None,
        logits: Tensor,
        there: dict[str, Tensor],
        *,
        is_lent: bool,
    ) -> PendingStep:
        if plan is None:
            num_rows = len(schedule.rows)
            self._tokens = self._sampler.follow(num_rows, self._queue.device)
            self._is_known = np.ones(num_rows, bool)
            return PendingStep(None, num_rows)
        drawing = self._sampler.launch(logits, plan, there, is_lent=is_lent)
        self._tokens = drawing.tokens
        self._is_known = np.zeros(plan.num_outputs, bool)
        self._is_known[plan.outputs] = True
        return PendingStep(drawing, plan.num_outputs)

    def _copy_heads(self, schedule: SchedulerOutput) -> None:
        assert self._over is not None
        if len(schedule.cow_copies):
            copies = torch.from_numpy(np.ascontiguousarray(schedule.cow_copies, np.int32))
            gpu_ops.copy_heads(self._over[0].kv, copies.to(self._queue.device))
