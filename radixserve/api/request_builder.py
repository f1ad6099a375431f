"""`RequestBuilder`: what callers pass, as checked `Request`s."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from radixserve.api.beam_search import as_search
from radixserve.api.samples import check_single, fan_out
from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.grammar.compiler import GrammarCompiler
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.chat_options import ChatOptions
from radixserve.text.prompts import Prompt, PromptReader

_OWN_ID = "#"  # begins the request ids that no caller gave


class RequestBuilder:
    """Checks prompts and parameters against the model. May be used from any thread.

    Everything raises InvalidRequest, before anything is queued or allocated.
    """

    def __init__(self, reader: PromptReader, end_ids: frozenset[int], seed: int) -> None:
        """`end_ids`: the model's. `seed`: of the seeds of requests that bring none."""
        self.reader = reader
        self.grammars = GrammarCompiler(reader.backend_tokenizer)
        self.end_ids = end_ids
        self._random = random.Random(seed)
        self._random_lock = threading.Lock()
        self._next_id = itertools.count()

    def build(
        self,
        prompts: Sequence[Prompt],
        params: object,
        request_id: str | None = None,
        options: ChatOptions | None = None,
        *,
        is_batch: bool = False,
    ) -> tuple[list[Request], list[SamplingParams]]:
        """The requests, `num_samples` of them a prompt, and the params of each prompt.

        `options`: of chat messages. `is_batch`: an error names the index of its prompt.
        """
        each = params_for(params, len(prompts))
        _check_request_id(request_id, sum(one.num_samples for one in each))
        requests: list[Request] = []
        for at, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                self._check(one)
                room = self._prompt_room(one)
                ids = self.reader.read(prompt, keep_last=room, options=options)
                first = self.request(ids, one, request_id)
            except InvalidRequest as error:
                if not is_batch:
                    raise
                raise InvalidRequest(f"prompt {at}: {error}") from error.__cause__
            requests += fan_out(first, [self._new_id() for _ in range(one.num_samples - 1)])
        return requests, each

    def single(
        self,
        prompt: Prompt,
        params: object,
        request_id: str | None = None,
        options: ChatOptions | None = None,
    ) -> Request:
        """The request of a stream or a branch: with one completion."""
        (request, *_), (one,) = self.build([prompt], params, request_id, options)
        check_single(one, "stream")
        return request

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        beams: BeamParams,
        request_id: str | None,
        *,
        is_batch: bool = False,
    ) -> list[Request]:
        """A request a prompt."""
        vocab_size = self.reader.vocab_size
        requests, _ = self.build(prompts, params, request_id, is_batch=is_batch)
        return [as_search(request, beams, vocab_size) for request in requests]

    def request(
        self, ids: IntArray, params: SamplingParams, request_id: str | None = None
    ) -> Request:
        """The request for one completion, of checked ids and params."""
        seed = params.seed
        if seed is None:
            with self._random_lock:
                seed = self._random.getrandbits(63)
        scores_prompt = params.prompt_logprobs is not None and len(ids) > 1
        return Request(
            request_id=request_id or self._new_id(),
            token_ids=ids,
            params=params,
            seed=seed,
            end_ids=self._end_ids(params),
            max_len=self.reader.max_seq_len,
            logprob_targets=ids[1:] if scores_prompt else None,
            also_generate=scores_prompt,
            bad_words_ids=self._bad_words_ids(params.bad_words),
            grammar=None
            if params.structured_output is None
            else self.grammars.compile(params.structured_output),
        )

    def _check(self, params: SamplingParams) -> None:
        vocab_size = self.reader.vocab_size
        if params.structured_output is not None and params.structured_output.jump_forward:
            for name in ("logprobs", "stop", "best_of"):
                if getattr(params, name) not in (None, ()):
                    raise InvalidRequest(f"{name} cannot be given with jump_forward")
        if params.stop and self.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: stop strings cannot be found")
        if params.min_tokens and len(self._end_ids(params)) >= vocab_size:
            raise InvalidRequest("min_tokens cannot hold when every token ends the request")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token for token in getattr(params, name) or () if token >= vocab_size]
            if outside:
                raise InvalidRequest(
                    f"{name} {shown(outside)} are out of range: allowed are 0 to {vocab_size - 1}"
                )

    def _prompt_room(self, params: SamplingParams) -> int | None:
        """How many of the prompt's last tokens are taken; None: all."""
        wanted = params.truncate_prompt_tokens
        if wanted != -1:
            return wanted
        room = self.reader.max_seq_len - params.max_tokens
        if room < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens=-1 leaves no prompt: max_tokens is {params.max_tokens} of "
                f"{self.reader.max_seq_len} ({self.reader.limit_name})"
            )
        return room

    def _bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and, where that begins with another
        token and is as long, after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if self.reader.tokenizer is None:
                raise InvalidRequest("the model has no tokenizer: bad_words cannot be found")
            encode = self.reader.tokenizer.encode_more
            first, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
            for ids in (first, spaced):
                if ids and (ids is first or (len(ids) == len(first) and ids[0] != first[0])):
                    found[tuple(ids)] = None
            if not first:
                raise InvalidRequest(f"bad_words: {shown(word)} has no tokens")
        return tuple(found)

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request: the model's, unless ignored, and its own."""
        model_ends = frozenset[int]() if params.ignore_eos else self.end_ids
        return model_ends | frozenset(params.stop_token_ids)

    def _new_id(self) -> str:
        return f"{_OWN_ID}{next(self._next_id)}"


def check_params(params: Any, *, default: SamplingParams | None = None) -> SamplingParams:
    """`params`, or the default where they are None. Raises InvalidRequest for other things."""
    if params is None:
        return SamplingParams() if default is None else default
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}")
    return params


def params_for(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, from one for all or a list of as many."""
    if isinstance(params, list | tuple) and all(isinstance(p, SamplingParams) for p in params):
        if len(params) == count:
            return list(params)
        raise InvalidRequest(f"{len(params)} SamplingParams for {count} prompts: one each, or one")
    if params is None or isinstance(params, SamplingParams):
        return [check_params(params)] * count
    raise InvalidRequest(f"params must be SamplingParams or a list of them, got {shown(params)}")


def _check_request_id(request_id: object, num_requests: int) -> None:
    if request_id is None:
        return
    if num_requests != 1:
        raise InvalidRequest(
            "request_id names a single request, not a list of prompts, and not n > 1"
        )
    if not isinstance(request_id, str) or not request_id or request_id.startswith(_OWN_ID):
        raise InvalidRequest(
            f"request_id must be a non-empty string that does not begin with {_OWN_ID!r}, "
            f"got {shown(request_id)}"
        )


def sequence_limit(config: EngineConfig, model: Any, capacity: int) -> tuple[int, str]:
    """Most tokens of prompt and output together, and the name of that limit."""
    limits = [(model.max_positions, "the model's context"), (capacity, "the cache's size")]
    if config.max_seq_len is not None:
        if config.max_seq_len > model.max_positions:
            raise InvalidRequest(
                f"max_seq_len must be at most the model's {model.max_positions} positions, "
                f"got {config.max_seq_len}"
            )
        limits.append((config.max_seq_len, "max_seq_len"))
    limit, name = min(limits)
    if limit < 2:
        raise InvalidRequest(f"{name} leaves room for {limit} tokens; at least 2 are needed")
    return limit, name
