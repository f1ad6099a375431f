"""`TPModelRunner`: one model on several ranks, as the engine sees it: a runner like any other.

This process is rank 0. It has the scheduler and the sampler and sends every schedule to the others
before it computes its own part of it. When a rank is lost all of them are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.decoder_shape import check_decoder, decoder_shape
from radixserve.models.decoder_tensors import describe
from radixserve.models.parallel import check_split
from radixserve.models.source import find_model
from radixserve.runner.base import MemoryPlan, ModelRunner, RunnerKind
from radixserve.runner.device import choose_device
from radixserve.runner.tensor_parallel.group import ProcessTPGroup, open_store
from radixserve.runner.tensor_parallel.schedule_wire import pack_schedule
from radixserve.runner.tensor_parallel.worker_group import WorkerGroup
from radixserve.runner.tensor_parallel.worker_process import WorkerArgs
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput


class TPModelRunner(ModelRunner):
    """A model split over `config.tensor_parallel_size` ranks, each a `kind` of runner.

    Raises what that raises, InvalidRequest where the model or the machine cannot be split so, and
    EngineDead if a rank cannot be started. `launch` and `collect` raise EngineDead, now and ever
    after, when a rank is lost or the step failed in one.
    """

    def __init__(self, model_path: str, config: EngineConfig, kind: RunnerKind) -> None:
        source = find_model(model_path, config.seed)
        size = config.tensor_parallel_size
        check_decoder(source.config)
        check_split(decoder_shape(source.config), size)
        path = model_path if source.path is None else str(source.path)
        configs = _rank_configs(config, size)
        store = open_store(size)
        threads = max(1, torch.get_num_threads() // size)
        self._workers = WorkerGroup(
            [
                WorkerArgs(rank, size, store.port, path, configs[rank], kind, threads)
                for rank in range(1, size)
            ]
        )
        self._groups: list[ProcessTPGroup] = []  # rank 0's, once it is connected
        self._finalizer = weakref.finalize(self, _shut_down, self._workers, self._groups)
        with self._all_ranks():
            group = _connect(self._workers, self._groups, store, size, configs[0])
            self._runner = kind(path, configs[0], group)
        self.model_path = source.path
        self.num_pages = self._runner.num_pages
        self.overlap_depth = self._runner.overlap_depth
        self.backend_name = self._runner.backend_name
        self.resolved_config = self._runner.resolved_config
        own = self._runner.info  # of a rank, which may have fewer positions than the model
        self.info = dataclasses.replace(
            describe(source, own.dtype), max_positions=own.max_positions, kv_dtype=own.kv_dtype
        )

    @property
    def process_ids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return self._workers.process_ids

    def memory_plan(self) -> MemoryPlan:
        """Memory plan of rank 0; all ranks are equal."""
        return self._runner.memory_plan()

    def launch(self, schedule: SchedulerOutput) -> Any:
        with self._all_ranks():
            self._workers.send(pack_schedule(schedule))
            return self._runner.launch(schedule)

    def collect(self, pending: Any) -> ModelRunnerOutput:
        with self._all_ranks():
            return self._runner.collect(pending)

    def close(self) -> None:
        self._finalizer()

    @contextlib.contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Around a call of all ranks: shut the workers down if it fails on any rank."""
        try:
            yield
            self._workers.check_alive()
        except (InvalidRequest, ModelNotSupported):  # while a model is loaded
            self._workers.shut_down(by_force=True)
            raise
        except Exception as error:
            death = self._workers.explain(error)
            self._workers.shut_down(by_force=True)
            raise death from death.__cause__ or error
        except BaseException:
            self._workers.shut_down(by_force=True)
            raise


def _connect(
    workers: WorkerGroup,
    groups: list[ProcessTPGroup],
    store: TCPStore,
    size: int,
    config: EngineConfig,
) -> ProcessTPGroup:
    """Rank 0's group, put into `groups`; it is aborted when another rank dies."""
    workers.wait_until_ready()
    workers.watch(partial(_abort, groups))
    groups.append(ProcessTPGroup(store, 0, size, torch.device(config.device)))
    return groups[0]


def _abort(groups: list[ProcessTPGroup]) -> None:
    for group in groups:
        group.abort()


def _shut_down(workers: WorkerGroup, groups: list[ProcessTPGroup]) -> None:
    workers.shut_down()
    for group in groups:
        group.close()


def _rank_configs(config: EngineConfig, size: int) -> list[EngineConfig]:
    """Config of each rank, with its device. Raises InvalidRequest if there are too few."""
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
