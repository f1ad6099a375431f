"""`RequestBuilder`: checks callers' arguments and builds `Request`s."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from radixserve.adapters.table import AdapterTable
from radixserve.api.beam_search import as_search
from radixserve.arrays import IntArray
from radixserve.cache.namespace import as_namespace
from radixserve.checks import shown
from radixserve.completion import Completion
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.grammar.compiler import GrammarCompiler
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.sampling_defaults import SamplingDefault
from radixserve.sampling_fields import NEUTRAL
from radixserve.text.chat_options import ChatOptions
from radixserve.text.prompts import Prompt, PromptReader
from radixserve.text.turn_marks import turn_marks, turn_starts
from radixserve.token_marks import with_placeholders

NUM_SEEDS = 2**63


def fan_out(request: Request, ids: Sequence[str]) -> list[Request]:
    """Returns `request` as `params.num_samples` requests for one completion each. `ids`: the
    request ids of all but the first.

    In-batch prefix sharing computes their prompt once. Request i samples the same tokens as a
    separate request with the seed + i (modulo 2**63).
    """
    params = request.params
    if params.num_samples == 1:
        return [request]
    # Their sum is reported, and ranks the samples of best_of.
    logprobs: int | None = params.logprobs or 0
    if params.jumps_forward and params.best_of is None:
        logprobs = params.logprobs  # forced tokens need no logits where none are asked for
    first = replace(request, params=replace(params, n=1, best_of=None, logprobs=logprobs))
    if not ids:
        return [first]
    second = sample_of(first, replace(first, request_id=ids[0]), 1)
    others = [
        replace(second, request_id=request_id, seed=(first.seed + number) % NUM_SEEDS)
        for number, request_id in enumerate(ids, 1)
    ]
    return [first, *others]


def sample_of(first: Request, request: Request, number: int) -> Request:
    """Returns `request`, which has the prompt and params of `first`, as sample `number` of that
    prompt. It does not score the prompt: `with_prompt_scores` copies the scores of the first
    sample.
    """
    params = request.params
    if params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None, logprob_start_len=0)
    return replace(
        request,
        params=params,
        seed=(first.seed + number) % NUM_SEEDS,
        logprob_targets=None,
        also_generate=False,
    )


def with_prompt_scores(completion: Completion, first: Completion) -> Completion:
    """Returns `completion` with the prompt's log-probabilities from `first`."""
    return replace(
        completion,
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
        prompt_ranks=first.prompt_ranks,
    )


def gather(
    completions: Sequence[Completion], params: Sequence[SamplingParams]
) -> list[Completion | list[Completion]]:
    """Returns one entry per prompt from the completions of all requests: a Completion, or a list if
    its n > 1."""
    rest = iter(completions)
    entries: list[Completion | list[Completion]] = []
    for own_params in params:
        mine = list(islice(rest, own_params.num_samples))
        if own_params.prompt_logprobs is not None:
            first, *others = mine
            mine = [first, *(with_prompt_scores(completion, first) for completion in others)]
        if own_params.num_samples > own_params.n:
            mine = _best(mine, own_params.n)
        if own_params.logprobs is None and own_params.num_samples > 1:
            mine = [replace(completion, logprobs=None, top_logprobs=None) for completion in mine]
        entries.append(mine if own_params.n > 1 else mine[0])
    return entries


def _best(completions: list[Completion], count: int) -> list[Completion]:
    """Returns the `count` most likely completions, best first, aborted ones last. The usage of the
    best one counts the prompt, which the first sample computed."""
    ranked = sorted(  # stable
        completions, key=lambda c: (c.finish_reason == "abort", -(c.cumulative_logprob or 0.0))
    )
    paid, best = completions[0], ranked[0]
    usages = {
        id(sample): sample.usage.with_prompt_of(other.usage)
        for sample, other in ((paid, best), (best, paid))
    }
    return [
        replace(completion, usage=usages.get(id(completion), completion.usage))
        for completion in ranked[:count]
    ]


def check_single(params: SamplingParams, what: str) -> None:
    """Raises InvalidRequest where `what` takes one completion only."""
    if params.num_samples > 1:
        raise InvalidRequest(
            f"{what} takes n=1 and no best_of, got n={params.n}, best_of={params.best_of}"
        )


_OWN_ID = "#"  # begins the request ids that the builder makes


MakeRequest = Callable[..., Request]  # `Request` with the fields that follow from the params


class RequestBuilder:
    """Checks prompts and parameters against the model and builds requests. May be used from any
    thread. All methods raise InvalidRequest, before anything is queued or allocated.
    """

    def __init__(
        self,
        reader: PromptReader,
        end_ids: frozenset[int],
        seed: int,
        sampling_defaults: Mapping[str, SamplingDefault],
        *,
        keeps_guidance_options: bool = False,
        marks_turns: bool = False,
        adapters: AdapterTable | None = None,
        trace_headers: Callable[[], Mapping[str, str] | None] = lambda: None,
    ) -> None:
        """`end_ids`: the model's end tokens. `seed`: from which requests without a seed draw
        theirs. `sampling_defaults`: of fields that params leave out. `keeps_guidance_options`: as
        in EngineConfig.allow_guidance_options. `marks_turns`: whether requests name their
        `turn_starts`. `adapters`: those that requests may name. `trace_headers`: returns the W3C
        trace context of the caller."""
        self._trace_headers = trace_headers
        self.reader = reader
        self.adapters = AdapterTable() if adapters is None else adapters
        self.grammars = GrammarCompiler(
            reader.backend_tokenizer, keeps_options=keeps_guidance_options
        )
        self.end_ids = end_ids
        self.sampling_defaults = dict(sampling_defaults)
        values: dict[str, Any] = {
            name: default.value for name, default in sampling_defaults.items()
        }
        self.default_params = SamplingParams(**values)
        self._turn_marks = turn_marks(reader.tokenizer, end_ids) if marks_turns else frozenset()
        self._random = random.Random(seed)
        self._random_lock = threading.Lock()
        self._next_id = itertools.count()

    def set_defaults(self, params: SamplingParams, given: Iterable[str]) -> None:
        """Use `params` for calls without params, and their sampling fields in `given` as defaults
        of the others."""
        self.default_params = params
        for name in NEUTRAL.keys() & set(given):
            default = SamplingDefault(getattr(params, name), "set_default_sampling_params")
            self.sampling_defaults[name] = default

    def params(self, params: Any) -> SamplingParams:
        """Returns the params of a call: `params`, with the defaults of fields that they leave out,
        or all defaults for None. Their namespace names their adapter. Raises InvalidRequest for
        other types."""
        if params is None:
            return self.adapters.resolve(self.default_params)
        return self.adapters.resolve(check_params(params).with_defaults(self.default_params))

    def params_for(self, params: Any, count: int) -> list[SamplingParams]:
        """Returns the params of `count` prompts, from one for all or a list. Raises
        InvalidRequest."""
        if not isinstance(params, list | tuple):
            return [self.params(params)] * count
        if len(params) != count:
            raise InvalidRequest(
                f"{len(params)} SamplingParams for {count} prompts: one each, or one"
            )
        distinct = {id(own): own for own in params}
        full = {
            key: self.adapters.resolve(check_params(own).with_defaults(self.default_params))
            for key, own in distinct.items()
        }
        return [full[id(own)] for own in params]

    def build(
        self,
        prompts: Sequence[Prompt],
        params: object,
        request_id: str | None = None,
        options: ChatOptions | None = None,
        *,
        is_batch: bool = False,
    ) -> tuple[list[Request], list[SamplingParams]]:
        """Returns the requests, `num_samples` per prompt, and the params of each prompt.

        `options`: for chat messages. `is_batch`: an error names the index of its prompt.
        """
        each = self.params_for(params, len(prompts))
        requests = self._build(prompts, each, request_id, options, is_batch=is_batch)
        return requests, each

    def _build(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[SamplingParams],
        request_id: str | None,
        options: ChatOptions | None = None,
        *,
        is_batch: bool,
    ) -> list[Request]:
        """`build` with the params of each prompt."""
        _check_request_id(request_id, sum(own_params.num_samples for own_params in each))
        requests: list[Request] = []
        makers: dict[int, MakeRequest] = {}  # by identity: many prompts share their params
        for index, (prompt, own_params) in enumerate(zip(prompts, each, strict=True)):
            try:
                make = makers.get(id(own_params))
                if make is None:
                    make = makers[id(own_params)] = self._maker(own_params)
                room = self._prompt_room(own_params)
                ids = self.reader.read(
                    prompt,
                    keep_last=room,
                    truncation_side=own_params.truncation_side,
                    options=options,
                )
                first = self._request(ids, own_params, request_id, make)
            except InvalidRequest as error:
                if not is_batch:
                    raise
                raise InvalidRequest(f"prompt {index}: {error}") from error.__cause__
            requests += fan_out(first, [self._new_id() for _ in range(own_params.num_samples - 1)])
        return requests

    def single(
        self,
        prompt: Prompt,
        params: object,
        request_id: str | None = None,
        options: ChatOptions | None = None,
    ) -> Request:
        """Returns the request of a stream or a branch, for one completion."""
        (request, *_), (own_params,) = self.build([prompt], params, request_id, options)
        check_single(own_params, "stream")
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
        """Returns the request of each prompt's beam search, to which no sampling defaults apply."""
        vocab_size = self.reader.vocab_size
        each = [self.adapters.resolve(params)] * len(prompts)
        requests = self._build(prompts, each, request_id, is_batch=is_batch)
        return [as_search(request, beams, vocab_size) for request in requests]

    def request(
        self, ids: IntArray, params: SamplingParams, request_id: str | None = None
    ) -> Request:
        """Returns the request for one completion, of checked ids and params."""
        return self._request(ids, params, request_id, self._maker(params))

    def _request(
        self, ids: IntArray, params: SamplingParams, request_id: str | None, make: MakeRequest
    ) -> Request:
        seed = None if params.seed is None else params.seed % NUM_SEEDS
        if seed is None:
            with self._random_lock:
                seed = self._random.getrandbits(63)
        pictures = self.reader.pictures_in(ids)
        if pictures:
            self.reader.check_senders(pictures, as_namespace(params.namespace).tenant)
        first = 1 + params.logprob_start_len
        scores_prompt = params.prompt_logprobs is not None and len(ids) > first
        if params.namespace.startswith("\0"):  # of an adapter
            place, adapter = self.adapters.use(as_namespace(params.namespace), ids)
            make = partial(make, params=replace(params, namespace=str(place)), adapter=adapter)
            if adapter is not None and adapter.mark and pictures:
                self._check_activated(ids[adapter.start :])
        request = make(
            request_id=request_id or self._new_id(),
            token_ids=ids,
            seed=seed,
            max_len=self.reader.max_seq_len,
            logprob_targets=ids[first:] if scores_prompt else None,
            also_generate=scores_prompt,
            turn_starts=turn_starts(ids, self._turn_marks),
            trace_headers=self._trace_headers(),
            pictures=pictures,
            uncut=self.reader.uncut_parts(ids, pictures),
        )
        if not pictures or request.logprob_targets is None:
            return request
        targets = with_placeholders(request.logprob_targets, pictures[0].placeholder_id)
        return replace(request, logprob_targets=targets)

    def _check_activated(self, ids: IntArray) -> None:
        """Raise InvalidRequest if an activated adapter would compute rows of pictures."""
        if self.reader.pictures_in(ids):
            raise InvalidRequest(
                "pictures after the invocation of an activated adapter are not built"
            )

    def _maker(self, params: SamplingParams) -> MakeRequest:
        """Returns a maker of requests with the fields that all requests of the same params share.
        Raises InvalidRequest."""
        self._check(params)
        structured = params.structured_outputs
        return partial(
            Request,
            params=params,
            end_ids=self._end_ids(params),
            bad_words_ids=self._bad_words_ids(params.bad_words),
            grammar=None if structured is None else self.grammars.compile(structured),
            prediction=self._prediction(params.prediction),
        )

    def _check(self, params: SamplingParams) -> None:
        vocab_size = self.reader.vocab_size
        if params.stop and self.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: stop strings cannot be found")
        if params.min_tokens and len(self._end_ids(params)) >= vocab_size:
            raise InvalidRequest("min_tokens cannot hold when every token ends the request")
        names = "stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"
        for name in names if isinstance(params.prediction, str) else (*names, "prediction"):
            tokens = getattr(params, name) or ()
            if tokens and max(tokens) >= vocab_size:
                outside = [token for token in tokens if token >= vocab_size]
                raise InvalidRequest(
                    f"{name} {shown(outside)} are out of range: allowed are 0 to {vocab_size - 1}"
                )

    def _prompt_room(self, params: SamplingParams) -> int | None:
        """Returns how many tokens of the prompt are used; None: all."""
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

    def _prediction(self, text: str | Iterable[int] | None) -> IntArray | None:
        if isinstance(text, str):
            if self.reader.tokenizer is None:
                raise InvalidRequest("the model has no tokenizer: give a prediction as token ids")
            text = self.reader.tokenizer.encode_more(text)
        return None if text is None else np.array(tuple(text), np.int32)

    def _bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token ids of each word at the start of a text, and of the word after a space
        if these begin with another token and are as many."""
        sequences: dict[tuple[int, ...], None] = {}
        bare = list(dict.fromkeys(word.lstrip() for word in words))
        if not bare:
            return ()
        if self.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: bad_words cannot be found")
        encode = self.reader.tokenizer.encode_each
        pairs = zip(bare, encode(bare), encode([f" {word}" for word in bare]), strict=True)
        for word, first, spaced in pairs:
            for ids in (first, spaced):
                if ids and (ids is first or (len(ids) == len(first) and ids[0] != first[0])):
                    sequences[tuple(ids)] = None
            if not first:
                raise InvalidRequest(f"bad_words: {shown(word)} has no tokens")
        return tuple(sequences)

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a request: the model's, unless ignored, and its own."""
        model_ends = frozenset[int]() if params.ignore_eos else self.end_ids
        return model_ends | frozenset(params.stop_token_ids)

    def _new_id(self) -> str:
        return f"{_OWN_ID}{next(self._next_id)}"


def check_params(params: Any) -> SamplingParams:
    """Returns `params` if they are SamplingParams. Raises InvalidRequest."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}")
    return params


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
    """Returns the most tokens of prompt and output together, and the name of that limit. Raises
    InvalidRequest."""
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
