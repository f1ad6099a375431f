"""Beam search for callers: its parameters, its stop strings and its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.completion import Completion
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.errors import InvalidRequest
from radixserve.output import Beam, Finish, RequestOutput
from radixserve.request import BeamParams, Request, SamplingParams, StopCheck
from radixserve.text.tokenizer import Tokenizer

_MAX_TOKENS = 64  # of an answer by default
_BEAM_FIELDS = {
    "beam_width": "width",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}
_REFUSED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "n",
    "best_of",
    "prompt_logprobs",
    "logprob_token_ids",
    "logits_processors",
    "prediction",
    "digest",
)
_CONTEXT = 5  # tokens decoded before the longest stop string, so that words keep their spaces


def read_options(
    params: SamplingParams | None, beams: BeamParams | None, fields: Mapping[str, Any]
) -> tuple[SamplingParams, BeamParams]:
    """Returns the params and beams of a search, from these records or from their fields as
    keywords (`beam_width` for the width).

    Raises InvalidRequest, also for settings of sampling such as top_p.
    """
    rest = {name: value for name, value in fields.items() if value is not None}
    beam_fields = {name: rest.pop(name) for name in _BEAM_FIELDS if name in rest}
    for name, record, kind, own in (
        ("params", params, SamplingParams, rest),
        ("beams", beams, BeamParams, beam_fields),
    ):
        if record is not None and own:
            raise InvalidRequest(f"give {name} or {', '.join(own)}, not both")
        if record is not None and not isinstance(record, kind):
            raise InvalidRequest(f"{name} must be {kind.__name__}, got {shown(record)}")
    if params is None:
        params = SamplingParams(**{"max_tokens": _MAX_TOKENS, **rest})
    default = SamplingParams()
    refused = [name for name in _REFUSED if getattr(params, name) != getattr(default, name)]
    if refused and (refused != ["temperature"] or params.temperature):
        raise InvalidRequest(f"a beam search does not sample: {', '.join(refused)} cannot be given")
    return replace(params, temperature=0.0), beams or BeamParams(
        **{_BEAM_FIELDS[name]: value for name, value in beam_fields.items()}
    )


def as_search(request: Request, beams: BeamParams, vocab_size: int) -> Request:
    """Returns `request` as a beam search. Raises InvalidRequest if the vocabulary is too small for
    the width: the first beam must have enough tokens for all of its children."""
    num_ends, params = len(request.end_ids), request.params
    if params.jumps_forward:
        raise InvalidRequest("a beam search cannot jump forward: its beams choose every token")
    if params.structured is not None and not num_ends:
        raise InvalidRequest(
            "a beam search with structured output needs an end token: ignore_eos cannot be given"
        )
    allowed = vocab_size
    if params.allowed_token_ids is not None:
        allowed = len(params.allowed_array)
    num_banned = len({word[-1] for word in request.bad_words_ids})
    room = allowed - num_banned - (num_ends if params.min_tokens else 0)
    most = room // max(2, 1 + num_ends)
    if beams.width > most:
        raise InvalidRequest(
            f"beam_width must be at most {max(0, most)} with {num_ends} end tokens among the "
            f"{allowed - num_banned} that may be generated, got {beams.width}"
        )
    return replace(request, beams=beams)


def stop_check(tokenizer: Tokenizer, stops: Sequence[str]) -> StopCheck:
    """Returns a function that tells whether one of `stops` ends in a token, given the tokens before
    it (prompt and output).

    As in transformers the string may begin in the prompt, and special tokens have the text of their
    names.
    """
    reach = max(len(stop.encode()) for stop in stops) + _CONTEXT  # tokens have a byte at least

    def is_stopped(before: IntArray, token_id: int) -> bool:
        ids = before[-reach:].tolist()
        old = tokenizer.decode(ids, keep_special=True)
        new = tokenizer.decode([*ids, token_id], keep_special=True)
        pairs = enumerate(zip(old, new, strict=False))
        same = next((index for index, (left, right) in pairs if left != right), len(old))
        return any(new.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in stops)

    return is_stopped


class BeamCollector(OutputCollector):
    """Collects the outputs of a beam search: one event, a tuple of Completions, best first."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, notify: Callable[[Event], None]
    ) -> None:
        super().__init__(request, tokenizer, notify, streams=False)
        self._tokenizer = tokenizer
        stops = tuple(request.params.stop)
        if stops and tokenizer is not None:
            self.is_stopped = stop_check(tokenizer, stops)
        self._best_ids: list[int] = []

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the best answer."""
        return self._best_ids

    def push(self, output: RequestOutput) -> bool:
        """Process the end of the search, which is its only output. Returns False."""
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
        """Returns the answers. The first one's usage counts the prompt, the others' count it as
        cached."""
        if not beams:  # aborted before its first step
            return (self._text_of(RequestOutput("", (), (), (), finish)),)
        completions = []
        for number, beam in enumerate(beams):
            usage = finish.usage.of_other_answer(len(beam.token_ids)) if number else finish.usage
            own = replace(finish, reason=beam.reason, usage=usage)
            output = RequestOutput("", tuple(beam.token_ids), beam.logprobs, beam.top_logprobs, own)
            total = math.fsum(beam.logprobs)
            completion = self._text_of(output)
            completions.append(replace(completion, score=beam.score, cumulative_logprob=total))
        return tuple(completions)

    def _text_of(self, output: RequestOutput) -> Completion:
        """Returns an answer with its text, as for a request that ended in one step."""
        # A stop string ends a beam at any length.
        request = replace(self.request, params=replace(self.request.params, min_tokens=0))
        events: list[Event] = []
        OutputCollector(request, self._tokenizer, events.append, streams=False).push(output)
        (completion,) = events
        assert isinstance(completion, Completion)
        return completion
