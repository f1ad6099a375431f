"""`ParallelRunner`: one model on several ranks, as the engine sees it: a runner like any other.

This process is rank 0. It has the scheduler and the sampler and sends every schedule to the others
before it computes its own part of it. When a rank is lost all of them are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from functools import partial

import torch
from torch.distributed import TCPStore

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.base import ModelInfo
from radixserve.models.decoder import check_decoder, decoder_shape
from radixserve.models.describe import describe
from radixserve.models.parallel import check_split
from radixserve.models.source import find_model
from radixserve.runner.device import choose_device
from radixserve.runner.device_steps import PendingStep
from radixserve.runner.model_runner import MemoryPlan, ModelRunner
from radixserve.runner.process_ranks import ProcessRanks, open_store
from radixserve.runner.rank_crew import RankCrew
from radixserve.runner.rank_process import RankJob
from radixserve.runner.rank_wire import WireWriter
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput


def make_runner(model_path: str, config: EngineConfig) -> ModelRunner | ParallelRunner:
    """The runner that the config asks for: of one device, or of as many as it says."""
    if config.tensor_parallel_size == 1:
        return ModelRunner(model_path, config)
    return ParallelRunner(model_path, config)


class ParallelRunner:
    """A model split over `config.tensor_parallel_size` ranks. One thread, `close` from any.

    `on_device` as in `ModelRunner`. Raises what that raises, InvalidRequest where the model or the
    machine cannot be split so, and EngineDead if a rank cannot be started.
    """

    def __init__(self, model_path: str, config: EngineConfig, *, on_device: bool = False) -> None:
        source = find_model(model_path, config.seed)
        size = config.tensor_parallel_size
        check_decoder(source.config)
        check_split(decoder_shape(source.config), size)
        path = model_path if source.path is None else str(source.path)
        configs = _configs(config, size)
        store = open_store(size)
        threads = max(1, torch.get_num_threads() // size)
        self._crew = RankCrew(
            [
                RankJob(rank, size, store.port, path, configs[rank], on_device, threads)
                for rank in range(1, size)
            ]
        )
        self._made: list[ProcessRanks] = []
        self._finalizer = weakref.finalize(self, _end, self._crew, self._made)
        self._writer = WireWriter()
        with self._together():
            ranks = _connect(self._crew, self._made, store, size, configs[0])
            self._runner = ModelRunner(path, configs[0], ranks, on_device=on_device)
        self.model_path = source.path
        self.num_pages = self._runner.num_pages
        self.backend_name = self._runner.backend_name
        self.choices = self._runner.choices
        own = self._runner.info  # of a rank, which may have fewer positions than the model
        whole = describe(source, own.dtype)
        self.info: ModelInfo = dataclasses.replace(whole, max_positions=own.max_positions)

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1, 2 ..."""
        return self._crew.process_ids

    def memory_plan(self) -> MemoryPlan:
        """Of rank 0; the others have as much."""
        return self._runner.memory_plan()

    @property
    def overlap_depth(self) -> int:
        """Steps that may be in flight when the next one is launched: 0 or 1."""
        return int(self.can_overlap)

    @property
    def can_overlap(self) -> bool:
        """See `ModelRunner`, as for the steps."""
        return self._runner.can_overlap

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Raises EngineDead, now and ever after, when a rank is lost or the step failed in one."""
        with self._together():
            self._crew.feed(self._writer.pack(schedule))
            return self._runner.execute(schedule)

    def launch(self, schedule: SchedulerOutput) -> PendingStep | ModelRunnerOutput:
        """Raises what `execute` raises."""
        with self._together():
            self._crew.feed(self._writer.pack(schedule))
            return self._runner.launch(schedule)

    def collect(self, pending: PendingStep | ModelRunnerOutput) -> ModelRunnerOutput:
        """Raises what `execute` raises."""
        with self._together():
            return self._runner.collect(pending)

    def close(self) -> None:
        """End the other ranks. Can be called again."""
        self._finalizer()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What is done inside is done by all ranks, or by none any more."""
        try:
            yield
            self._crew.check_alive()
        except (InvalidRequest, ModelNotSupported):  # of a model that is being loaded
            self._crew.end(by_force=True)
            raise
        except Exception as error:
            death = self._crew.explain(error)
            self._crew.end(by_force=True)
            raise death from death.__cause__ or error
        except BaseException:
            self._crew.end(by_force=True)
            raise


def _connect(
    crew: RankCrew, made: list[ProcessRanks], store: TCPStore, size: int, config: EngineConfig
) -> ProcessRanks:
    """Rank 0's way to the others, put into `made`; it is cut when one of them dies."""
    crew.wait_until_ready()
    crew.watch(partial(_cut, made))
    made.append(ProcessRanks(store, 0, size, torch.device(config.device)))
    return made[0]


def _cut(made: list[ProcessRanks]) -> None:
    for ranks in made:
        ranks.abort()


def _end(crew: RankCrew, made: list[ProcessRanks]) -> None:
    crew.end()
    for ranks in made:
        ranks.close()


def _configs(config: EngineConfig, size: int) -> list[EngineConfig]:
    """Of each rank, with its own device. Raises InvalidRequest if there are too few."""
    device = choose_device(config.device)
    own = dataclasses.replace(config, device=device.type, tensor_parallel_size=1)
    if device.type == "cpu":
        return [own] * size
    count = torch.cuda.device_count()
    if count < size:
        raise InvalidRequest(
            f"tensor_parallel_size={size} needs as many CUDA devices, and there are {count}; "
            'device="cpu" runs the ranks on the processor'
        )
    return [dataclasses.replace(own, device=f"cuda:{rank}") for rank in range(size)]
