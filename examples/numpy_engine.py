"""A small engine on `RadixCache`: continuous batching of a toy model in numpy.

    python examples/numpy_engine.py

It needs numpy and sortedcontainers only. The model is a transformer of two layers with random
weights; what matters is how the engine uses the cache. docs/engine.md explains each step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixserve.cache import CacheSession, OutOfPages, RadixCache, RadixSequence

VOCAB, WIDTH, LAYERS = 64, 32, 2


class Model:
    """A transformer whose K/V lies in pages that a cache hands out."""

    def __init__(self, num_pages: int, page_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(VOCAB, WIDTH))
        self.weights = rng.normal(size=(LAYERS, 4, WIDTH, WIDTH)) / np.sqrt(WIDTH)  # q, k, v, out
        self.memory = np.zeros((LAYERS, 2, num_pages, page_size, WIDTH))  # K and V
        self.page_size = page_size
        self.num_computed = 0  # tokens

    def copy(self, source: int, target: int, count: int) -> None:
        """The K/V of the first `count` tokens of a page."""
        self.memory[:, :, target, :count] = self.memory[:, :, source, :count]

    def compute(self, tokens: Any, pages: Any, start: int) -> int:
        """Compute the tokens from position `start` on, and write their K/V into the pages.

        tokens: [n] ids; pages: [ceil(n / page_size)] ids. Returns the most likely next token.
        """
        positions = np.arange(len(tokens))
        slots = pages[positions // self.page_size], positions % self.page_size
        new = slots[0][start:], slots[1][start:]
        angles = positions[start:, None] / 50.0 ** (np.arange(WIDTH) / WIDTH)
        hidden = self.embedding[tokens[start:]] + np.sin(angles)  # [new tokens, WIDTH]
        visible = positions <= positions[start:, None]  # [new tokens, n]
        for layer, (to_q, to_k, to_v, to_out) in enumerate(self.weights):
            keys, values = self.memory[layer]
            keys[new], values[new] = hidden @ to_k, hidden @ to_v
            scores = (hidden @ to_q) @ keys[slots].T / np.sqrt(WIDTH)
            weights = np.exp(np.where(visible, scores, -np.inf) - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            hidden = hidden + np.tanh(weights @ values[slots]) @ to_out
        self.num_computed += len(tokens) - start
        return int(np.argmax(hidden[-1] @ self.embedding.T))


@dataclass(eq=False)
class Request:
    """A prompt, and the answer so far."""

    prompt: list[int]
    max_tokens: int
    session: CacheSession | None = None
    answer: list[int] = field(default_factory=list)
    sequence: RadixSequence | None = None  # while it runs
    num_cached: int = 0  # tokens of the prompt that were cached when it was first admitted

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


class Engine:
    """Continuous batching: requests join and leave between two steps."""

    def __init__(self, cache: RadixCache, model: Model, max_running: int = 4) -> None:
        self.cache, self.model, self.max_running = cache, model, max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.num_preempted = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Until all are answered."""
        self.waiting += requests
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """One token for every running request, then as many new requests as fit."""
        for request in list(self.running):
            if request.sequence is not None:  # else it was preempted in this step
                self.decode(request)
        while self.waiting and len(self.running) < self.max_running and self.admit():
            pass

    def admit(self) -> bool:
        """Start the first waiting request; whether there was memory for it."""
        request = self.waiting[0]
        tokens = request.tokens
        sequence = self.cache.acquire(tokens, session=request.session)  # locks what is cached
        try:
            sequence.extend(tokens[sequence.cached_len :])  # pages for the rest; may evict
        except OutOfPages:
            sequence.release()
            if not self.running:
                raise
            return False
        if not request.answer:
            request.num_cached = sequence.cached_len
        request.sequence = sequence
        self.running.append(self.waiting.popleft())
        self.compute(request, sequence.cached_len)
        return True

    def decode(self, request: Request) -> None:
        """One more token of a running request."""
        sequence = request.sequence
        assert sequence is not None
        while True:
            try:
                sequence.extend(request.answer[-1:])
                break
            except OutOfPages:  # all other pages are locked: the youngest request makes way
                youngest = self.running[-1]
                if len(self.running) == 1:
                    raise
                self.preempt(youngest)
                if youngest is request:
                    return
        self.compute(request, sequence.length - 1)

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue. What it published stays cached while there is room."""
        assert request.sequence is not None
        request.sequence.release()
        request.sequence = None
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def compute(self, request: Request, start: int) -> None:
        """The sequence's tokens from `start` on, and the next token of the answer."""
        sequence = request.sequence
        assert sequence is not None
        for copy in sequence.cow_copies:  # the head of a page that another sequence owns
            self.model.copy(*copy)
        token = self.model.compute(sequence.tokens, sequence.pages, start)
        sequence.commit(sequence.length)  # others may use its K/V from now on
        request.answer.append(token)
        if len(request.answer) == request.max_tokens:
            sequence.release()
            request.sequence = None
            self.running.remove(request)


def make_requests(session: CacheSession | None = None) -> list[Request]:
    """Questions that share a system prompt, in two groups that share an example, too."""
    rng = random.Random(0)
    system, *examples = ([rng.randrange(VOCAB) for _ in range(n)] for n in (50, 21, 21))
    return [Request(system + examples[n % 2] + [n, n + 1, n + 2], 12, session) for n in range(8)]


def main() -> None:
    """Answer the questions with a cache, without one, and in a memory that is too small."""
    answers = []
    for name, num_pages, reuse in (
        ("with the cache", 256, True),
        ("without reuse", 256, False),
        ("in 16 pages", 16, True),
    ):
        cache = RadixCache(num_pages, page_size=8, reuse=reuse)
        log = cache.open_events()
        engine = Engine(cache, Model(num_pages, page_size=8))
        with cache.open_session("questions") as session:
            requests = make_requests(session)
            engine.run(requests)
        cache.check()  # every page has one owner
        answers.append([request.answer for request in requests])
        print(
            f"{name:>14}: {engine.model.num_computed} tokens computed, "
            f"{sum(request.num_cached for request in requests)} of the prompts were cached, "
            f"{engine.num_preempted} preemptions, {len(log.take().events)} events; {cache!r}"
        )
    assert answers[0] == answers[1] == answers[2]
    print("the answers are the same")


if __name__ == "__main__":
    main()
