"""Scores: how likely the model finds given continuations of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.output import Completion, Score
from radixserve.request import Request, SamplingParams
from radixserve.text.prompts import PromptReader

SCORING = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)


class ScoreJob(NamedTuple):
    """How likely is each candidate, text or token ids, behind this prompt?"""

    prompt: IntArray
    candidates: object  # not checked yet
    namespace: str


def read_candidates(reader: PromptReader, prompt: IntArray, candidates: object) -> list[IntArray]:
    """Token ids of each continuation. Raises InvalidRequest for an empty or too long one."""
    if not isinstance(candidates, Sequence) or isinstance(candidates, str) or not candidates:
        raise InvalidRequest(
            f"candidates must be a list of texts or lists of token ids, got {shown(candidates)}"
        )
    if not len(prompt):
        raise InvalidRequest("a score needs a prompt of at least one token")
    found = [reader.read_more(candidate) for candidate in candidates]
    for ids, candidate in zip(found, candidates, strict=True):
        if not len(ids):
            raise InvalidRequest(f"a candidate has no tokens: {shown(candidate)}")
        if len(prompt) + len(ids) > reader.max_seq_len:
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens and a candidate of {len(ids)} are together "
                f"longer than the {reader.max_seq_len} allowed ({reader.limit_name})"
            )
    return found


def scoring(request: Request, targets: IntArray) -> Request:
    """`request`, for a prompt, as one that scores what follows it. The last token of that is only
    looked at, never computed."""
    tokens = np.concatenate([request.token_ids, targets[:-1]])
    return replace(request, token_ids=tokens, logprob_targets=targets)


def as_score(completion: Completion, targets: IntArray) -> Score:
    logprobs, total = completion.logprobs, completion.cumulative_logprob
    assert logprobs is not None
    assert total is not None
    return Score(total, logprobs, targets.tolist(), completion.usage)


def check_finished(completions: Sequence[Completion]) -> None:
    """Raises InvalidRequest when somebody aborted a score: half of one says nothing."""
    if any(one.finish_reason == "abort" for one in completions):
        raise InvalidRequest("the score was aborted")


def params_of(namespace: str) -> SamplingParams:
    return replace(SCORING, namespace=namespace)
