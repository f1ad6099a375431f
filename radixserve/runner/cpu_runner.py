"""`CpuModelRunner`: `launch` builds a step's arrays, `collect` computes the step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from radixserve.attention.base import ForwardBatch, RecurrentRows, StateRows
from radixserve.attention.choice import BACKENDS, make_backend
from radixserve.config import EngineConfig
from radixserve.models.parallel import TPGroup
from radixserve.runner.adapter_rows import adapter_rows
from radixserve.runner.base import SingleDeviceRunner, load_on_device
from radixserve.runner.grammar_bitmask import GrammarBitmaskFuture
from radixserve.runner.input_batch import HostBatches, InputBatch
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.pool_sizing import (
    PoolSize,
    choose_num_pages,
    choose_num_states,
    choose_pool_size,
)
from radixserve.runner.recurrent_states import RecurrentStates
from radixserve.runner.sample_plan import plan_samples
from radixserve.runner.sampler import sample_step
from radixserve.runner.system_memory import keep_freed_memory
from radixserve.runner.window_table import WindowTable
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput, WindowLayers

Prepared = tuple[InputBatch, ForwardBatch, float]  # a step's rows, and the seconds that these took


class CpuModelRunner(SingleDeviceRunner):
    """See `ModelRunner`. tp_group: this runner is one of several that compute each layer together.

    Raises what `load_on_device` and `choose_num_pages` raise.
    """

    overlap_depth = 0

    def __init__(
        self, model_path: str, config: EngineConfig, tp_group: TPGroup | None = None
    ) -> None:
        keep_freed_memory()
        parts = load_on_device(model_path, config, torch.device("cpu"), tp_group)
        super().__init__(parts, config)
        self._window_table: WindowTable | None = None
        self._is_sampling = tp_group is None or tp_group.rank == 0
        self.num_states = choose_num_states(config, self.info)
        size = self._pool_size(parts.backend_name, tp_group)
        self.pool = KVPool(self.info, size, config.page_size, self._device)
        if size.num_window_pages:
            self.windows = WindowLayers(size.num_window_pages, self.info.window_size)
            self._window_table = WindowTable(size, config.page_size)
        self._batches = HostBatches(config.page_size)
        self._states = RecurrentStates(self.info, self.num_states, self._device)
        self.backend = make_backend(
            *(parts.backend_name, self.pool.kv, self.info.num_heads),
            dtype=self.info.dtype,
            windows=self.pool.windows,
            others=self.pool.others,
            shares=config.cascade_attention,
            # Rounded to 8 bits, a last bit may become a step.
            is_exact=config.is_exact_on("cpu") or self.info.is_quantized,
        )
        self._start_rounding_check()
        self._describe()

    def warm_up(self) -> bool:
        """See `ModelRunner.warm_up`."""
        return self.pool.enlarge_next()

    def _pool_size(self, backend_name: str, tp_group: TPGroup | None) -> PoolSize:
        config, states_bytes = self._config, self.num_states * self.info.state_bytes
        if tp_group is not None:
            return PoolSize(
                tp_group.all_reduce_min(choose_num_pages(config, self.info, states_bytes))
            )
        if self.num_states or config.cache == "hash" or not BACKENDS[backend_name].has_window_pages:
            return PoolSize(choose_num_pages(config, self.info, states_bytes))
        return choose_pool_size(config, self.info)

    def launch(self, schedule: SchedulerOutput) -> Prepared | None:
        """Copy page prefixes and lay out the rows. None where there are none.

        Where it raises ValueError the page prefixes and states were copied.
        """
        began = time.perf_counter()
        if len(schedule.cow_copies) or schedule.state_copies or self._window_table is not None:
            self._copy(schedule)
        if not schedule.rows.request_ids:
            return None
        inputs, batch = self._batches.prepare(schedule.rows)
        if self._states.tensors:
            batch = replace(batch, recurrent=self._begin_states(inputs))
        if self.pictures is not None:
            with torch.inference_mode():
                batch = replace(batch, given=self.pictures.take(inputs))
        if schedule.rows.adapters:
            batch = replace(batch, adapters=adapter_rows(inputs, self._adapters))
        if self._window_table is not None:
            batch = replace(batch, window=self._window_table.of_batch(inputs))
        self.backend.plan(batch)
        return inputs, batch, time.perf_counter() - began

    @torch.inference_mode()
    def _copy(self, schedule: SchedulerOutput) -> None:
        """Make the copies before a step's rows."""
        self.pool.copy_page_prefixes(schedule.cow_copies)
        if self._window_table is not None:
            assert schedule.windows is not None, "nothing is said of window pages"
            self._window_table.update(schedule.windows.pages)
            self.pool.copy_window_prefixes(schedule.windows.copies)
        if schedule.state_copies:
            self._states.copy(schedule.state_copies)

    @torch.inference_mode()
    def _begin_states(self, inputs: InputBatch) -> RecurrentRows | None:
        """The recurrent states that the rows read and write."""
        if self.model.reads_state_rows:
            ids = self._states.row_ids(inputs)
            rows = StateRows(**{name: torch.from_numpy(array) for name, array in ids.items()})
            return self._states.of_rows(rows)
        states = self._states.plan(inputs.rows)
        if states is None:
            return None
        tensors = {name: torch.from_numpy(array) for name, array in states.arrays.items()}
        return self._states.begin(states, tensors)

    def collect(self, pending: Prepared | None) -> ModelRunnerOutput:
        """Run every row through the model in one forward and sample the tokens. Most of it runs
        without Python's lock."""
        if pending is None:
            return ModelRunnerOutput((), {"prepare": 0.0, "forward": 0.0, "sample": 0.0})
        inputs, batch, prepare_s = pending
        began = time.perf_counter()
        plan = plan_samples(inputs)
        mask_future = (
            GrammarBitmaskFuture(plan.rows.specs, self.info.vocab_size)
            if plan.has_grammar
            else None
        )
        # [S, V]
        if self.model.is_compiled:
            logits = self.model.forward(batch, self.backend)
        else:
            with torch.inference_mode():
                logits = self.model.forward(batch, self.backend)
        if self._rounding_check is not None:
            self._rounding_check.note(inputs.host)
            self._check_rounding()
        computed = time.perf_counter()
        outputs: tuple[SampleOutput | None, ...] = (None,) * plan.num_outputs
        if self._is_sampling:
            outputs = sample_step(logits, plan, mask_future)
        seconds = {
            "prepare": prepare_s,
            "forward": computed - began,
            "sample": time.perf_counter() - computed,
        }
        return ModelRunnerOutput(outputs, seconds)
