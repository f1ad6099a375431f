"""Case I: a scheduling pass over many waiting requests.

In the first lines they find no room.

One request decodes and fills most of the pool. The waiting prompts begin with the same cached
tokens; one of them is cached a little further. Timed is `Scheduler.schedule`, with `Scheduler.add`
where one more arrives; between two passes the running request always decodes a token.

In the last lines greedy and priced admission serve sessions in a closed loop: four requests of each
wait or run, and a pool for 40 sessions is short. Without pressure 16 sessions have a request each,
and all fit. Timed are `Scheduler.schedule`, and all that the scheduler does in a step. The clock of
the schedulers is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache.cases import Bench
from cache.contenders import Contender, PagedTree
from cache.timing import Figure, Samples, figures, micros

from radixserve.admission_policies import make_admission
from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput
from radixserve.scheduler import Scheduler
from radixserve.tenants import TenantShares

PROMPT = 8_192
HEAD = 1_024  # tokens that all prompts begin with
CHUNK = 256  # tokens of a commit
ROOM = PROMPT // 2  # tokens that are free or evictable: no waiting request fits

LINES = {  # by name: what is timed
    "add": "their arrival, all together",
    "first": "the first pass",
    "same": "nothing changed",
    "commit": "a chunk of one committed",
    "evict": "a page of one evicted",
    "arrival": "one more",
    "admit": "the running one has ended",
}
TEXT, FIRST, TURN = 1_024, 512, 64  # tokens of a session, of its first prompt, and of a turn
ANSWER = 16  # tokens
WARM_UP = 25  # samples before those that count
_SAMPLED = SampleOutput(5, None, ())


def scheduling_pass(bench: Bench) -> Iterator[Figure]:
    able = [c for c in bench.contenders if isinstance(c.make(64), PagedTree)]
    for waiting in bench.sizes.waiting:
        prompts = bench.tokens(1 + waiting + bench.sizes.repeats, PROMPT)
        prompts[:, :HEAD] = bench.tokens(HEAD)
        for contender in able:
            samples = _samples(bench, contender, prompts, waiting)
            for name, values in samples.items():
                what = f"{waiting:,} waiting, {LINES[name]}"
                yield from figures(f"I.{name}.{waiting}", what, {contender.name: values})
    yield from _admissions(bench)


def _admissions(bench: Bench) -> Iterator[Figure]:
    """Greedy and priced admission in turns, and the median of the ratios of these pairs."""
    for waiting in (0, *bench.sizes.waiting, 10 * bench.sizes.waiting[-1]):
        num_sessions = waiting // 4 or 16
        texts = bench.tokens(num_sessions, TEXT)
        loops = {
            admission: _Loop(admission, texts, 4 if waiting else 1, is_short=waiting > 0)
            for admission in ("greedy", "priced")
        }
        passes: Samples = {name: [] for name in loops}
        steps: Samples = {name: [] for name in loops}
        num_steps = 2 + 2 * bench.sizes.repeats  # of a sample
        for _ in range(WARM_UP + 5 * bench.sizes.repeats):
            for name, loop in loops.items():
                in_pass, in_step = loop.timed_steps(num_steps)
                passes[name].append(in_pass)
                steps[name].append(in_step)
        load = f"{waiting:,} waiting in a closed loop" if waiting else "no pressure"
        for key, what, samples in (("pass", "a pass", passes), ("step", "a step", steps)):
            kept = {name: values[WARM_UP:] for name, values in samples.items()}
            yield from figures(f"I.loop {key}.{waiting}", f"{load}, {what}", kept)
            pairs = zip(kept["greedy"], kept["priced"], strict=True)
            ratio = [priced / greedy for greedy, priced in pairs]
            name = f"I.loop {key} ratio.{waiting}"
            yield from figures(name, f"{load}, {what}", {"priced / greedy": ratio}, "x")


def _samples(bench: Bench, contender: Contender, prompts: IntArray, waiting: int) -> Samples:
    """By line."""
    samples: Samples = {name: [] for name in LINES}
    for _ in range(bench.sizes.repeats):
        queue = _Queue(contender, prompts, waiting)
        samples["add"].append(queue.arrive(waiting))
        samples["first"].append(queue.timed_pass())
    for turn in range(bench.sizes.repeats):
        samples["same"].append(queue.timed_pass())
        queue.tree.request(prompts[1 + turn][: HEAD + CHUNK])  # computed elsewhere
        samples["commit"].append(queue.timed_pass())
        queue.tree.evict(1)
        samples["evict"].append(queue.timed_pass())
        samples["arrival"].append(queue.arrive(1) + queue.timed_pass())
    assert queue.num_running == 1, "a waiting request was admitted: nothing of this was measured"
    for _ in range(bench.sizes.repeats):
        queue.end_running()
        samples["admit"].append(queue.timed_pass())
    return samples


class _Queue:
    """A scheduler whose only running request decodes."""

    def __init__(self, contender: Contender, prompts: IntArray, last: int) -> None:
        """A part of the prompt at `last` is cached already; it is evicted first."""
        tree = contender.make(-(-(PROMPT + ROOM) // contender.page_size))
        assert isinstance(tree, PagedTree)
        self.tree = tree
        self._prompts = prompts
        shares = TenantShares()
        self._scheduler = Scheduler(tree.cache, chunked_prefill_size=2 * PROMPT, shares=shares)
        self._num_added = 0
        self._running = ""  # its request id
        tree.request(prompts[last][: HEAD + 4 * CHUNK])
        self.arrive(1)
        for _ in range(2):  # prefill, decode
            self.timed_pass()

    @property
    def num_running(self) -> int:
        return self._scheduler.stats()["running"]

    def arrive(self, count: int) -> float:
        """Microseconds of so many arrivals."""
        first = self._num_added
        self._num_added += count
        new = [_request(number, self._prompts[number]) for number in range(first, first + count)]

        return micros(lambda: [self._scheduler.add(request) for request in new])

    def timed_pass(self) -> float:
        """Microseconds of a pass; its step is carried out."""
        made: list[SchedulerOutput | None] = []
        spent = micros(lambda: made.append(self._scheduler.schedule()))
        schedule = made[0]
        assert schedule is not None
        self._running = schedule.rows[0].request_id
        sampled = tuple(None if row.sample is None else _SAMPLED for row in schedule.rows)
        self._scheduler.update(schedule, ModelRunnerOutput(sampled, {}))
        return spent

    def end_running(self) -> None:
        """The next pass starts a waiting request in its place, evicting what it needs."""
        self._scheduler.finish(self._running, "abort")


class _Loop:
    """A scheduler that serves sessions; the next request of one is sent when one has ended."""

    def __init__(
        self, admission: str, texts: IntArray, per_session: int, *, is_short: bool
    ) -> None:
        self._now = 0.0
        is_priced = admission == "priced"
        cache = RadixCache(
            40 * TEXT if is_short else 2 * texts.size,
            eviction="expected-return" if is_priced else "lru",
            clock=self._clock,
        )
        self._scheduler = Scheduler(
            cache,
            chunked_prefill_size=2_048,
            max_running_requests=32,
            max_overtake=4_096,
            admission=make_admission(admission),
            shares=TenantShares(),
            clock=self._clock,
        )
        self._texts = texts
        self._turns = [0] * len(texts)
        for session in range(len(texts)):
            for _ in range(per_session):
                self._send(session)

    def _clock(self) -> float:
        return self._now

    def _send(self, session: int) -> None:
        turn = self._turns[session]
        self._turns[session] += 1
        length = FIRST + TURN * (turn % ((TEXT - FIRST) // TURN))
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        tokens, ends = self._texts[session, :length], frozenset[int]()
        name = f"{session}-{turn}"
        self._scheduler.add(
            Request(name, tokens, params, 0, ends, length + ANSWER, session=f"s{session}")
        )

    def timed_steps(self, count: int) -> tuple[float, float]:
        """Microseconds of a pass and of all that the scheduler does in a step: means."""
        in_pass = in_step = 0.0
        for _ in range(count):
            made: list[SchedulerOutput | None] = []
            spent = micros(lambda made=made: made.append(self._scheduler.schedule()))
            in_pass += spent
            in_step += spent
            schedule = made[0]
            assert schedule is not None
            self._now += 0.01 + 5e-5 * schedule.num_prefill_tokens
            sampled = tuple(None if row.sample is None else _SAMPLED for row in schedule.rows)
            output = ModelRunnerOutput(sampled, {})
            ended: list[int] = []

            def finish(
                schedule: SchedulerOutput = schedule,
                output: ModelRunnerOutput = output,
                ended: list[int] = ended,
            ) -> None:
                for answer in self._scheduler.update(schedule, output):
                    if answer.finish is not None:
                        ended.append(int(answer.request_id.split("-")[0]))
                for session in ended:
                    self._send(session)

            in_step += micros(finish)
        return in_pass / count, in_step / count


def _request(number: int, tokens: IntArray) -> Request:
    params = SamplingParams(max_tokens=1_000, ignore_eos=True)
    ends: frozenset[int] = frozenset()
    return Request(str(number), tokens, params, seed=0, end_ids=ends, max_len=PROMPT + ROOM // 2)
