"""`CpuModelRunner`: a step is computed when it is launched."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from radixserve.attention.choice import has_window_pages, make_backend
from radixserve.config import EngineConfig
from radixserve.models.parallel import TPGroup
from radixserve.runner.base import SingleDeviceRunner, load_on_device
from radixserve.runner.grammar_masks import StepMasks, begin_masks
from radixserve.runner.input_batch import InputBatch, prepare_inputs
from radixserve.runner.kv_pool import KVPool, PoolSize, choose_num_pages, choose_pool_size
from radixserve.runner.recurrent_states import RecurrentStates, choose_num_states
from radixserve.runner.sampler import sample, score, with_scores
from radixserve.runner.system_memory import keep_freed_memory
from radixserve.runner.window_table import WindowTable
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput, WindowLayers


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
        self._states = RecurrentStates(self.info, self.num_states, self._device)
        self.backend = make_backend(
            *(parts.backend_name, self.pool.kv, self.info.num_heads),
            windows=self.pool.windows,
            shares=config.cascade_attention,
            is_exact=self.info.is_quantized,  # rounded to 8 bits, a last bit may become a step
        )
        self._describe()

    def _pool_size(self, backend_name: str, tp_group: TPGroup | None) -> PoolSize:
        config, states_bytes = self._config, self.num_states * self.info.state_bytes
        if tp_group is not None:
            return PoolSize(tp_group.agree(choose_num_pages(config, self.info, states_bytes)))
        if self.num_states or config.cache == "hash" or not has_window_pages(backend_name):
            return PoolSize(choose_num_pages(config, self.info, states_bytes))
        return choose_pool_size(config, self.info)

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Copy page prefixes, run every row through the model in one forward, sample the tokens.

        Where it raises ValueError the page prefixes and states were copied.
        """
        began = time.perf_counter()
        self.pool.copy_page_prefixes(schedule.cow_copies)
        if self._window_table is not None:
            assert schedule.windows is not None, "nothing is said of window pages"
            self._window_table.update(schedule.windows.pages)
            self.pool.copy_window_prefixes(schedule.windows.copies)
        self._states.copy(schedule.state_copies)
        if not schedule.rows:
            return ModelRunnerOutput((), {"prepare": 0.0, "forward": 0.0, "sample": 0.0})
        inputs = prepare_inputs(schedule.rows, self.pool.page_size)
        batch = inputs.to_device(self._device)
        if (states := self._states.plan(schedule.rows)) is not None:
            tensors = {name: torch.from_numpy(array) for name, array in states.arrays.items()}
            batch = replace(batch, recurrent=self._states.begin(states, tensors))
        if self._window_table is not None:
            batch = replace(batch, window=self._window_table.of_batch(inputs))
        self.backend.plan(batch)
        self.note_wait()
        prepared = time.perf_counter()
        specs = [row.sample for row in inputs.requests if row.sample is not None]
        begun = begin_masks(specs, self.info.vocab_size)
        logits = self.model.forward(batch, self.backend)  # [S, V]
        computed = time.perf_counter()
        num_rows = len(schedule.rows)
        outputs = _sample_rows(logits, inputs, begun) if self._is_sampling else (None,) * num_rows
        seconds = {
            "prepare": prepared - began,
            "forward": computed - prepared,
            "sample": time.perf_counter() - computed,
        }
        return ModelRunnerOutput(outputs, seconds)

    def collect(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        return pending


def _sample_rows(
    logits: Tensor, inputs: InputBatch, begun: StepMasks | None
) -> tuple[SampleOutput | None, ...]:
    """A token or scores for each row that asks for them."""
    rows = inputs.requests
    specs = [row.sample for row in rows if row.sample is not None]
    if len(specs) == len(logits):
        outputs = sample(logits, specs, begun)
        if len(outputs) == len(rows):
            return tuple(outputs)
        sampled = iter(outputs)
        return tuple(None if row.sample is None else next(sampled) for row in rows)
    first, counts = inputs.logit_ranges()
    last = (first + counts - 1).tolist()
    sources = [at for at, row in zip(last, rows, strict=True) if row.sample is not None]
    sampled = iter(sample(logits[sources], specs, begun))
    answers: list[SampleOutput | None] = []
    for row, begin in zip(rows, first.tolist(), strict=True):
        output = None if row.sample is None else next(sampled)
        if row.logprob_targets is not None:
            targets = row.logprob_targets
            scored = score(logits[begin : begin + len(targets)], targets, row.num_top_logprobs)
            output = with_scores(output, scored)
        answers.append(output)
    return tuple(answers)
