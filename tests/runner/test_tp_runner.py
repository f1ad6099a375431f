"""One model on several ranks: the tokens of one, and no rank that outlives the others."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from radixserve.api.runtime import Runtime
from radixserve.config import EngineConfig
from radixserve.errors import EngineDead, InvalidRequest, ModelNotSupported
from radixserve.request import SamplingParams
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve.runner.cuda_runner import CudaModelRunner
from radixserve.runner.factory import make_runner
from radixserve.runner.tensor_parallel.runner import TPModelRunner
from radixserve.runner.tensor_parallel.schedule_wire import pack_schedule
from radixserve.runner.tensor_parallel.worker_process import serve
from radixserve.schedule import SchedulerOutput
from tests.checkpoints import make_checkpoint
from tests.exact.programs import differences_of
from tests.models.test_parallel import Rendezvous, ThreadTPGroup
from tests.pacing import PATIENCE_S, held, wait_until
from tests.runner.test_worker_group import is_alive

SETTINGS: dict[str, Any] = {
    "admission": "greedy",  # preemptions do not depend on times
    "device": "cpu",
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 24,
    "chunked_prefill_size": 48,
    "max_running_requests": 6,
}
MODEL = "random:tiny-llama"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, max_tokens=6, seed=5)
SHARED = [(7 * i * i + 3 * i) % 288 for i in range(60)]
PROMPTS = [[*SHARED[: 40 + 3 * i], i, 2 * i] for i in range(5)] + [[9], SHARED[:1]]


class Answers:
    """What a Runtime says to all sorts of questions, in plain values."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt

    def all(self) -> list[Any]:
        rt, found = self.rt, []
        each = [GREEDY, SAMPLED] * 3 + [GREEDY]
        for _ in ("cold", "warm"):
            found += [(out.token_ids, out.usage) for out in rt.generate(PROMPTS, each)]
            each = [*each[1:], SAMPLED]
        several = SamplingParams(n=3, seed=2, max_tokens=3)
        found += [[out.token_ids for out in rt.generate(SHARED, several)]]
        found += [[out.token_ids for out in rt.beam_search(SHARED[:20], 3, 4)]]
        next(iter(rt.stream(SHARED[::-1], GREEDY)))  # left in the middle
        rt.check()
        return found

    def numbers(self) -> list[float]:
        (out,) = self.rt.generate([SHARED], SamplingParams(max_tokens=4, prompt_logprobs=1, seed=1))
        scores = self.rt.score(SHARED[:9], [[4, 5], [6]])
        logprobs = self.rt.generate(PROMPTS[0], GREEDY).logprobs
        return [*out.prompt_logprobs[1:], *(score.logprob for score in scores), *logprobs]


class Watched(Runtime):
    """Tells its runner."""

    def _make_runner(self, model_path: str) -> Any:
        self.runner = super()._make_runner(model_path)
        return self.runner


@pytest.fixture(scope="module")
def parallel() -> Iterator[Watched]:
    with Watched(MODEL, tensor_parallel_size=2, **SETTINGS) as rt:
        assert isinstance(rt.runner, TPModelRunner)
        yield rt
    assert not any(map(is_alive, rt.runner.process_ids))


def test_two_ranks_give_the_tokens_of_one(parallel: Watched) -> None:
    with Runtime(MODEL, **SETTINGS) as one:
        assert Answers(parallel).all() == Answers(one).all()
        assert Answers(parallel).numbers() == pytest.approx(Answers(one).numbers(), abs=1e-4)
        assert parallel.cache_stats()["preemptions"] == one.cache_stats()["preemptions"]
        assert parallel.model == one.model
        assert parallel.max_seq_len == one.max_seq_len
        assert 2 * parallel.memory.pool_bytes == one.memory.pool_bytes
        assert parallel.memory.weight_bytes < one.memory.weight_bytes


def test_two_ranks_have_the_same_bits_warm_and_batched(parallel: Watched) -> None:
    assert parallel.resolved_config.inexact == ""
    for seed in range(2):
        assert not list(differences_of(parallel, seed, 4, None, longest=60))


def test_a_lost_rank_ends_the_engine(parallel: Watched) -> None:
    """The last test of these two ranks."""
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            parallel.generate([[5]] * 6, SamplingParams(max_tokens=400, ignore_eos=True))
        except EngineDead as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    with held(parallel):
        asking.start()
        wait_until(lambda: parallel.cache_stats()["running"] > 0)
        (pid,) = parallel.runner.process_ids
        os.kill(pid, signal.SIGKILL)
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert "rank 1 was ended by signal 9" in str(caught[0])
    for _ in range(2):
        with pytest.raises(EngineDead, match="rank 1 was ended"):
            parallel.generate([1, 2], GREEDY)
    assert not is_alive(pid)


# -- what is refused, before a process is started -------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "error", "words"),
    [
        ("llama", {"tensor_parallel_size": 3}, InvalidRequest, "possible are 1, 2, 4"),
        ("llama", {"tensor_parallel_size": 2, "device": "cuda:1"}, InvalidRequest, "one device"),
        ("llama", {"tensor_parallel_size": 0}, InvalidRequest, "between 1 and 64"),
        ("olmo", {"tensor_parallel_size": 2}, ModelNotSupported, "OlmoForCausalLM"),
    ],
)
def test_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    make_checkpoint(tmp_path, family)
    with pytest.raises(error, match=words):
        make_runner(str(tmp_path), EngineConfig(**{"device": "cpu", **settings}))


def test_one_rank_needs_no_ranks() -> None:
    runner = make_runner(MODEL, EngineConfig(**SETTINGS))
    assert isinstance(runner, CpuModelRunner)


# -- steps that overlap, in threads ---------------------------------------------------------------


class ThreadedRunner:
    """Rank 0 here, rank 1 in a thread that does what its process would do; both on_device."""

    def __init__(self, config: EngineConfig) -> None:
        room, (ours, theirs) = Rendezvous(2), Pipe()
        self._link = ours
        self._thread = threading.Thread(target=self._follow, args=(theirs, room, config))
        self._thread.start()
        self._runner = CudaModelRunner(MODEL, config, ThreadTPGroup(0, 2, room))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _follow(self, link: Any, room: Rendezvous, config: EngineConfig) -> None:
        runner = CudaModelRunner(MODEL, config, ThreadTPGroup(1, 2, room))
        serve(link, runner)

    def launch(self, schedule: SchedulerOutput) -> Any:
        self._link.send_bytes(pack_schedule(schedule))
        return self._runner.launch(schedule)

    def close(self) -> None:
        self._link.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Threaded(Runtime):
    def _make_runner(self, model_path: str) -> Any:
        assert model_path == MODEL
        return ThreadedRunner(self.config)


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_on_a_device_give_the_tokens_of_one(overlap: bool) -> None:
    """A CUDA device's path over references of its kernels: also where the tokens of a step feed
    the next one before the host has seen them."""
    with Runtime(MODEL, **SETTINGS) as one:
        wanted = Answers(one).all()
    with Threaded(MODEL, overlap=overlap, **SETTINGS) as rt:
        assert rt.attention_backend == "triton"
        assert Answers(rt).all() == wanted


@pytest.mark.long
def test_processes_on_a_device_give_the_tokens_of_one() -> None:
    class OnDevice(Runtime):
        def _make_runner(self, model_path: str) -> Any:
            return TPModelRunner(model_path, self.config, CudaModelRunner)

    with (
        Runtime(MODEL, **SETTINGS) as one,
        OnDevice(MODEL, tensor_parallel_size=4, **SETTINGS) as rt,
    ):
        assert Answers(rt).all() == Answers(one).all()


@pytest.mark.long
def test_forgotten_ranks_end() -> None:
    runner: TPModelRunner | None = TPModelRunner(
        MODEL, EngineConfig(**SETTINGS, tensor_parallel_size=2), CpuModelRunner
    )
    assert runner is not None
    (pid,) = runner.process_ids
    runner = None
    gc.collect()
    wait_until(lambda: not is_alive(pid))
