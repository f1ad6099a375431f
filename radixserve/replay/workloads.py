"""Typical workloads as traces, made at random from a seed: `workload:rag`, or `workload:rag:7`.

    chat        a question each, after one system prompt
    multi-turn  conversations over one system prompt; a turn contains the answers before it
    rag         instructions, a document that many questions need, passages for this one, a question
    code        completions in files: the text before a cursor that moves on, sometimes edited above
    summaries   one instruction, then a text of its own
    agents      tools and a system prompt, then steps: a call of a tool, its result
    random      prompts that share nothing

A workload is a list of turns, whose prompts may begin with the prompt and the answer of an earlier
one. So the same workload can be recorded with made-up answers, or sent to an engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import check_choice, check_int, shown
from radixserve.errors import InvalidRequest
from radixserve.replay.trace import VOCAB, PackedTokens, Trace

PREFIX = "workload:"  # begins the name of a workload where a trace's file could stand
NUM_REQUESTS = 400
_FIRST_TOKEN = 256  # lower ids are those of special tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: the prompt and the answer of `parent`, if there is one, then `text`."""

    time: float  # seconds since the workload began
    session: str
    parent: int | None  # index of an earlier turn
    text: IntArray  # [n] int32
    num_output: int


class _Maker:
    """Draws lengths and texts. `scale` multiplies all lengths but those of steps and sessions."""

    def __init__(self, seed: int, scale: float, tokens: tuple[int, int]) -> None:
        self.rng = np.random.default_rng(seed)
        self._scale, self._tokens = scale, tokens

    def length(self, low: int, high: int) -> int:
        return max(1, round(self._scale * int(self.rng.integers(low, high + 1))))

    def text(self, low: int, high: int | None = None) -> IntArray:
        """[n] int32: random tokens, from `low` to `high` of them."""
        size = self.length(low, low if high is None else high)
        return self.rng.integers(*self._tokens, size, dtype=np.int32)

    def count(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def wait(self, mean_s: float) -> float:
        return float(self.rng.exponential(mean_s))


_Session = list[Turn]  # `parent`: index in the session


def _single(
    make: _Maker, text: Callable[[], IntArray], outputs: tuple[int, int], mean_s: float
) -> Iterator[_Session]:
    """Sessions of one request each, `mean_s` seconds apart on average."""
    now = 0.0
    while True:
        yield [Turn(now, "", None, text(), make.length(*outputs))]
        now += make.wait(mean_s)


def _chat(make: _Maker) -> Iterator[_Session]:
    system = make.text(800)
    return _single(make, lambda: np.concatenate((system, make.text(20, 200))), (100, 300), 0.3)


def _rag(make: _Maker) -> Iterator[_Session]:
    instructions = make.text(400)
    documents = [make.text(1000) for _ in range(20)]
    shares = 1.0 / np.arange(1, len(documents) + 1)  # Zipf's law

    def text() -> IntArray:
        popular = documents[make.rng.choice(len(documents), p=shares / shares.sum())]
        return np.concatenate((instructions, popular, make.text(600, 1400), make.text(20, 60)))

    return _single(make, text, (80, 250), 0.4)


def _summaries(make: _Maker) -> Iterator[_Session]:
    instruction = make.text(150)
    return _single(
        make, lambda: np.concatenate((instruction, make.text(1500, 6000))), (150, 400), 0.6
    )


def _random(make: _Maker) -> Iterator[_Session]:
    return _single(make, lambda: make.text(100, 2000), (50, 300), 0.4)


def _multi_turn(make: _Maker) -> Iterator[_Session]:
    system, start = make.text(300), 0.0
    while True:
        session: _Session = []
        now, num_turns = start, make.count(2, 12)
        for number in range(num_turns):
            asked = make.text(20, 150)
            text = asked if number else np.concatenate((system, asked))
            parent = number - 1 if number else None
            session.append(Turn(now, "", parent, text, make.length(80, 400)))
            now += 10.0 + make.wait(20.0)
        yield session
        start += make.wait(4.0)


def _agents(make: _Maker) -> Iterator[_Session]:
    tools, start = make.text(3000), 0.0
    while True:
        session: _Session = []
        now, num_steps = start, make.count(4, 24)
        for number in range(num_steps):
            text = make.text(40, 900) if number else np.concatenate((tools, make.text(50, 300)))
            parent = number - 1 if number else None
            session.append(Turn(now, "", parent, text, make.length(40, 200)))
            now += 3.0 + make.wait(3.0)
        yield session
        start += make.wait(8.0)


def _code(make: _Maker) -> Iterator[_Session]:
    start = 0.0
    while True:
        file, now = make.text(1500, 5000), start
        session: _Session = []
        for _ in range(make.count(8, 25)):
            session.append(Turn(now, "", None, file, make.length(15, 60)))
            if make.rng.random() < 0.1:  # an edit above the cursor
                at = int(make.rng.integers(len(file)))
                file = np.concatenate((file[:at], make.text(5, 40), file[at:]))
            file = np.concatenate((file, make.text(5, 60)))
            now += 1.0 + make.wait(4.0)
        yield session
        start += make.wait(6.0)


WORKLOADS: dict[str, Callable[[_Maker], Iterator[_Session]]] = {
    "chat": _chat,
    "multi-turn": _multi_turn,
    "rag": _rag,
    "code": _code,
    "summaries": _summaries,
    "agents": _agents,
    "random": _random,
}


def make_turns(
    name: str,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    *,
    scale: float = 1.0,
    tokens: tuple[int, int] = (_FIRST_TOKEN, VOCAB),
) -> list[Turn]:
    """The first `num_requests` turns of a workload, in order of time; sessions overlap.

    scale   multiplies the lengths of texts and answers
    tokens  the first token id and the one after the last

    Raises InvalidRequest for an unknown name.
    """
    check_choice("workload", name, tuple(WORKLOADS))
    check_int("num_requests", num_requests, 1)
    sessions = WORKLOADS[name](_Maker(seed, scale, tokens))
    drawn: list[tuple[float, int, int, Turn]] = []  # time, session, place in the session
    for number, session in enumerate(sessions):
        # Later sessions begin later, so the turns before this one are all there are.
        if bisect_left(drawn, (session[0].time,)) >= num_requests:
            break
        for place, turn in enumerate(session):
            insort(drawn, (turn.time, number, place, turn), key=lambda entry: entry[:3])
    index = {entry[1:3]: place for place, entry in enumerate(drawn)}
    return [
        replace(
            turn,
            session=f"{number}",
            parent=None if turn.parent is None else index[number, turn.parent],
        )
        for _, number, _, turn in drawn[:num_requests]
    ]


def build_trace(
    name: str, turns: Sequence[Turn], answer: Callable[[int, IntArray], IntArray]
) -> Trace:
    """The trace of a workload. `answer`: returns the output to a turn, by its index and prompt."""
    packed = PackedTokens()
    lengths = []
    for index, turn in enumerate(turns):
        prompt = turn.text
        if turn.parent is not None:
            prompt = np.concatenate((*packed.tokens(turn.parent), prompt))
        lengths.append(packed.add(prompt, answer(index, prompt)))
    num_prompt, num_output = np.asarray(lengths, np.int64).T
    return Trace(
        name=name,
        source=packed,
        times=np.asarray([turn.time for turn in turns]) - turns[0].time,
        sessions=[turn.session for turn in turns],
        namespaces=[""] * len(turns),
        num_prompt=num_prompt,
        num_output=num_output,
    )


def make_workload(name: str, num_requests: int = NUM_REQUESTS, seed: int = 0) -> Trace:
    """A workload as a trace, with random answers. Raises InvalidRequest for an unknown name."""
    turns = make_turns(name, num_requests, seed)
    rng = np.random.default_rng((seed, 1))

    def answer(index: int, _prompt: IntArray) -> IntArray:
        return rng.integers(_FIRST_TOKEN, VOCAB, turns[index].num_output, dtype=np.int32)

    return build_trace(PREFIX + name, turns, answer)


def expand_names(names: Sequence[str]) -> list[str]:
    """The names of traces, with `workload:all` replaced by all workloads."""
    expanded: list[str] = []
    for name in names:
        kind, _, seed = name.removeprefix(PREFIX).partition(":")
        if name.startswith(PREFIX) and kind == "all":
            ending = f":{seed}" if seed else ""
            expanded += [f"{PREFIX}{workload}{ending}" for workload in WORKLOADS]
        else:
            expanded.append(name)
    return expanded


def read_workload(name: str, num_requests: int | None = None) -> Trace:
    """The workload of a name such as "workload:rag" or "workload:rag:7". Raises InvalidRequest."""
    kind, _, seed = name.removeprefix(PREFIX).partition(":")
    if seed and not seed.isdecimal():
        raise InvalidRequest(
            f"a workload is named as workload:rag or workload:rag:7, got {shown(name)}"
        )
    trace = make_workload(kind, num_requests or NUM_REQUESTS, int(seed or 0))
    return replace(trace, name=name)
