"""The device's sampler against sampler.py: the same tokens from the same logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.request import SamplingParams
from radixserve.runner.device_sampler import DeviceSampler, PendingSample
from radixserve.runner.input_batch import prepare_inputs
from radixserve.runner.sample_plan import plan_device_samples
from radixserve.runner.sampler import sample, score
from radixserve.schedule import (
    SampleOutput,
    SampleSpec,
    ScheduledRequest,
    ScheduledRows,
    SchedulerOutput,
)
from tests.runner.late_queue import LateQueue

VOCAB = 300


def spec(
    *,
    seed: int = 1,
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    num_candidates: int = 0,
    words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> SampleSpec:
    ids = np.array((3, 4, 4, *output), np.int32)
    asked = SamplingParams(**params)
    return SampleSpec(asked, seed, 3, ids, banned, num_candidates, bad_words_ids=words)


def row(at: int, asked: SampleSpec | None, **fields: object) -> ScheduledRequest:
    token, page = np.ones(1, np.int32), np.zeros(1, np.int32)
    made = ScheduledRequest(f"{at}", token, 0, page, asked, slot=at)
    return made._replace(**fields)


def schedule_of(rows: list[ScheduledRequest]) -> SchedulerOutput:
    return SchedulerOutput(0, ScheduledRows.of(rows), np.empty((0, 3), np.int32), 0, len(rows))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


NONE = torch.empty(0, dtype=torch.int64)


def sampler_of(queue: LateQueue | None = None) -> DeviceSampler:
    return DeviceSampler(LateQueue() if queue is None else queue, 12, VOCAB)


def launch(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    schedule: SchedulerOutput,
    padding: int = 0,
    previous: torch.Tensor = NONE,
) -> PendingSample:
    inputs = prepare_inputs(schedule.rows, 1)
    if padding:
        inputs = inputs.padded(len(schedule.rows) + padding)
    plan = plan_device_samples(inputs, VOCAB)
    arrays = sampler.plan(plan, schedule.rows)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return sampler.launch(logits, plan, tensors, previous, in_graph_buffer=bool(padding))


def sample_step(logits: torch.Tensor, schedule: SchedulerOutput) -> tuple[SampleOutput | None, ...]:
    sampler = sampler_of()
    return sampler.collect(launch(sampler, logits, schedule))


def assert_same(mine: SampleOutput | None, theirs: SampleOutput) -> None:
    assert mine is not None
    if theirs.error is not None:
        assert mine.token_id == -1
        assert "no token can be sampled" in str(mine.error)
        return
    assert mine.candidates is None or mine.candidates.token_ids.tolist() == (
        theirs.candidates.token_ids.tolist()
    )
    assert mine._replace(candidates=None) == theirs._replace(candidates=None)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 4},
    {},
    {"temperature": 0.3},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 100_000},
    {"top_p": 0.5},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    {"temperature": 1e-5},
    {"temperature": 100.0, "logprobs": 100},
    {"temperature": 0.5, "logprob_token_ids": (9, 3, 200)},
    {"temperature": 0.0, "logprob_token_ids": range(7, 70)},
]
PENALIZED: list[dict[str, Any]] = [
    {"logit_bias": {7: 50.0, 8: 49.0, 9: -3.0}, "temperature": 0.5},
    {"logit_bias": {7: 50.0}, "repetition_penalty": 3.0, "allowed_token_ids": [7, 9, 200]},
    {"allowed_token_ids": range(0, 300, 3), "logprobs": 2, "words": ((3,), (4, 6), (5, 9))},
    {"logits_processors": [lambda _, logits: logits.neg()], "temperature": 0.0},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 1},
]


@pytest.mark.parametrize("number", range(len(PARAMS)))
def test_one_kind_of_row(number: int) -> None:
    for seed in range(6):
        specs = [spec(seed=seed * 7 + at, output=(5,) * at, **PARAMS[number]) for at in range(6)]
        logits = logits_of(6, seed)
        rows = [row(at, one) for at, one in enumerate(specs)]
        for mine, theirs in zip(
            sample_step(logits, schedule_of(rows)), sample(logits, specs), strict=True
        ):
            assert_same(mine, theirs)


@pytest.mark.parametrize("padding", [0, 3])
def test_all_kinds_in_any_mix(padding: int) -> None:
    """Rows that sample nothing, bans, penalties and beams among the others."""
    generator = np.random.default_rng(padding)
    kinds = [*PARAMS, *PENALIZED]
    queue = LateQueue()
    sampler = sampler_of(queue)
    for step in range(60):
        specs: list[SampleSpec | None] = []
        for at in range(1 + step % 9):
            kind = int(generator.integers(0, len(kinds) + 2))
            banned = tuple(generator.integers(0, VOCAB, 3).tolist()) if step % 3 == 0 else ()
            if kind == len(kinds):
                specs.append(None)
            elif kind > len(kinds):
                specs.append(spec(num_candidates=3, banned=banned))
            else:
                output = tuple(generator.integers(0, VOCAB, at).tolist())
                specs.append(spec(seed=step * 50 + at, output=output, banned=banned, **kinds[kind]))
        rows = [row(at, one) for at, one in enumerate(specs)]
        sampled = [at for at, one in enumerate(specs) if one is not None]
        logits = logits_of(len(rows) + padding if padding else len(sampled), step)
        pending = launch(sampler, logits, schedule_of(rows), padding)
        if padding:
            source, logits = logits, logits.clone()
            source.fill_(math.nan)  # the next graph overwrites them
        outputs = sampler.collect(pending)
        assert len(outputs) == len(rows) == len(pending.tokens)
        logit_of = dict(zip(sampled, sampled if padding else range(len(sampled)), strict=True))
        for at, output in enumerate(outputs):
            asked = specs[at]
            if asked is None:
                assert output is None
                continue
            place = logit_of[at]
            theirs = sample(logits[place : place + 1], [asked])[0]
            assert_same(output, theirs)
            if at in pending.plan.sampled_outputs:
                assert pending.tokens[at] == theirs.token_id
    assert queue.num_waits == 60


def test_tokens_are_not_read_before_they_are_there() -> None:
    sampler, logits = sampler_of(), [logits_of(3, seed) for seed in range(3)]
    rows = [row(at, spec(temperature=0.0)) for at in range(3)]
    drawings = [launch(sampler, one, schedule_of(rows)) for one in logits]
    assert (drawings[0].transfer.arrays[0] < 0).all()
    for one, pending in zip(logits, drawings, strict=True):
        outputs = sampler.collect(pending)
        assert [out.token_id for out in outputs if out] == one.argmax(-1).tolist()


def test_broken_rows_disturb_nobody() -> None:
    logits = logits_of(7)
    logits[1, 9] = math.nan
    logits[2, 9] = math.inf
    logits[3] = -math.inf
    logits[4, 5:] = -math.inf
    for params in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}):
        specs = [spec(seed=at, **params) for at in range(7)]
        pending = launch(
            sampler := sampler_of(),
            logits,
            schedule_of([row(at, one) for at, one in enumerate(specs)]),
        )
        assert ((pending.tokens >= 0) & (pending.tokens < VOCAB)).all()  # they feed the next step
        outputs = sampler.collect(pending)
        assert [out.error is None for out in outputs if out] == [
            at not in (1, 2, 3) for at in range(7)
        ]
        for mine, theirs in zip(outputs, sample(logits, specs), strict=True):
            assert_same(mine, theirs)


def test_everything_banned_is_an_error() -> None:
    logits = logits_of(2)
    specs = [spec(banned=tuple(range(VOCAB))), spec(seed=3)]
    outputs = sample_step(logits, schedule_of([row(0, specs[0]), row(1, specs[1])]))
    assert_same(outputs[0], sample(logits, specs)[0])
    assert_same(outputs[1], sample(logits, specs)[1])


def test_bans_leave_logprobs_and_logits_as_they_are() -> None:
    logits = logits_of(2)
    before = logits.clone()
    best = logits.topk(2).indices.tolist()
    specs = [spec(temperature=0.0, banned=(best[0][0],), logprobs=2), spec(temperature=0.0)]
    outputs = sample_step(logits, schedule_of([row(0, specs[0]), row(1, specs[1])]))
    assert outputs[0] is not None
    assert outputs[0].token_id == best[0][1]
    assert [token for token, _ in outputs[0].top_logprobs] == best[0]
    assert torch.equal(logits, before)


def test_scores_with_and_without_a_draw() -> None:
    logits = logits_of(7)
    targets = [np.array(ids, np.int32) for ids in ([5, 6], [7], [8, 9, 9])]
    tokens = [np.ones(n, np.int32) for n in (3, 1, 3)]
    asked = spec(seed=4, top_k=50, logprobs=1)
    rows = [
        row(
            at,
            one,
            logprob_targets=ids,
            token_ids=new,
            page_ids=np.arange(len(new)),
            num_top_logprobs=top,
            wants_ranks=top < 2,
        )
        for at, (one, ids, new, top) in enumerate(
            zip((asked, None, None), targets, tokens, (2, 0, 1), strict=True)
        )
    ]
    outputs = sample_step(logits, schedule_of(rows))
    first, scored = sample(logits[2:3], [asked])[0], score(logits[:2], targets[0], 2)
    assert outputs[0] == first._replace(scores=scored.scores, top_scores=scored.top_scores)
    assert outputs[1] == score(logits[3:4], targets[1], 0, wants_ranks=True)
    assert outputs[2] == score(logits[4:7], targets[2], 1, wants_ranks=True)
    assert len(outputs[2].ranks) == 3
    logits[5] = math.nan
    assert "no token can be scored" in str(sample_step(logits, schedule_of(rows))[2].error)


def test_plain_rows_send_nothing() -> None:
    rows = [row(at, spec(temperature=0.0)) for at in range(4)]
    plan = plan_device_samples(prepare_inputs(ScheduledRows.of(rows), 1).padded(8), VOCAB)
    assert not plan.arrays
    assert plan.is_whole
    assert not plan.has_gaps


PENALTIES: list[dict[str, Any]] = [
    {"logit_bias": {1: 3.0}, "allowed_token_ids": range(6), "temperature": 9.0},
    {"repetition_penalty": 1.7, "temperature": 0.0},
    {"frequency_penalty": 2.0, "temperature": 0.0, "logprobs": 3},
    {"presence_penalty": 2.0, "temperature": 0.0},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.7, "top_k": 9},
]


class Penalized:
    """A request whose samples are compared with those of the host, which knows all tokens."""

    def __init__(self, slot: int, seed: int, generator: np.random.Generator) -> None:
        self.slot, self.seed = slot, seed
        self.name = str(int(generator.integers(3)))  # names come again, also in the same slot
        self.prompt = generator.integers(0, VOCAB, int(generator.integers(1, 9))).tolist()
        self.sampled: list[int] = []
        self.params = PENALTIES[seed % len(PENALTIES)]
        self.is_new = True

    def spec(self, num_placeholders: int) -> SampleSpec:
        sampled = self.sampled[: len(self.sampled) - num_placeholders]
        return SampleSpec(
            SamplingParams(**self.params),
            self.seed,
            len(self.prompt),
            np.array(self.prompt + sampled, np.int32),
            (),
            num_placeholders=num_placeholders,
            bad_words_ids=((3,), *((a, b) for a in range(6) for b in range(0, 6, 2)), (1, 5, 1)),
        )


@pytest.mark.parametrize("seed", range(4))
def test_penalties_of_steps_in_flight(seed: int) -> None:
    """Every step is launched before the one before it is collected; slots change hands."""
    generator = np.random.default_rng(seed)
    sampler, previous = sampler_of(), NONE
    running: list[Penalized] = []
    outputs_before: dict[int, int] = {}  # by slot: the output of the previous step
    pendings, wanted = [], []
    for step in range(40):
        running = [one for one in running if generator.random() < 0.9]
        free = [slot for slot in range(6) if slot not in [one.slot for one in running]]
        if free and generator.random() < 0.6:
            slot = int(generator.choice(free))
            running.append(Penalized(slot, int(generator.integers(100)), generator))
            outputs_before.pop(slot, None)
        generator.shuffle(running)  # type: ignore[arg-type]
        rows = []
        for one in running:
            unknown = int(one.slot in outputs_before)
            if unknown and generator.random() < 0.1:
                one.is_new = True  # as if the slot had been given anew: it is filled again
            found = row(one.slot, one.spec(unknown), request_id=one.name)
            future = outputs_before.get(one.slot, -1)
            rows.append(found._replace(future_index=future, first_new_page=int(not one.is_new)))
            one.is_new = False
        plain = spec(temperature=0.0)
        rows.append(row(9, plain))
        logits = 2 * logits_of(len(rows), 1000 * seed + step)
        pendings.append(launch(sampler, logits, schedule_of(rows), previous=previous))
        previous = pendings[-1].tokens
        outputs_before = {one.slot: at for at, one in enumerate(running)}
        exact = [one.spec(0) for one in running]
        theirs = sample(logits, [*exact, plain])
        wanted.append(theirs)
        for one, output in zip(running, theirs, strict=False):
            one.sampled.append(output.token_id)
        if step:
            compare(sampler, pendings[-2], wanted[-2])
    compare(sampler, pendings[-1], wanted[-1])


def compare(sampler: DeviceSampler, pending: PendingSample, wanted: list[SampleOutput]) -> None:
    for mine, theirs in zip(sampler.collect(pending), wanted, strict=True):
        assert_same(mine, theirs)
