"""Scores: how likely the model finds given continuations of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from radixserve.api.client import EngineClient, RequestHandle
from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.completion import Completion, Score
from radixserve.errors import InvalidRequest
from radixserve.request import Request, SamplingParams
from radixserve.text.prompts import PromptReader

_FEW = 64  # candidates that are made into requests in the event loop


class ScoreQuery(NamedTuple):
    """Asks how likely each candidate, text or token ids, is after a prompt."""

    prompt: IntArray
    candidates: object  # not checked yet
    namespace: str


def score(client: EngineClient, queries: Sequence[ScoreQuery]) -> list[list[Score]]:
    """Returns the scores of each query's candidates. All candidates run as one batch.

    Raises InvalidRequest for wrong candidates, and if a score was aborted.
    """
    scores: list[list[Score]] = _submit(client, queries).get()
    return scores


async def ascore(client: EngineClient, queries: Sequence[ScoreQuery]) -> list[list[Score]]:
    """`score` for asyncio. Cancelling the task aborts it."""
    given = [query.candidates for query in queries if isinstance(query.candidates, Sequence)]
    if sum(map(len, given)) <= _FEW:
        handle = _submit(client, queries)
    else:  # so that the event loop goes on meanwhile
        handle = await asyncio.to_thread(_submit, client, queries)
    scores: list[list[Score]] = await handle.aget()
    return scores


def _submit(client: EngineClient, queries: Sequence[ScoreQuery]) -> RequestHandle[Completion]:
    targets = [_read_candidates(client.reader, *query[:2]) for query in queries]
    requests = [
        request
        for query, candidates in zip(queries, targets, strict=True)
        for request in _requests(client, query, candidates)
    ]

    def finish(completions: list[Completion]) -> list[list[Score]]:
        if any(completion.finish_reason == "abort" for completion in completions):
            raise InvalidRequest("the score was aborted")
        rest = iter(completions)
        return [[_as_score(next(rest), ids) for ids in candidates] for candidates in targets]

    return client.submit(requests, finish)


def _read_candidates(reader: PromptReader, prompt: IntArray, candidates: object) -> list[IntArray]:
    """Returns the token ids of each candidate. Raises InvalidRequest for an empty or too long
    one."""
    if not isinstance(candidates, Sequence) or isinstance(candidates, str) or not candidates:
        raise InvalidRequest(
            f"candidates must be a list of texts or lists of token ids, got {shown(candidates)}"
        )
    if not len(prompt):
        raise InvalidRequest("a score needs a prompt of at least one token")
    targets = [reader.read_more(candidate) for candidate in candidates]
    for ids, candidate in zip(targets, candidates, strict=True):
        if not len(ids):
            raise InvalidRequest(f"a candidate has no tokens: {shown(candidate)}")
        if reader.pictures_in(ids):
            raise InvalidRequest("a candidate has rows of a picture, which no model generates")
        if len(prompt) + len(ids) > reader.max_seq_len:
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens and a candidate of {len(ids)} are together "
                f"longer than the {reader.max_seq_len} allowed ({reader.limit_name})"
            )
    return targets


def _requests(
    client: EngineClient, query: ScoreQuery, candidates: Sequence[IntArray]
) -> Iterator[Request]:
    """Yields the requests that score the candidates after the query's prompt. The K/V of a last
    token is not computed."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, namespace=query.namespace)
    for targets in candidates:
        tokens = np.concatenate([query.prompt, targets[:-1]])
        request = client.builder.request(query.prompt, params)
        yield replace(request, token_ids=tokens, logprob_targets=targets)


def _as_score(completion: Completion, targets: IntArray) -> Score:
    assert completion.logprobs is not None
    assert completion.cumulative_logprob is not None
    total = completion.cumulative_logprob
    return Score(total, completion.logprobs, targets.tolist(), completion.usage)
