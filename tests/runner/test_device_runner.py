"""The path of a CUDA device, end to end on CPU tensors, against the CPU's own: the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve import EngineDead, ModelNotSupported, RequestFailed, Runtime, SamplingParams
from radixserve.attention.cuda import flashinfer_calls
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.completion import Completion
from radixserve.config import EngineConfig
from radixserve.runner import cuda_graph, cuda_runner
from radixserve.runner.cuda_graph import DecodeGraph
from radixserve.runner.cuda_runner import PendingStep
from radixserve.runner.device_batch import PageTable
from radixserve.runner.device_sampler import DeviceSampler
from radixserve.schedule import ScheduledRequest, ScheduledRows, SchedulerOutput
from tests.attention.fake_flashinfer import Fake, mark_sides
from tests.checkpoints import NATIVE, VOCAB_SIZE, greedy, load_reference, make_checkpoint
from tests.runner.driver import GREEDY, Driver
from tests.runner.late_queue import LateQueue
from tests.runner.on_device import DeviceRuntime, device_runner
from tests.runner.test_model_runner import check_parity, prompts_of

TOKENS = 1200
CLOSE = 2e-4  # log-probabilities in float32; a delta net on an H200 was off by 1.4e-4
PLAIN = SamplingParams(temperature=0.0, max_tokens=30)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(root / family, family) for family in NATIVE}


@pytest.mark.parametrize(
    ("family", "page_size", "backend"),
    [(family, 2, "auto") for family in NATIVE]
    + [("llama", 1, "auto"), ("llama", 16, "auto"), ("llama", 4, "torch")],
)
def test_native_families(
    checkpoints: dict[str, Path], family: str, page_size: int, backend: str
) -> None:
    runner = device_runner(
        checkpoints[family],
        page_size=page_size,
        num_pages=TOKENS // page_size,
        attention_backend=backend,
    )
    assert runner.backend_name == ("triton" if backend == "auto" else backend)
    driver = Driver(runner, page_size, page_size)
    for prompt in prompts_of([1, 3, 20, 41, 90]):
        driver.add(prompt)
    driver.run(chunk=13)
    check_parity(driver.sequences, load_reference(checkpoints[family]))


class Unready:
    """A backend whose kernels cannot be compiled."""

    def prepare(self, _features: frozenset[str]) -> None:
        raise ModelNotSupported("nvcc is missing")


def test_a_backend_that_cannot_be_made_ready(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the choice was left open the next one is used, and that is said."""
    make, load, made = cuda_runner.make_backend, cuda_runner.load_on_device, []

    def make_backend(name: str, *args: Any, **kwargs: Any) -> Any:
        made.append(name)
        return Unready() if name == "flashinfer" else make(name, *args, **kwargs)

    def load_on_device(path: str, config: EngineConfig, *args: Any) -> Any:
        config = replace(config, attention_backend="triton")
        return replace(load(path, config, *args), backend_name="flashinfer")

    monkeypatch.setattr(cuda_runner, "make_backend", make_backend)
    monkeypatch.setattr(cuda_runner, "load_on_device", load_on_device)
    fields: dict[str, Any] = {"num_pages": TOKENS, "max_running_requests": 2, "device": "cpu"}
    with caplog.at_level("WARNING", logger="radixserve"):
        runner = device_runner(checkpoints["llama"], **fields)
    assert runner.backend_name == "triton"
    assert made == ["flashinfer", "triton", "triton"]  # for the profile run, and then what stays
    assert "nvcc is missing" in caplog.text
    with pytest.raises(ModelNotSupported, match="nvcc is missing"):
        device_runner(checkpoints["llama"], attention_backend="flashinfer", **fields)
    monkeypatch.setattr(Unready, "prepare", lambda *_: None)  # and what fails in the first step
    monkeypatch.setattr(Unready, "plan", fails_to_plan, raising=False)
    with caplog.at_level("WARNING", logger="radixserve"):
        assert device_runner(checkpoints["llama"], **fields).backend_name == "triton"
    assert "undefined symbol" in caplog.text
    with pytest.raises(OSError, match="undefined symbol"):
        device_runner(checkpoints["llama"], attention_backend="flashinfer", **fields)


def take_fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flashinfer backend in the place of any other, over a FlashInfer that computes here."""
    monkeypatch.setattr(flashinfer_calls, "flashinfer_unsupported_reason", lambda *_: "")
    mark_sides(monkeypatch)
    library = Fake().library

    def make_backend(_: str, *args: Any, **kwargs: Any) -> FlashInferBackend:
        del kwargs["is_exact"]  # not of FlashInfer
        return FlashInferBackend(*args, **kwargs, library=library)

    monkeypatch.setattr(cuda_runner, "make_backend", make_backend)


def fails_to_plan(*_: Any) -> None:
    raise OSError("undefined symbol")


def test_transformers_families(tmp_path: Path) -> None:
    runner = device_runner(make_checkpoint(tmp_path, "stablelm"), num_pages=TOKENS)
    assert not runner.info.is_native
    assert not runner.resolved_config.graph_sizes  # their code cannot be captured
    driver = Driver(runner, 1)
    for prompt in prompts_of([1, 37]):
        driver.add(prompt)
    driver.run(chunk=20)
    check_parity(driver.sequences, load_reference(tmp_path))


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral_window"])
def test_windows_and_soft_caps(
    tmp_path: Path, family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs, too; rows that share pages read them on their own."""
    if backend == "flashinfer":
        take_fake_flashinfer(monkeypatch)
    folder = make_checkpoint(tmp_path, family)
    runner = device_runner(folder, page_size=2, num_pages=TOKENS)
    assert runner.info.is_native
    assert runner.backend.name == backend
    driver = Driver(runner, 2)
    for prompt in prompts_of([1, 37, 60]):
        driver.add(prompt)
        driver.add(prompt)
    driver.run(chunk=20)
    check_parity(driver.sequences, load_reference(folder))


@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_pages_and_copied_heads(checkpoints: dict[str, Path], page_size: int) -> None:
    runner = device_runner(
        checkpoints["llama"], page_size=page_size, num_pages=2 * TOKENS // page_size
    )
    driver = Driver(runner, page_size)
    first = driver.add(prompts_of([75])[0])
    driver.step([(first, 75)])
    for shared in (1, 16, 37, 74):
        tail = prompts_of([9], seed=shared)[0]
        driver.add(first.tokens[:shared] + tail, share=(first, shared))
    driver.run(chunk=5)
    check_parity(driver.sequences, load_reference(checkpoints["llama"]))


# -- through the Runtime ------------------------------------------------------------------------


def jobs() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, with everything that params can ask for."""
    rng = random.Random(4)
    prompts: list[list[int]] = []
    for _ in range(13):
        head = rng.choice(prompts)[: rng.randrange(60)] if prompts and rng.random() < 0.8 else []
        tail = [rng.randrange(256) for _ in range(rng.choice([1, 2, 9, 30]))]
        prompts.append(head + tail)
    few: dict[str, Any] = {"top_k": 4, "seed": 3}  # few ways to differ by a rounding
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        few,
        {**few, "temperature": 0.5, "logprobs": 0},
        {**few, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(0, 256, 2))},
        {**few, "stop_token_ids": list(range(0, 256, 7))},
        {**few, "n": 3, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {**few, "presence_penalty": 0.8, "frequency_penalty": 0.3, "logprobs": 1},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {**few, "n": 2, "best_of": 4},
        {"temperature": 0.0, "max_tokens": 2, "logprob_token_ids": [9, 200, 3]},
    ]
    return prompts, [SamplingParams(**{"max_tokens": 14, **kind}) for kind in kinds]


def run_jobs(rt: Runtime) -> list[Completion]:
    prompts, params = jobs()
    outs = rt.generate(prompts, params, progress=False)
    flat = [one for out in outs for one in (out if isinstance(out, list) else [out])]
    return flat + rt.beam_search(prompts[3], beam_width=3, max_tokens=6)


def assert_same(mine: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        if other.logprobs is not None:
            assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)
        if other.top_logprobs is not None:
            assert one.top_logprobs is not None
            for found, wanted in zip(one.top_logprobs, other.top_logprobs, strict=True):
                assert list(found.values()) == pytest.approx(list(wanted.values()), abs=CLOSE)
        if other.prompt_logprobs is not None:
            assert one.prompt_logprobs is not None
            assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=CLOSE)


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[Completion]:
    with Runtime(str(checkpoints["llama"]), num_pages=TOKENS, cache="off") as rt:
        return run_jobs(rt)


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 7, "cuda_graphs": False, "overlap": False},
        {
            "page_size": 16,
            "num_pages": 9,
            "chunked_prefill_size": 20,
            "admission": "greedy",
        },  # so few pages that it preempts
        {"page_size": 1, "num_pages": 125, "admission": "greedy"},
        {"page_size": 2, "cache": "off", "cascade_attention": False},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_same_answers(
    checkpoints: dict[str, Path], expected: list[Completion], fields: dict[str, Any]
) -> None:
    fields = {"num_pages": TOKENS // fields["page_size"], **fields}
    with DeviceRuntime(checkpoints["llama"], **fields) as rt:
        assert rt.resolved_config.overlap == rt.config.overlap
        assert bool(rt.resolved_config.graph_sizes) == rt.config.cuda_graphs
        for _ in range(2):  # cold, then warm
            assert_same(run_jobs(rt), expected)
            rt.check()
        stats = rt.cache_stats()
        assert stats["reused_tokens"] + stats["computed_tokens"] == stats["prompted_tokens"]
        assert stats["sequences"] == 0
        assert rt.uploader.num_checked >= stats["steps"] > 30
        assert rt.uploader.num_lean > 10
        assert (stats["overlapped_s"] > 0) == rt.config.overlap
        if fields["num_pages"] * fields["page_size"] < 150:
            assert stats["preemptions"] > 0


def test_forks_and_rollbacks(checkpoints: dict[str, Path]) -> None:
    """Pages that a request has are exchanged, given back and shared while the table stays."""

    def walk(rt: Runtime) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=7)
        said = []
        with rt.branch(prompts_of([33])[0]) as root:
            kids = root.fork(3)
            for at, kid in enumerate(kids):
                kid.extend([at + 5, 9])
                said.append(kid.generate(params).token_ids)
                kid.truncate(20 + at)
                said.append(kid.generate(params).token_ids)
            said.append(root.generate(params).token_ids)
            for kid in kids:
                kid.release()
        return said

    fields: dict[str, Any] = {"page_size": 4, "num_pages": 100}
    with Runtime(str(checkpoints["qwen3"]), **fields) as rt:
        wanted = walk(rt)
    with DeviceRuntime(checkpoints["qwen3"], **fields) as rt:
        assert walk(rt) == wanted


def test_aborts_under_overlap(checkpoints: dict[str, Path], expected: list[Completion]) -> None:
    prompts, params = jobs()
    with DeviceRuntime(checkpoints["llama"], num_pages=TOKENS) as rt:
        for at in (0, 2, 5):
            stream = rt.stream(prompts[at], params[at])
            for _, _ in zip(range(at + 1), stream, strict=False):
                pass
            stream.close()
        assert_same(run_jobs(rt), expected)
        rt.check()


def test_a_failed_step_leaves_nothing_behind(
    checkpoints: dict[str, Path], expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = jobs()
    with DeviceRuntime(checkpoints["llama"], num_pages=TOKENS) as rt:
        real, count = DeviceSampler.launch, 0

        def sometimes(*args: Any, **fields: Any) -> Any:
            nonlocal count
            count += 1
            if count % 9 == 0:
                raise RuntimeError("the device is on fire")
            return real(*args, **fields)

        monkeypatch.setattr(DeviceSampler, "launch", sometimes)
        for _ in range(3):
            with pytest.raises(RequestFailed, match="on fire"):
                rt.generate(prompts, params, progress=False)
        monkeypatch.setattr(DeviceSampler, "launch", real)
        assert_same(run_jobs(rt), expected)
        rt.check()


class FaultyQueue(LateQueue):
    """A device whose memory was accessed illegally, once `is_faulty`: every later call says so."""

    is_faulty = False

    def wait(self) -> None:
        if self.is_faulty:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA ...")
        super().wait()


@pytest.mark.parametrize("part", ["launch", "collect"])
def test_an_error_that_the_device_does_not_survive(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    queue = FaultyQueue()
    driver = prefilled(checkpoints["llama"], 2, queue=queue)

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("of one step")

    monkeypatch.setattr(DeviceSampler, part, fails)
    with pytest.raises(ValueError, match="of one step"):  # which leaves the device in order
        driver.step([(one, 1) for one in driver.sequences])
    queue.is_faulty = True
    with pytest.raises(EngineDead, match=r"cpu can compute nothing.*illegal memory") as caught:
        driver.step([(one, 1) for one in driver.sequences])
    assert isinstance(caught.value.__cause__, ValueError)


# -- what a step costs, and what it must not touch ----------------------------------------------


def decode_schedule(driver: Driver) -> SchedulerOutput:
    rows = tuple(driver.row(one, 1) for one in driver.sequences)
    return SchedulerOutput(
        driver.num_steps, ScheduledRows.of(rows), np.empty((0, 3), np.int32), 0, len(rows)
    )


def prefilled(folder: Path, num_rows: int, params: SamplingParams = PLAIN, **fields: Any) -> Driver:
    driver = Driver(device_runner(folder, num_pages=TOKENS, **fields), 1)
    for prompt in prompts_of([10 + at for at in range(num_rows)]):
        driver.add(prompt, params)
    driver.step([(one, len(one.tokens)) for one in driver.sequences])
    return driver


def test_a_decode_step_is_one_copy_in_and_one_out(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = LateQueue()
    driver = prefilled(checkpoints["llama"], 5, queue=queue)
    planned: list[int] = []
    real = DecodeGraph.plan

    def plan(graph: DecodeGraph, batch: Any) -> Callable[[], torch.Tensor]:
        planned.append(graph.num_rows)
        assert not batch.host.is_flattened  # all page ids are not needed on the host
        return real(graph, batch)

    monkeypatch.setattr(DecodeGraph, "plan", plan)
    driver.step([(one, 1) for one in driver.sequences])
    schedule = decode_schedule(driver)
    rows = tuple(row._replace(first_new_page=len(row.page_ids) - 1) for row in schedule.rows)
    before = queue.num_uploads, queue.num_downloads
    pending = driver.runner.launch(
        SchedulerOutput(9, ScheduledRows.of(rows), schedule.cow_copies, 0, 5)
    )
    assert (queue.num_uploads, queue.num_downloads) == (before[0] + 1, before[1] + 1)
    assert len(driver.runner.collect(pending).outputs) == 5
    assert planned == [8, 8]


def test_padding_writes_nothing(checkpoints: dict[str, Path]) -> None:
    driver = prefilled(checkpoints["llama"], 3)
    pool = driver.runner.pool.kv
    before = pool.clone()
    driver.step([(one, 1) for one in driver.sequences])
    changed = (pool != before).flatten(3).any(-1).any(0).any(0).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(one.pages[-1] for one in driver.sequences)


def test_fewer_rows_see_nothing_of_more(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graph sizes in any order, logits poisoned between: as without graphs, to the bit."""
    real = DecodeGraph.plan

    def poison(graph: DecodeGraph, batch: Any) -> Callable[[], torch.Tensor]:
        graph.logits.fill_(float("nan"))
        return real(graph, batch)

    monkeypatch.setattr(DecodeGraph, "plan", poison)
    drivers = [prefilled(checkpoints["llama"], 8, cuda_graphs=graphs) for graphs in (True, False)]
    assert drivers[0].runner.resolved_config.graph_sizes == (1, 2, 4, 8)
    rng = random.Random(1)
    for _ in range(14):
        count = rng.choice([1, 2, 3, 5, 7, 8])
        chosen = rng.sample(range(8), count)
        for driver in drivers:
            driver.step([(driver.sequences[at], 1) for at in chosen])
    for mine, theirs in zip(*(driver.sequences for driver in drivers), strict=True):
        assert mine.outputs == theirs.outputs
        assert len({out.token_id for out in mine.outputs}) > 1


def test_steps_that_fit_no_graph_run_without(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "CAPTURE_SIZES", (1, 2, 4))
    driver = prefilled(checkpoints["llama"], 8, GREEDY)
    assert driver.runner.resolved_config.graph_sizes == (1, 2, 4)
    driver.run(shuffle=False)  # 8 rows: more than any graph
    check_parity(driver.sequences, load_reference(checkpoints["llama"]))


def launch_ahead(late: Driver, step: int, rows: list[ScheduledRequest]) -> PendingStep:
    """Launch a step of all sequences whose tokens nobody on the host knows."""
    schedule = SchedulerOutput(step, ScheduledRows.of(rows), np.empty((0, 3), np.int32), 0, 3)
    pending = late.runner.launch(schedule)
    for one in late.sequences:
        one.computed += 1
        one.tokens.append(-1)
    return pending


def check_tokens(
    late: Driver, plain: Driver, pendings: list[tuple[list[int], PendingStep]]
) -> None:
    """The steps launched ahead, each with its sequences in the order of its rows, sampled what the
    steps one by one did."""
    for step, (places, pending) in enumerate(pendings):
        outputs = late.runner.collect(pending).outputs
        for at, output in zip(places, outputs, strict=True):
            assert output is not None
            assert output.token_id == plain.sequences[at].outputs[step + 1].token_id


def test_tokens_feed_the_next_step_on_the_device(checkpoints: dict[str, Path]) -> None:
    """Five steps launched before any is collected: only the device knows the tokens between."""
    plain, late = (prefilled(checkpoints["llama"], 3) for _ in range(2))
    for _ in range(5):
        plain.step([(one, 1) for one in plain.sequences])
    pendings = []
    order = [0, 1, 2]
    for step in range(5):
        last = {at: place for place, at in enumerate(order)}
        order = order[1:] + order[:1]
        rows = []
        for at in order:
            row = late.row(late.sequences[at], 1)
            if step:
                row = row._replace(token_ids=np.array([-1], np.int32), future_index=last[at])
            rows.append(row)
        pendings.append((order, launch_ahead(late, step, rows)))
    check_tokens(late, plain, pendings)


def test_counts_of_tokens_that_feed_the_next_step(checkpoints: dict[str, Path]) -> None:
    """Penalties see a row's own token of the step in flight, in whatever place it was sampled."""
    params = SamplingParams(temperature=0.0, max_tokens=8, frequency_penalty=-2.0)
    plain, late = (prefilled(checkpoints["llama"], 3) for _ in range(2))
    for driver in (plain, late):
        driver.sequences[0].params = driver.sequences[1].params = params
    for _ in range(2):
        plain.step([(one, 1) for one in plain.sequences])
    pendings = []
    for step, order in enumerate(([0, 1, 2], [2, 0, 1])):
        rows = []
        for at in order:
            row = late.row(late.sequences[at], 1)
            if step:
                assert row.sample is not None
                spec = row.sample._replace(
                    token_ids=row.sample.token_ids[:-1].copy(), num_placeholders=1
                )
                token = np.array([-1], np.int32)
                row = row._replace(token_ids=token, future_index=at, sample=spec)
            rows.append(row)
        pendings.append((order, launch_ahead(late, step, rows)))
    check_tokens(late, plain, pendings)


def test_a_slot_of_a_failed_step_is_written_anew(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end; the first row of the next one in the slot brings all of its pages."""
    driver = prefilled(checkpoints["llama"], 1)
    stream = driver.sequences[0]
    stream.tokens += [7, 8, 9]
    row = driver.row(stream, len(stream.tokens) - stream.computed)
    known = row._replace(first_new_page=stream.computed)
    schedule = SchedulerOutput(1, ScheduledRows.of([known]), np.empty((0, 3), np.int32), 4, 0)
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.runner.launch(schedule)
    (output,) = driver.compute(
        SchedulerOutput(2, ScheduledRows.of([row]), schedule.cow_copies, 4, 0)
    ).outputs
    assert output is not None
    wanted = greedy(load_reference(checkpoints["llama"]), stream.tokens, 1)[-1]
    assert output.token_id == wanted


def test_rows_that_do_not_fit_their_pages_are_refused(checkpoints: dict[str, Path]) -> None:
    driver = prefilled(checkpoints["llama"], 2)
    schedule = decode_schedule(driver)
    bad = schedule.rows[0]._replace(page_ids=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="has 3 pages of 1 tokens for 11 tokens"):
        driver.compute(SchedulerOutput(0, ScheduledRows.of([bad]), schedule.cow_copies, 0, 1))
    driver.step([(one, 1) for one in driver.sequences])
    assert all(out.error is None for one in driver.sequences for out in one.outputs)


def test_copies_alone(checkpoints: dict[str, Path]) -> None:
    runner = device_runner(checkpoints["llama"], num_pages=20, page_size=4)
    runner.pool.kv.copy_(torch.randn_like(runner.pool.kv))
    before = runner.pool.kv.clone()
    copies = np.array([[0, 3, 3], [0, 4, 1], [1, 5, 4]], np.int32)
    output = Driver(runner, 4).compute(SchedulerOutput(0, ScheduledRows(), copies, 0, 0))
    assert output.outputs == ()
    assert set(output.seconds) == {"prepare", "forward", "sample"}
    assert torch.equal(runner.pool.kv[:, :, 3, :3], before[:, :, 0, :3])
    assert torch.equal(runner.pool.kv[:, :, 3, 3:], before[:, :, 3, 3:])
    assert torch.equal(runner.pool.kv[:, :, 5], before[:, :, 1])


def test_the_profile_run_leaves_the_pool_alone(checkpoints: dict[str, Path]) -> None:
    runner = device_runner(checkpoints["llama"], num_pages=20, page_size=4)
    assert not runner.pool.kv.any()
    assert runner.overlap_depth == 1
    assert runner.info.vocab_size == VOCAB_SIZE
