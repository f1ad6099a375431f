"""What a caller asks for: `SamplingParams`, and the `Request` that the engine queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from radixserve.arrays import IntArray
from radixserve.checks import StrictFields, check_float, check_int, check_str, shown
from radixserve.errors import InvalidRequest

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_SAMPLES = 1_024  # of one prompt
MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 10.0
LEAST_TEMPERATURE = 1e-5  # below it float32 cannot hold the scaled logits


@dataclass(frozen=True, kw_only=True)
class SamplingParams(StrictFields):
    """How a request's tokens are drawn and when it ends. Checked when made (InvalidRequest).

    max_tokens            most tokens to generate
    min_tokens            end tokens and stop strings are ignored before this many
    temperature           0 is greedy; else 1e-5 to 100
    top_k                 keep the k most likely tokens; 0 or -1 keeps all
    top_p                 keep the smallest set of tokens with at least this probability
    min_p                 drop tokens less likely than min_p times the most likely one
    repetition_penalty    divides (positive) or multiplies (negative) logits of tokens seen in
                          prompt or output; 0.01 to 100, 1 is off
    presence_penalty      subtracted once from the logit of a token in the output
    frequency_penalty     subtracted for each occurrence in the output
    stop                  string or strings that end the text; they are not part of it
    stop_token_ids        token ids that end it, besides the model's own end tokens
    ignore_eos            continue after the model's end tokens
    seed                  makes the request reproducible whatever runs beside it
    n                     completions a prompt, computed once; each with a random stream of its own
    best_of               draw this many, return the n with the highest cumulative log-probability
    logprobs              None, or how many of the best tokens to report besides the one drawn
    prompt_logprobs       None, or how many of the best tokens to report besides each token of the
                          prompt; what is cached of it is computed again
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
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    namespace: str = ""

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        self._check_ints(
            max_tokens=(1, None),
            top_k=(-1, None),
            seed=(0, 2**63 - 1),
            n=(1, MAX_SAMPLES),
            logprobs=(0, MAX_LOGPROBS),
            prompt_logprobs=(0, MAX_LOGPROBS),
            priority=(-(2**31), 2**31 - 1),
        )
        self._check_ints(min_tokens=(0, self.max_tokens), best_of=(self.n, MAX_SAMPLES))
        self._check_floats(
            temperature=(0.0, 100.0),
            min_p=(0.0, 1.0),
            presence_penalty=(-2.0, 2.0),
            frequency_penalty=(-2.0, 2.0),
            repetition_penalty=(0.01, 100.0),
        )
        put("top_p", check_float("top_p", self.top_p, 0.0, 1.0, open_low=True))
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be 0 (greedy) or >= {LEAST_TEMPERATURE:g}, "
                f"got {self.temperature}"
            )
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._check_bools("ignore_eos")
        check_str("namespace", self.namespace)

    @property
    def num_samples(self) -> int:
        """Requests that a prompt becomes."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def is_greedy_only(self) -> bool:
        """Whether logits alone decide and nothing else is asked for: no history counts."""
        return self.is_greedy and self.logprobs is None and not self.has_penalty

    @property
    def has_penalty(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _stop_strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        strings: tuple[object, ...] = (stop,)
    elif stop is None:
        strings = ()
    elif isinstance(stop, Iterable) and not isinstance(stop, bytes | Mapping):
        strings = tuple(stop)
    else:
        raise InvalidRequest(f"stop must be a non-empty string or several, got {shown(stop)}")
    found = tuple(one for one in strings if isinstance(one, str) and one)
    if len(found) < len(strings):
        raise InvalidRequest(f"stop must be a non-empty string or several, got {shown(stop)}")
    if len(found) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(found)}")
    return found


def _stop_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
        raise InvalidRequest(f"stop_token_ids must be a list of token ids, got {shown(ids)}")
    return tuple(check_int("stop_token_ids", token_id, 0, 2**31 - 1) for token_id in ids)


@dataclass(frozen=True, kw_only=True)
class BeamParams(StrictFields):
    """How a beam search goes; the meanings are transformers'. Checked when made (InvalidRequest).

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


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request on its way into the engine."""

    request_id: str
    token_ids: IntArray  # [n] the prompt, n >= 1
    params: SamplingParams
    seed: int  # of its random stream; params.seed or one drawn by the owner
    end_ids: frozenset[int]  # tokens that end it: the model's (unless ignored) and its own
    max_len: int  # most tokens of prompt and output together
    session: str = ""  # the cache session that claims what it leaves cached; "": none
    logprob_targets: IntArray | None = None
    # [k] token ids to score, one after each of the last k tokens; no token is drawn then
    also_generate: bool = False
    # `logprob_targets` are scored after each of the k tokens before the last, then tokens are drawn
    beams: BeamParams | None = None  # it is a beam search, without targets

    @property
    def num_candidates(self) -> int:
        """Best tokens wanted after each beam, 0 where one is drawn. Enough for `width` beams to go
        on even where every beam's best tokens end it."""
        if self.beams is None:
            return 0
        return max(2, 1 + len(self.end_ids)) * self.beams.width

    @property
    def score_start(self) -> int:
        """The first position after which a token is scored; the length where none is."""
        if self.logprob_targets is None:
            return len(self.token_ids)
        return len(self.token_ids) - len(self.logprob_targets) - self.also_generate
