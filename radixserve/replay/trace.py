"""`Trace`: requests in order of arrival, their tokens made when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TokenSource(Protocol):
    """Makes a request's tokens. `HashTokens` and `PackedTokens` are the two."""

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output of a request of the trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request with its recorded output."""

    index: int  # in the trace, by arrival
    time: float  # seconds since the first request
    session: str | None  # shared by the requests of one conversation, task or user
    namespace: str
    prompt: IntArray  # [n] int32, n >= 1
    output: IntArray  # [m] int32, m >= 0

    @property
    def kept(self) -> IntArray:
        """The tokens whose K/V exists at its end: prompt and output without the last token."""
        if len(self.output) < 2:
            return self.prompt
        return np.concatenate((self.prompt, self.output[:-1]))


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns by request in order of arrival. Holds no expanded prompts: see `TokenSource`."""

    name: str
    source: TokenSource
    times: Floats  # [requests] seconds since the first one
    sessions: Sequence[str | None]
    namespaces: Sequence[str]
    num_prompt: Ints  # [requests] tokens
    num_output: Ints  # [requests] tokens
    has_times: bool = True  # False: the file has no times, all arrive at once
    sessions_inferred: bool = False  # from which request continues which, not from the file

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self.request(index) for index in range(len(self)))

    def request(self, index: int) -> TraceRequest:
        """O(its tokens)."""
        time, session = float(self.times[index]), self.sessions[index]
        tokens = self.source.tokens(index)
        return TraceRequest(index, time, session, self.namespaces[index], *tokens)

    @property
    def num_kept(self) -> Ints:
        """[requests] tokens whose K/V is computed by its end: see `TraceRequest.kept`."""
        return self.num_prompt + np.maximum(self.num_output - 1, 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.num_prompt.sum())

    @property
    def longest(self) -> int:
        """Tokens that the longest request keeps; a smaller cache cannot serve it."""
        return int(self.num_kept.max())

    @property
    def num_sessions(self) -> int:
        return len(self.session_sizes())

    def session_sizes(self) -> Counter[str]:
        """Requests of each session. O(requests)."""
        return Counter(session for session in self.sessions if session is not None)
