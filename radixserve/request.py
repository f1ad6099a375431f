"""`SamplingParams`, a caller's settings for an answer, and `Request`, which the engine queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.cache.lookup import Lookup
from radixserve.cache.namespace import Namespace, as_namespace
from radixserve.checks import StrictFields, check_choice, check_float, check_int, check_text, shown
from radixserve.errors import InvalidRequest
from radixserve.sampling_fields import NEUTRAL, NotGivenFloat, NotGivenInt, check_field
from radixserve.structured_outputs import Grammar, StructuredOutput, as_structured_output

TruncationSide = Literal["left", "right"]
MAX_LOGPROBS = 2**20  # more than any vocabulary; each step returns at most the vocabulary
MAX_LOGPROB_IDS = 1_024
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1_024
MAX_LOGIT_BIAS = 100.0
MAX_SAMPLES = 1_024  # of one prompt
MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 10.0
LEAST_PRIORITY = -(2**31)  # the priority of prefetches
MAX_TOKEN_IDS = 1 << 20  # token ids of a vocabulary; the cache has numbers above for `AdapterUse`
FIRST_PICTURE_ID = 1 << 30  # token ids from here on are rows of a `Picture`

_NOT_GIVEN = (NotGivenFloat, NotGivenInt)


class AdapterUse(NamedTuple):
    """The adapter that computes a request's tokens.

    An activated adapter computes those from `start` on, and the model the ones before, whose K/V is
    that of the model alone. They share a namespace of the cache, which has the adapter's tokens
    with a mark: no other sequence has the same.
    """

    number: int  # of the adapter in the runner
    start: int = 0  # position of its first token
    mark: int = 0  # of an activated adapter, 1 to 1,023; 0: of another one

    @property
    def token_mark(self) -> int:
        """What the cache adds to the ids of its tokens."""
        return self.mark * MAX_TOKEN_IDS


# (output ids, logits [V] float32) or (prompt ids, output ids, logits) -> logits
LogitsProcessor = Callable[..., Any]

# (tokens of prompt and output, [n] int32; the next token) -> whether a stop string ends in it
StopCheck = Callable[[IntArray, int], bool]


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams(StrictFields):
    """How a request's tokens are sampled and when it ends. Raises InvalidRequest when made.

    temperature, top_k, top_p, min_p and repetition_penalty that are left out are the model's, see
    `Runtime.sampling_defaults`; neutral where it has none.

    max_tokens            most tokens to generate
    min_tokens            number of tokens before which end tokens and stop strings are ignored
    temperature           0 is greedy; else 1e-5 to 100
    top_k                 keep the k most likely tokens; 0 or -1 keeps all
    top_p                 keep the smallest set of tokens with at least this probability
    min_p                 drop tokens less likely than min_p times the most likely one
    repetition_penalty    divides (positive) or multiplies (negative) logits of tokens seen in
                          prompt or output; 0.01 to 100, 1 is off
    presence_penalty      subtracted once from the logit of a token in the output
    frequency_penalty     subtracted for each occurrence in the output
    logit_bias            {token id: number added to its logit, -100 to 100}
    allowed_token_ids     the only tokens that may be sampled; None: all
    bad_words             strings that are not generated. Each is tokenised with and without a
                          space before it; its last token is forbidden after the others
    structured            the constraint on the answer: a StructuredOutput or its fields, such
                          as {"regex": "[0-9]+"}. Tokens that cannot continue the answer are
                          forbidden after all other changes. Where the answer may end, end tokens
                          may be sampled. It ends, with finish_reason "stop", when no token can
                          follow, also before min_tokens
    logits_processors     Python functions f(output ids, logits) -> logits, or f(prompt ids, output
                          ids, logits), called in order before all other changes; logits are a
                          float32 tensor [vocabulary]. Slow: each call stops all other requests, and
                          on a device no step is prepared ahead. They must not call the Runtime. An
                          exception ends its request only
    stop                  string or strings that end the text; they are not part of it
    include_stop_str_in_output  leave the stop string, or the end token's text, in the text
    stop_token_ids        token ids that end the answer, besides the model's own end tokens
    ignore_eos            continue after the model's end tokens
    seed                  seed of the request's random stream: the same seed gives the same answer,
                          whatever runs in the same batch if answers are exact (docs/exactness.md)
    n                     completions per prompt, which is computed once; each has its own random
                          stream
    best_of               number of completions to sample; the n with the highest cumulative
                          log-probability are returned
    logprobs              number of best tokens to report besides the sampled one; None: no
                          log-probabilities
    logprob_token_ids     tokens to report in place of the best ones: top_logprobs has these, in
                          this order; None: the best ones
    prompt_logprobs       number of best tokens to report besides each token of the prompt; None: no
                          log-probabilities. They are kept in the cache beside the tokens, where
                          later requests find them
    logprob_start_len     with prompt_logprobs: the tokens after this position of the prompt have
                          log-probabilities. 0: all but the first, which has none. Tokens before are
                          taken from the cache like those of any prompt
    skip_special_tokens   leave special tokens out of the text
    keep_special_ids      special tokens that stay in the text nevertheless
    truncate_prompt_tokens  number of the prompt's last tokens to use; -1: as many as leave room for
                          max_tokens; None: all
    truncation_side       the side of the prompt that is cut off: "left", or "right" to use its
                          first tokens
    priority              requests with a higher priority are admitted before the others of their
                          tenant
    adapter               name of the loaded adapter that computes the request; "": none does
    namespace             "TENANT" or "TENANT/SALT": requests of different namespaces share no
                          cache, and tenants share the engine's time
    prediction            the expected answer, or a text with many of its parts, such as a file
                          before an edit: text or token ids. Parts that the answer repeats are
                          computed several tokens a step. The answer does not depend on it
    digest                report a hash of each token's logits, as logits_processors get them, to
                          compare answers bit by bit
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = NotGivenFloat(NEUTRAL["temperature"])
    top_k: int = NotGivenInt(NEUTRAL["top_k"])
    top_p: float = NotGivenFloat(NEUTRAL["top_p"])
    min_p: float = NotGivenFloat(NEUTRAL["min_p"])
    repetition_penalty: float = NotGivenFloat(NEUTRAL["repetition_penalty"])
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] = ()
    structured: StructuredOutput | Mapping[str, Any] | None = None
    logits_processors: Iterable[LogitsProcessor] = field(default=(), hash=False)
    stop: str | Iterable[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Iterable[int] | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    skip_special_tokens: bool = True
    keep_special_ids: Iterable[int] = ()
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "left"
    priority: int = 0
    adapter: str = ""
    namespace: str = ""
    prediction: str | Iterable[int] | None = field(default=None, hash=False)
    digest: bool = False

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        self._check_ints(
            max_tokens=(1, None),
            seed=(-(2**63), 2**63 - 1),
            n=(1, MAX_SAMPLES),
            logprobs=(0, MAX_LOGPROBS),
            prompt_logprobs=(0, MAX_LOGPROBS),
            logprob_start_len=(0, None),
            truncate_prompt_tokens=(-1, None),
            priority=(LEAST_PRIORITY, 2**31 - 1),
        )
        self._check_ints(min_tokens=(0, self.max_tokens), best_of=(self.n, MAX_SAMPLES))
        self._check_floats(presence_penalty=(-2.0, 2.0), frequency_penalty=(-2.0, 2.0))
        for name in NEUTRAL:
            value = getattr(self, name)
            if not isinstance(value, _NOT_GIVEN):
                put(name, check_field(name, value))
        if self.logprob_start_len and self.prompt_logprobs is None:
            raise InvalidRequest("logprob_start_len needs prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be None, -1 or >= 1, got 0")
        check_choice("truncation_side", self.truncation_side, get_args(TruncationSide))
        put("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise InvalidRequest("allowed_token_ids must name a token at least; None: all")
            put("allowed_token_ids", tuple(dict.fromkeys(ids)))
        if self.logprob_token_ids is not None:
            put("logprob_token_ids", self._read_logprob_token_ids())
            put("logprobs", 0)
        put("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        if self.structured is not None:
            put("structured", as_structured_output(self.structured))
        put("logits_processors", _processors(self.logits_processors))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", _strings("stop", stop, MAX_STOP_STRINGS))
        put("prediction", _prediction(self.prediction))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put("keep_special_ids", _token_ids("keep_special_ids", self.keep_special_ids))
        self._check_bools(
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "digest"
        )
        check_text("adapter", self.adapter)
        check_text("namespace", self.namespace)

    def _read_logprob_token_ids(self) -> tuple[int, ...]:
        name = "logprob_token_ids"
        ids = tuple(dict.fromkeys(_token_ids(name, self.logprob_token_ids)))
        if not 1 <= len(ids) <= MAX_LOGPROB_IDS:
            raise InvalidRequest(f"{name} must name 1 to {MAX_LOGPROB_IDS} tokens, got {len(ids)}")
        if self.logprobs:
            raise InvalidRequest(f"{name} and logprobs={self.logprobs} exclude each other")
        return ids

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Returns these params with the sampling fields that were left out from `defaults`."""
        left_out = {
            name: getattr(defaults, name)
            for name in NEUTRAL
            if isinstance(value := getattr(self, name), _NOT_GIVEN)
            and value != getattr(defaults, name)
        }
        return replace(self, **left_out) if left_out else self

    @property
    def has_top_logprobs(self) -> bool:
        """Whether other tokens are reported besides each one sampled."""
        return bool(self.logprobs) or self.logprob_token_ids is not None

    @property
    def num_samples(self) -> int:
        """Number of requests that a prompt becomes."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def is_greedy_only(self) -> bool:
        """Whether the best logit decides and no other setting or earlier token matters."""
        return self.takes_best and self.structured is None

    @cached_property
    def takes_best(self) -> bool:
        """Whether sampling is the argmax over the tokens that the grammar allows."""
        return self.is_greedy and self.logprobs is None and not self._changes_more

    @cached_property
    def is_temperature_only(self) -> bool:
        """Whether tokens are sampled by temperature (or the best one at 0) among those that the
        structured output allows, without other settings."""
        has_filter = self.min_p > 0 or self.top_p < 1 or self.top_k > 0
        is_free = self.logprobs is None and not self._changes_more
        return is_free and (self.is_greedy or not has_filter)

    @property
    def structured_outputs(self) -> StructuredOutput | None:
        """`structured` as a record."""
        assert not isinstance(self.structured, Mapping)
        return self.structured

    @property
    def jumps_forward(self) -> bool:
        """Whether `structured` has jump_forward."""
        return self.structured_outputs is not None and self.structured_outputs.jump_forward

    @property
    def may_forbid_tokens(self) -> bool:
        """Whether settings besides the structured output may allow none of its tokens."""
        has_words = bool(self.bad_words) or self.allowed_token_ids is not None
        return has_words or bool(self.logits_processors)

    @property
    def changes_logits(self) -> bool:
        return self.structured is not None or self._changes_more

    @property
    def _changes_more(self) -> bool:
        """Whether settings besides the structured output change logits."""
        return (
            self.has_penalty
            or self.allowed_token_ids is not None
            or bool(self.logit_bias or self.bad_words or self.logits_processors)
        )

    @property
    def has_penalty(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @cached_property
    def bias_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[k] token ids, and [k] the numbers added to their logits."""
        bias = self.logit_bias or {}
        return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)

    @cached_property
    def allowed_array(self) -> NDArray[np.int64]:
        """[k] ids of the tokens that may be sampled; empty: all."""
        return np.array(self.allowed_token_ids or (), np.int64)


def _several(name: str, value: object, what: str) -> tuple[Any, ...]:
    """Returns the items of an iterable that is not a string or a mapping; none for None. Raises
    InvalidRequest."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return tuple(value)
    raise InvalidRequest(f"{name} must be {what}, got {shown(value)}")


def _strings(name: str, value: object, most: int) -> tuple[str, ...]:
    what = "a non-empty string or several" if name == "stop" else "a list of non-empty strings"
    strings = _several(name, value, what)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"{name} must be {what}, got {shown(value)}")
        check_text(name, string)
    if len(strings) > most:
        raise InvalidRequest(f"{name} takes at most {most} strings, got {len(strings)}")
    return tuple(map(str, strings))


def _prediction(value: object) -> str | tuple[int, ...] | None:
    if isinstance(value, str):
        check_text("prediction", value)
        return value
    return None if value is None else _token_ids("prediction", value, "text or a list of token ids")


def _token_ids(name: str, value: object, what: str = "a list of token ids") -> tuple[int, ...]:
    ids = _several(name, value, what)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31:  # fast where many
        return ids
    return tuple(check_int(name, token_id, 0, 2**31 - 1) for token_id in ids)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias must be {{token id: number}}, got {shown(value)}")
    most = MAX_LOGIT_BIAS
    if set(map(type, value)) == {int} and set(map(type, value.values())) <= {int, float}:
        biases = np.array(list(value.values()), np.float64)
        if min(value) >= 0 and max(value) < 2**31 and bool((np.abs(biases) <= most).all()):
            return dict(zip(value, biases.tolist(), strict=True))  # fast where many
    return {
        check_int("a token id of logit_bias", token_id, 0, 2**31 - 1): check_float(
            f"logit_bias of token {shown(token_id)}", bias, -most, most
        )
        for token_id, bias in value.items()
    }


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    processors = _several("logits_processors", value, "a list of functions")
    for processor in processors:
        if not callable(processor):
            raise InvalidRequest(f"logits_processors must be functions, got {shown(processor)}")
    return processors


@dataclass(frozen=True, kw_only=True, repr=False)
class BeamParams(StrictFields):
    """Settings of a beam search, with transformers' meanings. Checked when made (InvalidRequest).

    width           beams that are kept, and answers that are returned
    length_penalty  an answer's score is its total divided by (its tokens) ** length_penalty:
                    above 0 favours long ones, below 0 short ones; -10 to 10
    early_stopping  True: end when `width` answers are finished; False: when the best beam, at its
                    present length, is no better than the worst of them; "never": when it could not
                    become better at any length
    """

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("width", check_int("beam_width", self.width, 1, MAX_BEAM_WIDTH))
        limit = MAX_LENGTH_PENALTY
        put("length_penalty", check_float("length_penalty", self.length_penalty, -limit, limit))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(
                f'early_stopping must be True, False or "never", got {shown(self.early_stopping)}'
            )


def keyed_tokens(token_ids: IntArray, adapter: AdapterUse | None) -> IntArray:
    """Returns the tokens of a sequence, position 0 first, as the cache has them."""
    if adapter is None or not adapter.mark or adapter.start >= len(token_ids):
        return token_ids
    keyed = token_ids.copy()
    keyed[adapter.start :] += adapter.token_mark
    return keyed


def unkeyed(lookup: Lookup) -> Lookup:
    """Returns a look-up of keyed tokens without their marks. Tokens that differ in nothing else are
    of another adapter; rows of pictures are of another picture."""
    expected, found = lookup.expected, lookup.found
    if expected is None or found is None or max(expected, found) < MAX_TOKEN_IDS:
        return lookup
    if min(expected, found) >= FIRST_PICTURE_ID:
        return lookup._replace(reason="picture")
    expected, found = unmarked(np.array([expected, found], np.int32)).tolist()
    if expected == found:
        return lookup._replace(reason="adapter", expected=None, found=None)
    return lookup._replace(expected=expected, found=found)


def unmarked(keyed: IntArray) -> IntArray:
    """Returns tokens of the cache without marks of an `AdapterUse`; negative ones stay."""
    return np.where(keyed < FIRST_PICTURE_ID, np.fmod(keyed, MAX_TOKEN_IDS), keyed)


class Digest(Protocol):
    """The hash of an answer's logits, see `LogitsDigest`."""

    def hexdigest(self, num_tokens: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request on its way into the engine."""

    request_id: str
    token_ids: IntArray  # [n] the prompt, n >= 1
    params: SamplingParams
    seed: int  # of its random stream; params.seed or one drawn by the owner
    end_ids: frozenset[int]  # tokens that end it: the model's (unless ignored) and its own
    max_len: int  # most tokens of prompt and output together
    session: str = ""  # the cache session that claims its cached tokens; "": none
    logprob_targets: IntArray | None = None
    # [k] token ids to score, one after each of the last k tokens; no token is sampled then
    also_generate: bool = False
    # score `logprob_targets` after the k tokens before the last one, then generate an answer
    beams: BeamParams | None = None  # for a beam search, which has no targets
    is_stopped: StopCheck | None = None  # of a beam search with stop strings
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    is_prefetch: bool = False  # computed for later requests; no caller's prompt
    grammar: Grammar | None = None  # of params.structured
    digest: Digest | None = None  # with params.digest, also the first of logits_processors
    turn_starts: tuple[int, ...] = ()  # ascending positions at which messages of a chat begin, the
    # generation prompt's last; known only where the model has recurrent layers
    prediction: IntArray | None = None  # [n] params.prediction as token ids
    num_resumed_tokens: int = 0  # last tokens of `token_ids` that the answer begins with
    adapter: AdapterUse | None = None
    trace_headers: Mapping[str, str] | None = None  # W3C trace context of its caller
    pictures: tuple[Any, ...] = ()  # `Picture`s whose rows are among the prompt's tokens
    uncut: tuple[tuple[int, int], ...] = ()  # parts [start, end) of the prompt, ascending, inside
    # which no step may end: rows of pictures that see each other
    namespace: Namespace = field(init=False)  # params.namespace as a record

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", as_namespace(self.params.namespace))

    def keyed_tokens(self) -> IntArray:
        """[n] `token_ids` as the cache has them, see `AdapterUse`."""
        return keyed_tokens(self.token_ids, self.adapter)

    @property
    def num_prompt(self) -> int:
        """Tokens of `token_ids` that are not part of the answer."""
        return len(self.token_ids) - self.num_resumed_tokens

    @property
    def has_answer(self) -> bool:
        """Whether tokens are sampled."""
        return self.logprob_targets is None or self.also_generate

    @property
    def num_candidates(self) -> int:
        """Number of best tokens to return per beam, 0 without a beam search. Enough for `width`
        beams to continue even if each beam's best tokens end it."""
        if self.beams is None:
            return 0
        return max(2, 1 + len(self.end_ids)) * self.beams.width

    @property
    def num_top_logprobs(self) -> int:
        """Number of best tokens to report with each score of the prompt."""
        return (self.params.prompt_logprobs or 0) if self.also_generate else 0

    @property
    def score_start(self) -> int:
        """The first position after which a token is scored; the length if none is."""
        if self.logprob_targets is None:
            return len(self.token_ids)
        return len(self.token_ids) - len(self.logprob_targets) - self.also_generate
