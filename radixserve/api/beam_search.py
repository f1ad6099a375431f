"""Beam search for callers: what they ask for, when a stop string ends a beam, and its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from radixserve.arrays import IntArray
from radixserve.engine.ticket import Event, Ticket
from radixserve.errors import InvalidRequest
from radixserve.output import Beam, Completion, Finish, RequestOutput, Usage
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.tokenizer import Tokenizer

_CONTEXT = 5  # tokens decoded before the longest stop string, so that its words keep their spaces


def read_options(
    beam_width: int = 4,
    max_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    *,
    min_tokens: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: str | Iterable[str] = (),
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    priority: int = 0,
    namespace: str = "",
) -> tuple[SamplingParams, BeamParams]:
    """The options of a search, checked. Raises InvalidRequest."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        priority=priority,
        namespace=namespace,
    )
    beams = BeamParams(
        width=beam_width, length_penalty=length_penalty, early_stopping=early_stopping
    )
    return params, beams


def as_search(
    request: Request, beams: BeamParams, tokenizer: Tokenizer | None, vocab_size: int
) -> Request:
    """`request` as a beam search. InvalidRequest where the vocabulary is too small for the width:
    a single beam must have enough tokens for all of its first children."""
    num_ends, params = len(request.end_ids), request.params
    room = vocab_size - (num_ends if params.min_tokens else 0)
    most = room // max(2, 1 + num_ends)
    if beams.width > most:
        raise InvalidRequest(
            f"beam_width must be at most {most} with {num_ends} end tokens in a vocabulary of "
            f"{vocab_size}, got {beams.width}"
        )
    stops = tuple(params.stop)
    if stops and tokenizer is not None:
        beams = replace(beams, is_stopped=stop_check(tokenizer, stops))
    return replace(request, beams=beams)


def stop_check(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[IntArray, int], bool]:
    """Whether one of `stops` ends in a token, given those before it (prompt and output).

    As in transformers the string may begin in the prompt, and special tokens count as their names.
    """
    reach = max(len(stop.encode()) for stop in stops) + _CONTEXT  # tokens have a byte at least

    def is_stopped(before: IntArray, token_id: int) -> bool:
        ids = before[-reach:].tolist()
        old = tokenizer.decode(ids, keep_special=True)
        new = tokenizer.decode([*ids, token_id], keep_special=True)
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
        return any(new.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in stops)

    return is_stopped


class BeamTicket(Ticket):
    """The way back of a beam search: one event, a tuple of Completions, best first."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, notify: Callable[[Event], None]
    ) -> None:
        super().__init__(request, tokenizer, notify, streams=False)
        self._tokenizer = tokenizer
        self._best_ids: list[int] = []

    @property
    def token_ids(self) -> list[int]:
        """Those of the best answer."""
        return self._best_ids

    def push(self, output: RequestOutput) -> bool:
        """Take in the end of the search; there is no news before."""
        finish = output.finish
        if self._has_ended or finish is None:
            return False
        if finish.error is not None:
            self.fail(finish.error)
            return False
        answers = self._answers(output.beams, finish)
        self._best_ids = answers[0].token_ids
        self._has_ended = True
        self._notify(answers)
        return False

    def _answers(self, beams: Sequence[Beam], finish: Finish) -> tuple[Completion, ...]:
        """The first one's usage counts the prompt, the others' count it as cached."""
        if not beams:  # aborted before its first step
            return (self._text_of(RequestOutput("", (), (), (), finish)),)
        found = []
        for number, beam in enumerate(beams):
            usage, num_tokens = finish.usage, len(beam.token_ids)
            if number:
                usage = Usage(usage.prompt_tokens, usage.prompt_tokens, 0, num_tokens)
            own = replace(finish, reason=beam.reason, usage=usage)
            news = RequestOutput("", tuple(beam.token_ids), beam.logprobs, beam.top_logprobs, own)
            total = math.fsum(beam.logprobs)
            completion = self._text_of(news)
            found.append(replace(completion, score=beam.score, cumulative_logprob=total))
        return tuple(found)

    def _text_of(self, news: RequestOutput) -> Completion:
        """The answer with its text, as for a request that ended in one step."""
        # A stop string ends a beam at any length.
        request = replace(self.request, params=replace(self.request.params, min_tokens=0))
        events: list[Event] = []
        Ticket(request, self._tokenizer, events.append, streams=False).push(news)
        (completion,) = events
        assert isinstance(completion, Completion)
        return completion
