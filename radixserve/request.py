"""What a caller asks for: `SamplingParams`, and the `Request` that the engine queues."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from radixserve.arrays import IntArray
from radixserve.config import StrictFields, check_float, check_int
from radixserve.errors import InvalidRequest

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams(StrictFields):
    """How a request's tokens are drawn and when it ends. Checked when made (InvalidRequest).

    max_tokens            most tokens to generate
    min_tokens            end tokens and stop strings are ignored before this many
    temperature           0 is greedy
    top_k                 keep the k most likely tokens; 0 or -1 keeps all
    top_p                 keep the smallest set of tokens with at least this probability
    min_p                 drop tokens less likely than min_p times the most likely one
    repetition_penalty    divides (positive) or multiplies (negative) logits of tokens seen in
                          prompt or output; 1 is off
    presence_penalty      subtracted once from the logit of a token in the output
    frequency_penalty     subtracted for each occurrence in the output
    stop                  string or strings that end the text; they are not part of it
    stop_token_ids        token ids that end it, besides the model's own end tokens
    ignore_eos            go on after the model's end tokens
    seed                  makes the request reproducible whatever runs beside it
    n                     completions a prompt; 1 is the only value allowed yet
    logprobs              None, or how many of the best tokens to report besides the one drawn
    priority              requests with a higher one are admitted first
    namespace             requests of different namespaces share no cache
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
    namespace: str = ""

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_int("top_k", self.top_k, -1)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        check_int("n", self.n, 1, 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if not isinstance(self.namespace, str):
            raise InvalidRequest(f"namespace must be a string, got {self.namespace!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequest(f"stop must be a non-empty string or a list of them, got {stop!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    return tuple(strings)


def _stop_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, list | tuple | set | frozenset):
        raise InvalidRequest(f"stop_token_ids must be a list of token ids, got {ids!r}")
    for token_id in ids:
        check_int("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request on its way into the engine."""

    request_id: str
    token_ids: IntArray  # [n] the prompt, n >= 1
    params: SamplingParams
    seed: int  # of its random stream; params.seed or one drawn by the owner
    end_ids: frozenset[int]  # tokens that end it: the model's (unless ignored) and its own
    max_len: int  # most tokens of prompt and output together
