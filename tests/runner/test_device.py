"""Which device is chosen and what its memory leaves for the pool; CUDA is a stand-in here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixserve import InvalidRequest, Runtime
from radixserve.attention.choice import BACKENDS
from radixserve.config import EngineConfig
from radixserve.models.base import ModelInfo, StateShape
from radixserve.runner import cuda_graph
from radixserve.runner.base import ResolvedConfig
from radixserve.runner.cuda_graph import CAPTURE_SIZES, capture_sizes
from radixserve.runner.device import (
    check_dtype,
    choose_device,
    choose_kv_dtype,
    describe_device,
)
from radixserve.runner.pool_sizing import (
    MAX_TOKENS,
    MemoryUse,
    available_bytes,
    choose_device_sizes,
    choose_num_states,
    fitting_pages,
    graph_bytes,
)
from radixserve.runner.profile_run import measure, num_profile_pages, profile_schedules
from radixserve.runner.transfers import DeviceQueue
from tests.runner.on_device import device_runner

GIB = 1 << 30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "current_device": 1,
        "get_device_name": "NVIDIA H200",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.usefixtures("no_gpu")
def test_without_cuda() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(
            InvalidRequest,
            match=rf'device="{asked}" needs a CUDA device: torch .* was built without CUDA; '
            'device="cpu" and "auto" work',
        ):
            choose_device(asked)
    with pytest.raises(InvalidRequest, match="needs a CUDA device"):
        Runtime("demo", device="cuda")
    with pytest.raises(InvalidRequest, match='dtype="float16" needs a CUDA device'):
        Runtime("demo", dtype="float16")
    assert describe_device(torch.device("cpu")) == "cpu"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InvalidRequest, match=r"torch .* finds none"):
        choose_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_with_cuda() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto") == choose_device("auto", "torch") == torch.device("cuda", 0)
    assert choose_device("auto", "cpu") == torch.device("cpu")
    assert choose_device("cuda") == torch.device("cuda", 1)  # the current one
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    assert describe_device(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H200)"
    with pytest.raises(InvalidRequest, match=r'device="cuda:2" is not there; .* cuda:0 to cuda:1'):
        choose_device("cuda:2")
    check_dtype("float16", torch.device("cuda", 0))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", 0, None])
def test_devices_that_there_are_not(device: object) -> None:
    with pytest.raises(InvalidRequest, match='device must be "auto", "cpu", "cuda" or "cuda:N"'):
        EngineConfig(device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16", "device": "cpu"},
        {"dtype": "half"},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": "most"},
        {"cuda_graphs": 1},
        {"attention_backend": "flash"},
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="^" + next(iter(fields))):
        EngineConfig(**fields)


def test_resolved_config_in_words() -> None:
    one = ResolvedConfig("cuda:0 (NVIDIA H200)", "bfloat16", "flashinfer", (1, 2, 64), overlap=True)
    assert str(one) == (
        "cuda:0 (NVIDIA H200), bfloat16, flashinfer attention, "
        "graphs of decode steps of up to 64 rows, overlap"
    )
    assert str(ResolvedConfig("cpu", "float32", "cpu", (), overlap=False)) == (
        "cpu, float32, cpu attention"
    )


# -- memory -------------------------------------------------------------------------------------


def use_of(**fields: int) -> MemoryUse:
    """An H200 with Llama-3-8B: 2 GiB of it are others'."""
    h200 = {"total": 140, "free": 118, "reserved": 20, "peak": 18, "profile_pool": 1}
    return MemoryUse(**{name: size * GIB for name, size in {**h200, **fields}.items()})


def test_the_pool_takes_what_is_left() -> None:
    use = use_of()
    assert use.needed == (2 + 18 - 1) * GIB
    page_bytes = 16 * 131_072
    pages = fitting_pages(use, 0.9, page_bytes, 16)
    assert pages == (126 - 19) * GIB // page_bytes
    taken = use.needed + pages * page_bytes
    assert taken <= 0.9 * use.total < taken + page_bytes
    assert fitting_pages(use, 0.5, page_bytes, 16) == (70 - 19) * GIB // page_bytes
    # What torch holds without using it is the pool's to take; what others hold is not.
    assert fitting_pages(use_of(reserved=30, free=108), 0.9, page_bytes, 16) == pages
    assert fitting_pages(use_of(free=108), 0.9, page_bytes, 16) == pages - 10 * GIB // page_bytes


def test_graphs_are_made_room_for() -> None:
    later = graph_bytes(256, 128_256)
    assert later == 3 * 256 * 128_256 * 4
    pages = [fitting_pages(use, 0.9, 131_072, 1) for use in (use_of(), use_of(graphs=1))]
    assert pages[0] - pages[1] == GIB // 131_072


def test_no_room_for_a_pool() -> None:
    with pytest.raises(
        InvalidRequest, match=r"gpu_memory_utilization=0.1 of 140.0 GiB .* take 19.0 GiB"
    ):
        fitting_pages(use_of(), 0.1, 131_072, 1)
    page = GIB // 2
    assert fitting_pages(use_of(), 19.5 / 140, page, 1) == 1
    with pytest.raises(InvalidRequest, match="leaves no room"):
        fitting_pages(use_of(), 19.4 / 140, page, 1)


def test_states_beside_the_pool() -> None:
    state = StateShape(0, "recurrent", 0, (1 << 18,), torch.float32)  # 1 MiB
    info = ModelInfo(
        architecture="Some",
        is_native=False,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        vocab_size=128_256,
        max_positions=8192,
        eos_ids=(),
        dtype=torch.bfloat16,
        num_parameters=0,
        states=(state,),
    )
    left = available_bytes(use_of(), 0.9)
    assert left == 107 * GIB
    count = choose_num_states(EngineConfig(max_running_requests=64), info, left)
    assert count == 4 * 64 + left // 131_072 // 64  # a state has the memory of 8 tokens
    pages = (left - (count << 20)) // 131_072
    assert fitting_pages(use_of(), 0.9, 131_072, 1, count << 20) == pages
    config = EngineConfig(max_running_requests=64)
    assert choose_device_sizes(config, info, use_of(), None, 0) == (pages, count)
    assert choose_device_sizes(config, info, use_of(), 7, 5) == (7, 5)
    # A third at most; the pool's own size does not come from the host's memory.
    assert choose_num_states(EngineConfig(max_running_requests=9), info, 30 << 20) == 10
    few = EngineConfig(max_running_requests=2, num_pages=1024)
    assert choose_num_states(few, info, GIB) == 4 * 2 + 1024 // 64
    assert choose_num_states(EngineConfig(num_states=70), info, GIB) == 70
    with pytest.raises(InvalidRequest, match="a third of the memory left on the device"):
        choose_num_states(EngineConfig(max_running_requests=11), info, 30 << 20)
    with pytest.raises(InvalidRequest, match="the memory left on the device of -5 bytes holds 0"):
        choose_num_states(EngineConfig(num_states=70), info, -5)
    with pytest.raises(InvalidRequest, match=r"activations, recurrent states and others .* take"):
        fitting_pages(use_of(), 0.9, 131_072, 1, 107 * GIB)


def test_a_small_model_does_not_fill_a_large_card() -> None:
    for page_size in (1, 16):
        assert fitting_pages(use_of(), 0.9, 64 * page_size, page_size) == MAX_TOKENS // page_size


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of what is asked for are torch's."""
    for name, value in {
        "synchronize": None,
        "mem_get_info": (118 * GIB, 140 * GIB),
        "memory_reserved": 20 * GIB,
        "max_memory_allocated": 18 * GIB,
    }.items():
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert measure(torch.device("cuda", 0), GIB, 0) == use_of()


# -- the profile run ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize(
    ("chunked_prefill_size", "max_running_requests", "longest"),
    [(512, 64, 4096), (512, 4, 100), (3, 1, 8), (1, 2, 2)],
)
def test_profile_schedules(
    chunked_prefill_size: int, max_running_requests: int, longest: int, page_size: int
) -> None:
    room = num_profile_pages(chunked_prefill_size, max_running_requests, page_size)
    schedules = list(
        profile_schedules(chunked_prefill_size, max_running_requests, longest, page_size)
    )
    for schedule in schedules:
        pages = [page for row in schedule.rows for page in row.page_ids.tolist()]
        assert len(set(pages)) == len(pages)
        assert max(pages) < room
        assert (
            len({row.request_id for row in schedule.rows})
            == len(schedule.rows)
            <= max_running_requests
        )
        assert all(1 <= len(row.token_ids) <= longest for row in schedule.rows)
        slots = {row.slot for row in schedule.rows}
        assert slots <= set(range(max_running_requests))
        assert len(slots) == len(schedule.rows)
        num_tokens = sum(len(row.token_ids) for row in schedule.rows)
        assert num_tokens == schedule.num_prefill_tokens + schedule.num_decode_tokens
    (copy,) = schedules[0].cow_copies.tolist()
    used = {page for row in schedules[0].rows for page in row.page_ids.tolist()}
    assert copy[0] in used
    assert copy[1] not in used
    assert copy[1] < room
    longest_row = max(schedules[0].rows, key=lambda row: len(row.token_ids))
    if len(longest_row.token_ids) > 1:  # a prompt that is scored has the most logits
        assert longest_row.logprob_targets is not None
        assert len(longest_row.logprob_targets) == len(longest_row.token_ids) - 1
    largest = sum(len(row.token_ids) for row in schedules[0].rows)
    num_chunks = min(-(-chunked_prefill_size // longest), max_running_requests)
    assert (
        largest
        == min(chunked_prefill_size, num_chunks * longest) + max_running_requests - num_chunks
    )
    assert len(schedules[0].rows) == len(schedules[-1].rows) == max_running_requests


# -- capturing ----------------------------------------------------------------------------------


def test_capture_sizes() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(3) == (1, 2, 3)
    assert capture_sizes(64)[-3:] == (48, 56, 64)
    assert capture_sizes(100)[-3:] == (80, 96, 100)
    assert capture_sizes(256) == capture_sizes(10_000) == CAPTURE_SIZES
    for most in range(1, 300):
        sizes = capture_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == min(most, 256)


class FakeCuda:
    """Notes what is done with streams, events and graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        side = SimpleNamespace(wait_stream=lambda _: self.done.append("side waits"))
        main = SimpleNamespace(wait_stream=lambda _: self.done.append("main waits"))
        graph = SimpleNamespace(replay=lambda: self.done.append("replay"))
        for name, value in {
            "Stream": lambda _: side,
            "current_stream": lambda _: main,
            "stream": lambda _: self._inside("side"),
            "CUDAGraph": lambda: graph,
            "graph_pool_handle": lambda: "pool",
            "graph": self._capture,
            "Event": lambda: self,
            "device": lambda one: self._inside(f"on {one}"),
            "synchronize": lambda _: self.done.append("all"),
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, value)

    def record(self, stream: object) -> None:
        assert stream is torch.cuda.current_stream(0)
        self.done.append("record")

    def synchronize(self) -> None:
        self.done.append("wait")

    @contextlib.contextmanager
    def _inside(self, name: str) -> Any:
        self.done.append(f"enter {name}")
        yield
        self.done.append(f"leave {name}")

    def _capture(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        assert graph.replay
        assert stream.wait_stream
        assert capture_error_mode == "thread_local"
        return self._inside(f"capture into {pool}")


def test_a_capture_is_warmed_up_beside_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    capturer = cuda_graph.GraphCapturer(torch.device("cuda", 0))
    replay = capturer.capture(lambda: fake.done.append("run"))
    assert fake.done == [
        *("side waits", "enter side", "run", "run", "leave side", "main waits"),
        *("enter capture into pool", "run", "leave capture into pool"),
    ]
    fake.done.clear()
    replay()
    assert fake.done == ["replay"]


def test_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    queue = DeviceQueue(torch.device("cuda", 0))
    with queue.active():
        event = queue.record_event()
    event.wait()
    queue.wait()
    assert fake.done == ["enter on 0", "record", "leave on 0", "wait", "all"]


def test_what_the_log_says(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from tests.checkpoints import make_checkpoint

    caplog.set_level("INFO", "radixserve")
    runner = device_runner(make_checkpoint(tmp_path, "llama"), num_pages=100)
    text = caplog.text
    assert "warmed up in" in text
    assert "capturing decode steps of 1, 2, 4, 8 rows" in text
    assert "decode steps captured in" in text
    assert f"on {runner.resolved_config}; 100 pages of 1 tokens" in text
    assert "rows" in runner.resolved_config.inexact
    assert runner.resolved_config == ResolvedConfig(
        "cpu",
        "float32",
        "triton",
        (1, 2, 4, 8),
        overlap=True,
        piecewise_tokens=72,
        inexact=runner.resolved_config.inexact,
    )


def test_kv_dtypes_that_no_runner_has() -> None:
    with pytest.raises(InvalidRequest, match="kv_dtype must be"):
        EngineConfig(kv_dtype="float32")  # type: ignore[arg-type]


def choose(asked: str, dtype: torch.dtype, device: str, backend_name: str) -> torch.dtype | None:
    offered = BACKENDS[backend_name].kv_dtypes
    return choose_kv_dtype(asked, dtype, torch.device(device), backend_name, offered=offered)


def test_kv_dtypes_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one than the model's needs a backend that reads it, and fp8 a device that has it."""
    f32, bf16, fp8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choose("auto", bf16, "cuda", "flashinfer") is None
    assert choose("bfloat16", bf16, "cuda", "flashinfer") is None
    assert choose("bfloat16", f32, "cpu", "cpu") == bf16
    for backend in ("cpu", "torch"):
        assert choose("int8", bf16, "cpu", backend) == torch.int8
    for backend in ("triton", "torch"):
        assert choose("int8", bf16, "cuda", backend) == torch.int8
    for backend in ("triton", "flashinfer"):
        assert choose("fp8_e4m3", bf16, "cuda", backend) == fp8
    words = 'attention_backend="flashinfer" does not read .* in it; "auto", "fp8_e4m3" can'
    with pytest.raises(InvalidRequest, match=words):
        choose("int8", bf16, "cuda", "flashinfer")
    with pytest.raises(InvalidRequest, match=r'"cpu" does not read .* "auto", "int8" can'):
        choose("fp8_e4m3", bf16, "cpu", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(InvalidRequest, match=r"capability is \(8, 0\), .*; \"auto\", \"int8\" can"):
        choose("fp8_e4m3", bf16, "cuda", "triton")
    with pytest.raises(InvalidRequest, match='kv_dtype="fp8_e4m3" cannot be used'):
        Runtime("demo", num_pages=100, kv_dtype="fp8_e4m3", device="cpu")
