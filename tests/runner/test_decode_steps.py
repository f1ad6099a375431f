"""Several decode steps in one schedule give what they give one by one, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve.config import EngineConfig
from radixserve.request import SamplingParams
from radixserve.runner.model_runner import ModelRunner
from radixserve.schedule import Schedule, StepOutput
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.cpu_kernels import bf16_routine, num_threads  # noqa: F401  (fixtures)
from tests.runner.driver import Driver, Stream

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="no CPU kernels here"
)

PLAIN = SamplingParams(temperature=0.0, max_tokens=100)
PROMPTS = ([7, 8, 9], list(range(40, 71)), list(range(40, 66)), [5])
NO_COPIES = np.empty((0, 3), np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "qwen3", num_attention_heads=4, num_key_value_heads=2)


def prefilled(folder: Path, page_size: int = 1, **fields: object) -> Driver:
    """A driver whose streams have drawn one token each; two of them share pages."""
    config = EngineConfig(num_pages=-(-400 // page_size), page_size=page_size, **fields)
    driver = Driver(ModelRunner(str(folder), config), page_size)
    for prompt in PROMPTS:
        driver.add(prompt, PLAIN)
    driver.step([(driver.sequences[1], len(PROMPTS[1]))])
    shared = 26 - 26 % page_size
    driver.sequences[2].pages = driver.sequences[1].pages[: shared // page_size]
    driver.sequences[2].computed = min(shared, 25)
    rest = [stream for stream in driver.sequences if not stream.outputs]
    driver.step([(stream, len(stream.tokens) - stream.computed) for stream in rest])
    return driver


def schedule_of(
    driver: Driver, streams: list[Stream], num_steps: int, end_ids: frozenset[int] = frozenset()
) -> Schedule:
    rows = []
    for stream in streams:
        while len(stream.pages) * driver.page_size < stream.computed + num_steps:
            stream.pages.append(driver.free.pop())
        row = driver._row(stream, 1)
        rows.append(row._replace(page_ids=np.array(stream.pages, np.int32)))
    return Schedule(0, tuple(rows), NO_COPIES, 0, len(rows), (), num_steps, end_ids)


def take(streams: list[Stream], output: StepOutput) -> None:
    for stream, drawn in zip(streams, output.outputs, strict=True):
        assert drawn is not None
        assert drawn.error is None
        stream.tokens += [drawn.token_id, *drawn.further]
        stream.computed += 1 + len(drawn.further)


def keys_and_values(driver: Driver, stream: Stream) -> torch.Tensor:
    kv = driver.runner._pool.kv[:, :, stream.pages]
    return kv.flatten(2, 3)[:, :, : stream.computed]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_as_one_by_one(folder: Path, page_size: int, shares: bool, num_threads: int) -> None:  # noqa: F811, ARG001
    one, many = (prefilled(folder, page_size, tree_attention=shares) for _ in range(2))
    for num_steps in (2, 8, 1, 5):
        for _ in range(num_steps):
            one.step([(stream, 1) for stream in one.sequences])
        streams = many.sequences
        take(streams, many.runner.execute(schedule_of(many, streams, num_steps)))
        for ours, theirs in zip(many.sequences, one.sequences, strict=True):
            assert ours.tokens == theirs.tokens
            assert torch.equal(keys_and_values(many, ours), keys_and_values(one, theirs))


def test_in_bfloat16(folder: Path, bf16_routine: str) -> None:  # noqa: F811, ARG001
    one, many = (prefilled(folder, dtype="bfloat16") for _ in range(2))
    for _ in range(8):
        one.step([(stream, 1) for stream in one.sequences])
    take(many.sequences, many.runner.execute(schedule_of(many, many.sequences, 8)))
    for ours, theirs in zip(many.sequences, one.sequences, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(keys_and_values(many, ours), keys_and_values(one, theirs))


def test_an_end_token_of_anybody_is_the_last(folder: Path) -> None:
    one, many = prefilled(folder), prefilled(folder)
    for _ in range(8):
        one.step([(stream, 1) for stream in one.sequences])
    drawn = [stream.tokens[stream.num_prompt + 1 :] for stream in one.sequences]
    earlier = {token_id for ids in drawn for token_id in ids[:3]}
    place, end_id = min(
        (at, token_id)
        for ids in drawn
        for at, token_id in enumerate(ids)
        if token_id not in earlier
    )
    ends = frozenset({end_id, VOCAB_SIZE + 5})
    output = many.runner.execute(schedule_of(many, many.sequences, 8, ends))
    assert [(o.token_id, *o.further) for o in output.outputs if o is not None] == [
        tuple(ids[: place + 1]) for ids in drawn
    ]


def test_none_counts_that_has_a_broken_row(folder: Path, tmp_path: Path) -> None:
    """Those before it do; alone it is answered row by row."""
    one = prefilled(folder)
    for _ in range(8):
        one.step([(stream, 1) for stream in one.sequences])
    drawn = [stream.tokens[stream.num_prompt + 1 :] for stream in one.sequences]
    known = {token_id for ids in PROMPTS for token_id in ids}
    known |= {t for stream in one.sequences for t in stream.tokens[stream.num_prompt :][:3]}
    at, row = min(
        (at, row)
        for row, ids in enumerate(drawn)
        for at, token_id in enumerate(ids[:7])
        if token_id not in known
    )
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][drawn[row][at]] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    many = prefilled(tmp_path)
    output = many.runner.execute(schedule_of(many, many.sequences, 8))
    assert [(o.token_id, *o.further) for o in output.outputs if o is not None] == [
        tuple(ids[: at + 1]) for ids in drawn
    ]
    take(many.sequences, output)
    output = many.runner.execute(schedule_of(many, many.sequences, 8))
    for place, (told, ids) in enumerate(zip(output.outputs, drawn, strict=True)):
        assert told is not None
        assert told.further == ()
        broken = ids[at] == drawn[row][at]
        assert (told.error is not None) == broken == (place == row or broken)
        assert broken or told.token_id == ids[at + 1]


def test_a_hurry_ends_them_behind_the_present_step(folder: Path) -> None:
    driver = prefilled(folder)
    for set_or_clear, expected in (("set", 1), ("clear", 5)):
        getattr(driver.runner.hurry, set_or_clear)()
        output = driver.runner.execute(schedule_of(driver, driver.sequences, 5))
        assert [1 + len(o.further) for o in output.outputs if o is not None] == [expected] * 4
        take(driver.sequences, output)


def test_pages_that_do_not_fit_are_refused(folder: Path) -> None:
    driver = prefilled(folder)
    schedule = schedule_of(driver, driver.sequences, 4)
    short = schedule.rows[1]._replace(page_ids=schedule.rows[1].page_ids[:-1])
    before = driver.runner._pool.kv.clone()
    with pytest.raises(ValueError, match="34 pages of 1 tokens for 35 tokens"):
        driver.runner.execute(replace(schedule, rows=(schedule.rows[0], short)))
    assert torch.equal(driver.runner._pool.kv, before)


def test_the_time_is_told_by_part(folder: Path) -> None:
    driver = prefilled(folder)
    seconds = driver.runner.execute(schedule_of(driver, driver.sequences, 8)).seconds
    assert set(seconds) == {"prepare", "forward", "sample"}
    assert all(spent > 0 for spent in seconds.values())


@pytest.mark.parametrize(
    ("fields", "can_repeat"),
    [({}, True), ({"attention_backend": "torch"}, False)],
    ids=["cpu", "torch"],
)
def test_where_it_is_possible(folder: Path, fields: dict[str, str], can_repeat: bool) -> None:
    config = EngineConfig(num_pages=10, **fields)
    assert ModelRunner(str(folder), config).can_repeat == can_repeat
