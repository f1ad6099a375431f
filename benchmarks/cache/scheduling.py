"""Case I: a scheduling pass over many waiting requests that find no room.

One request decodes and fills most of the pool. The waiting prompts begin with the same cached
tokens; one of them is cached a little further. Timed is `Scheduler.schedule`, with `Scheduler.add`
where one more arrives; between two passes the running request always decodes a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache.cases import Bench
from cache.contenders import Contender, PagedTree
from cache.timing import Figure, Samples, figures, micros

from radixserve.arrays import IntArray
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput
from radixserve.scheduler import Scheduler

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
        self._scheduler = Scheduler(tree.cache, chunked_prefill_size=2 * PROMPT)
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


def _request(number: int, tokens: IntArray) -> Request:
    params = SamplingParams(max_tokens=1_000, ignore_eos=True)
    ends: frozenset[int] = frozenset()
    return Request(str(number), tokens, params, seed=0, end_ids=ends, max_len=PROMPT + ROOM // 2)
