"""A model without arithmetic, and a driver of the real scheduler and cache around it.

The K/V of a position is a hash of all tokens up to it. Before a row is computed every cell that it
may read is checked against the hash it must hold, so a page given away too early, overwritten,
copied late or shared wrongly is found in the very step in which it would do harm.

The runner also keeps a table of every request's pages, told what changed alone, and compares it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from radixserve.api.engine_factory import make_engine
from radixserve.cache import HashBlockCache, PrefixCache, RadixCache
from radixserve.cache_layers import RecurrentLayers, WindowedLayers
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.output import Beam, Finish, RequestOutput
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.schedule import (
    Candidates,
    ModelRunnerOutput,
    SampleOutput,
    ScheduledRequest,
    SchedulerOutput,
    WindowLayers,
)
from radixserve.scheduler.request_state import RequestState

VOCAB = 50
EOS = 1
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def prefix_hashes(tokens: list[int], start: list[int] | None = None) -> list[int]:
    hashes = list(start or [])
    value = hashes[-1] if hashes else _MIX >> 1
    for token in tokens[len(hashes) :]:
        value = ((value ^ (token + 1)) * _MIX + 0x1F3D5B79A2C4E687) & _MASK
        value ^= value >> 32
        hashes.append(value)
    return hashes


def fake_score(prefix_hash: int, target: int) -> float:
    return -float((prefix_hash ^ int(target)) % 997)


def fake_logprobs(prefix_hash: int) -> np.ndarray:
    """[VOCAB] float32 "log-probabilities" of what may follow, each token's a hash of its own."""
    mixed = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(_MIX) ^ np.uint64(prefix_hash)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return -((mixed >> np.uint64(41)).astype(np.float32) / np.float32(2**21)) - np.float32(0.01)


class DeviceFailed(Exception):
    """Injected; whatever else a fake device raises is a finding."""


class FakeRunner:
    """Answers like a model runner: the next token is a function of the whole prefix."""

    overlap_depth = 0
    num_states = 0
    windows: WindowLayers | None = None
    resolved_config = SimpleNamespace(inexact="it has no arithmetic")  # so that nothing is drafted
    info = SimpleNamespace(kv_bytes_per_token=1, num_parameters=1)
    num_slots = 1 << 30  # in the page table

    def __init__(self, num_pages: int, page_size: int, windows: WindowLayers | None = None) -> None:
        self.num_pages, self.page_size, self.windows = num_pages, page_size, windows
        self.before_launch: Callable[[SchedulerOutput], None] = lambda _: None
        self.broken_rows: Callable[[ScheduledRequest], bool] = lambda _: False
        self.finding: BaseException | None = None  # the engine would take it for a failed step
        self.cells = np.zeros((num_pages, page_size), np.uint64)
        self.window_pages = np.full(num_pages, -1)  # by page, from what schedules say has changed
        self.window_cells = np.zeros((windows.num_pages if windows else 0, page_size), np.uint64)
        self.tokens: dict[str, list[int]] = {}
        self.hashes: dict[str, list[int]] = {}
        self.states: dict[int, int] = {}  # recurrent state -> hash of the prefix that it stands for
        self.computed: dict[tuple[str, int], int] = {}  # (namespace, prefix hash) -> times
        self.namespaces: dict[str, str] = {}
        self.table: dict[int, tuple[str, list[int]]] = {}  # request and pages of each slot, from
        # what the rows say has changed

    def warm_up(self) -> bool:
        return False

    def launch(self, schedule: SchedulerOutput) -> Any:
        with self.noticing():
            self.copy_states(schedule)
            self.update_windows(schedule)
            self.before_launch(schedule)
            self.read_pages(schedule)
            outputs = self.run(schedule).outputs
            broken = SampleOutput(-1, None, (), "the best logit is nan")
            rows = zip(schedule.rows, outputs, strict=True)
            return ModelRunnerOutput(
                tuple(broken if self.broken_rows(row) else output for row, output in rows), {}
            )

    def collect(self, pending: Any) -> ModelRunnerOutput:
        return pending

    def close(self) -> None:
        pass

    @contextmanager
    def noticing(self) -> Iterator[None]:
        try:
            yield
        except DeviceFailed:
            raise
        except BaseException as error:
            self.finding = self.finding or error
            raise

    def read_pages(self, schedule: SchedulerOutput) -> None:
        for row in schedule.rows:
            pages, first = row.page_ids.tolist(), row.first_new_page
            owner, known = self.table.get(row.slot, ("", []))
            assert first <= len(known)
            assert not first or owner == row.request_id, "the slot was another request's"
            assert known[:first] + pages[first:] == pages, "a page changed and nobody was told"
            self.table[row.slot] = row.request_id, pages
        slots = [row.slot for row in schedule.rows]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.num_slots for slot in slots)

    def copy_states(self, schedule: SchedulerOutput) -> None:
        for source, target in schedule.state_copies:
            self.states[target] = self.states[source]

    def update_windows(self, schedule: SchedulerOutput) -> None:
        if schedule.windows is not None:
            pages, copies = schedule.windows
            self.window_pages[pages[:, 0]] = pages[:, 1]
            for source, target, count in copies:
                self.window_cells[target, :count] = self.window_cells[source, :count]

    def run(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        for source, target, count in schedule.cow_copies:
            self.cells[target, :count] = self.cells[source, :count]
        written = [cell for row in schedule.rows for cell in self._slots(row, row.start, row.end)]
        assert len(set(written)) == len(written), "two rows write to one slot"
        states = [one for row in schedule.rows for one in _states(row)]
        assert len(set(states)) == len(states), "two rows write to one state"
        reads = {row.state_id for row in schedule.rows if row.written_state_id != row.state_id}
        assert reads.isdisjoint(states), "a row reads what another one writes in the same step"
        for row in schedule.rows:
            self._check_reads(row, set(written))
        return ModelRunnerOutput(tuple(self._compute(row) for row in schedule.rows), {})

    def candidates(self, prefix_hash: int, row: ScheduledRequest) -> SampleOutput:
        assert row.sample is not None
        own = fake_logprobs(prefix_hash)
        scores = own.copy()
        scores[list(row.sample.banned_ids)] = -np.inf
        best = np.argsort(-scores, kind="stable")[: row.sample.num_candidates]
        found = Candidates(best.astype(np.int32), scores[best], own[best])
        return SampleOutput(-1, None, (), candidates=found)

    def next_token(self, hashes: list[int], seed: int = 0) -> int:
        return (hashes[-1] + seed) % VOCAB

    def _slots(self, row: ScheduledRequest, start: int, end: int) -> list[tuple[int, int]]:
        size = self.page_size
        return [(int(row.page_ids[at // size]), at % size) for at in range(start, end)]

    def _check_reads(self, row: ScheduledRequest, written: set[tuple[int, int]]) -> None:
        tokens = self.tokens[row.request_id]
        if row.num_drafts:
            assert len(tokens) == row.end - row.num_drafts, "drafts follow the last token"
            tokens = tokens + row.token_ids[-row.num_drafts :].tolist()
        assert row.token_ids.tolist() == tokens[row.start : row.end]
        hashes = prefix_hashes(tokens, self.hashes.get(row.request_id))
        self.hashes[row.request_id] = hashes
        if row.state_id >= 0 and row.start:
            assert self.states[row.state_id] == hashes[row.start - 1], "another state"
        for at, cell in enumerate(self._slots(row, 0, row.start)):
            assert self.cells[cell] == hashes[at], f"{row.request_id} reads a wrong cell at {at}"
            assert cell not in written, "a row reads what another one writes in the same step"
        if self.windows is not None:
            first = max(0, row.start + 1 - self.windows.window_size)
            for at, (page, slot) in enumerate(self._slots(row, first, row.start), first):
                window = self.window_pages[page]
                assert window >= 0, f"{row.request_id} sees {at}, which has no window page"
                known = self.window_cells[window, slot]
                assert known == hashes[at], f"{row.request_id} reads a wrong window page at {at}"

    def _compute(self, row: ScheduledRequest) -> SampleOutput | None:
        hashes = self.hashes[row.request_id]
        namespace = self.namespaces[row.request_id]
        for at, cell in enumerate(self._slots(row, row.start, row.end), row.start):
            self.cells[cell] = hashes[at]
            if self.windows is not None:
                window = self.window_pages[cell[0]]
                assert window >= 0, f"{row.request_id} computes {at}, which has no window page"
                self.window_cells[window, cell[1]] = hashes[at]
            key = namespace, hashes[at]
            self.computed[key] = self.computed.get(key, 0) + 1
        for length, state_id in row.checkpoints:
            assert row.start < length <= row.end
            self.states[state_id] = hashes[length - 1]
        if row.state_id >= 0:
            self.states[row.written_state_id] = hashes[row.end - 1]
        output = self._sample_rows(row)
        self.hashes[row.request_id] = hashes[: row.end - row.num_drafts]
        if row.logprob_targets is None:
            return output
        end = row.end - (output is not None)
        places = range(end - len(row.logprob_targets), end)
        scores = tuple(
            fake_score(hashes[at], target)
            for at, target in zip(places, row.logprob_targets, strict=True)
        )
        tops = tuple(((hashes[at] % VOCAB, -1.0),) * row.num_top_logprobs for at in places)
        ranks = tuple(int(hashes[at]) % 9 + 1 for at in places) if row.wants_ranks else ()
        output = SampleOutput(-1) if output is None else output
        return output._replace(scores=scores, top_scores=tops, ranks=ranks)

    def _sample_rows(self, row: ScheduledRequest) -> SampleOutput | None:
        if row.sample is None:
            return None
        hashes = self.hashes[row.request_id]
        given, tokens = row.sample.token_ids.tolist(), self.tokens[row.request_id]
        assert given == tokens[: len(given)]
        if not row.sample.params.is_greedy_only:
            assert len(given) + row.sample.num_placeholders == len(tokens)
            assert row.sample.num_sampled == len(tokens) - row.sample.num_prompt
        if row.sample.num_candidates:
            return self.candidates(hashes[row.end - 1], row)
        first, seed = row.end - row.num_drafts, row.sample.seed
        sampled = [self.next_token(hashes[:first], seed)]
        for place in range(first, row.end):
            if row.token_ids[place - row.start] != sampled[-1]:
                break
            sampled.append(self.next_token(hashes[: place + 1], seed))
        output, *more = [SampleOutput(token_id) for token_id in sampled]
        return output._replace(more=tuple(more))


def _states(row: ScheduledRequest) -> list[int]:
    """Recurrent states that a row writes."""
    kept = [state_id for _, state_id in row.checkpoints]
    assert row.written_state_id in (-1, row.state_id) or len(row.token_ids) == 1
    return kept if row.state_id < 0 else [row.written_state_id, *kept]


@dataclass
class Driver:
    """Feeds the scheduler and keeps everybody's tokens, as an engine would."""

    num_pages: int
    page_size: int = 1
    policy: str = "lpm"
    chunked_prefill_size: int = 16
    max_running_requests: int = 8
    max_overtake: int = 8
    reuse: bool = True
    kind: str = "radix"  # of the cache, or "hash"
    eviction: str = "lru"
    admission: str = "greedy"
    max_wait_s: float | None = None
    tenant_weights: Mapping[str, float] | None = None
    num_states: int = 0
    windows: WindowLayers | None = None
    now: float = 0.0  # seconds on the cache's clock
    clock: Callable[[], float] = time.perf_counter  # the scheduler's
    finished: dict[str, Finish] = field(default_factory=dict)
    schedules: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.admission == "priced":
            self.eviction = "expected-return"
        self.cache = self.make_cache()
        self.runner = self.make_runner()
        self.runner.num_slots = self.max_running_requests
        self.runner.before_launch = self._note_launch
        config = EngineConfig(
            page_size=self.page_size,
            schedule_policy=self.policy,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            max_overtake=self.max_overtake,
            max_wait_s=self.max_wait_s,
            admission=self.admission,
            tenant_weights=self.tenant_weights,
        )
        self.engine = self.make_engine(config)
        self.scheduler = self.engine.scheduler
        self.prompts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.seeds: dict[str, int] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.beams: dict[str, tuple[Beam, ...]] = {}
        self.admitted: list[str] = []

    def make_engine(self, config: EngineConfig) -> Engine:
        return make_engine(self.runner, config, self.cache, clock=self.clock)

    def make_runner(self) -> FakeRunner:
        return FakeRunner(self.num_pages, self.page_size, self.windows)

    def make_layers(self) -> RecurrentLayers | WindowedLayers | None:
        """The layers beside K/V of the tests' settings: states with a checkpoint every 9 tokens,
        or windows."""
        if self.num_states:
            return RecurrentLayers(self.num_states, 9)
        if self.windows is None:
            return None
        return WindowedLayers(self.num_pages, self.page_size, self.windows)

    def make_cache(self) -> PrefixCache:
        if self.kind == "hash":
            return HashBlockCache(self.num_pages, self.page_size)
        return RadixCache(
            self.num_pages,
            self.page_size,
            self.eviction,
            reuse=self.reuse,
            layers=self.make_layers(),
            clock=lambda: self.now,
        )

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_len: int | None = None,
        session: str = "",
        logprob_targets: list[int] | None = None,
        samples: bool = False,
        seed: int = 0,
        beams: BeamParams | None = None,
        uncut: Sequence[tuple[int, int]] = (),
        **params: float,
    ) -> None:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        capacity = self.num_pages * self.page_size
        request = Request(
            request_id=name,
            token_ids=np.asarray(tokens, np.int32),
            params=sampling,
            seed=seed,
            end_ids=frozenset() if sampling.ignore_eos else frozenset({EOS}),
            max_len=capacity if max_len is None else max_len,
            session=session,
            logprob_targets=None
            if logprob_targets is None
            else np.asarray(logprob_targets, np.int32),
            beams=beams,
            is_stopped=getattr(beams, "is_stopped", None),  # `StoppedBeams` have one
            also_generate=samples,
            uncut=tuple(uncut),
        )
        self.seeds[name] = seed
        self.engine.add(request)
        self.prompts[name] = tokens
        self.requests[name] = request
        self.runner.tokens[name] = list(tokens)
        self.runner.namespaces[name] = sampling.namespace

    def serve(self, name: str, tokens: list[int], max_tokens: int = 4) -> tuple[int, int]:
        """Run a request to its end; the cached and the computed tokens of its prompt."""
        self.add(name, tokens, max_tokens=max_tokens, ignore_eos=True)
        self.run()
        usage = self.finished[name].usage
        assert usage.prompt_tokens == len(tokens)
        return usage.cached_tokens, usage.computed_tokens

    def step(self) -> SchedulerOutput | None:
        """The step that was launched, if any."""
        num_steps = len(self.schedules)
        outputs = self.engine.step()
        if self.runner.finding is not None:
            raise self.runner.finding
        self.collect_outputs(outputs)
        return self.schedules[-1] if len(self.schedules) > num_steps else None

    def _note_launch(self, schedule: SchedulerOutput) -> None:
        self.schedules.append(schedule)
        self.name_beams()
        for row in schedule.rows:
            if row.request_id not in self.admitted:
                self.admitted.append(row.request_id)

    @property
    def states(self) -> dict[str, RequestState]:
        """The scheduler's own record of each request."""
        return self.scheduler._requests

    def name_beams(self) -> None:
        """Tell the runner what the rows of beams are to hold."""
        for name, state in self.states.items():
            if state.group is not None:
                self.runner.tokens[name] = state.tokens.view().tolist()
                self.runner.hashes.pop(name, None)
                self.runner.namespaces[name] = state.request.params.namespace

    def run(self) -> None:
        while self.step() is not None:
            self.engine.check()

    def abort(self, name: str) -> None:
        output = self.engine.abort(name)
        if output is not None:
            self.collect_outputs([output])

    def collect_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.runner.tokens[output.request_id] += output.token_ids
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.beams:
                self.beams[output.request_id] = output.beams
            if output.finish is not None:
                self.finished[output.request_id] = output.finish

    def output(self, name: str) -> list[int]:
        return self.runner.tokens[name][len(self.prompts[name]) :]

    def expected(self, name: str, count: int) -> list[int]:
        """What the fake model says without any cache, scheduler or batch."""
        tokens = list(self.prompts[name])
        for _ in range(count):
            tokens.append(self.runner.next_token(prefix_hashes(tokens), self.seeds[name]))
        return tokens[len(self.prompts[name]) :]

    def drain(self) -> None:
        """Nobody is left and not a page is lost."""
        self.engine.check()
        stats = self.cache.stats()
        assert stats["sequences"] == stats["pages_private"] == stats["pages_locked"] == 0
        assert stats.get("states_private", 0) == 0
        self.cache.evict(self.num_pages * self.page_size)
        self.cache.check()
        assert self.cache.stats()["pages_free"] == self.num_pages


def random_prompt(rng: random.Random, known: list[list[int]], max_len: int) -> list[int]:
    """Mostly a head of something known, so that prefixes are shared at every offset."""
    head: list[int] = []
    if known and rng.random() < 0.75:
        other = rng.choice(known[-30:])
        head = other[: rng.randint(0, len(other))]
    tail = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, max(1, max_len // 3)))]
    return (head + tail)[:max_len]


def counters(stats: Mapping[str, Any]) -> Counter[str]:
    """What a scheduler's statistics count since its start."""
    return Counter({name: value for name, value in stats.items() if isinstance(value, int)})
