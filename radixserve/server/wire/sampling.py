"""SamplingParams from a request's fields.

`read_sampling` takes every field of `schema.Sampling` that the body has, under the same name: a new
sampling parameter needs a field there and in `request.SamplingParams`, and no code here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from radixserve.api.beam_search import read_options
from radixserve.api.runtime import Runtime
from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.request import BeamParams, SamplingParams
from radixserve.server.config import ServerConfig
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.schema import GenerationFields, Sampling, StreamOptions

_NONE: Mapping[str, str] = {}
_FEW = 100  # log-probabilities of a position; for more, _MAX_ENTRIES bounds the request's
_MAX_ENTRIES = 2_000_000
# Fields of SamplingParams by the names that `schema.OtherNames` has for them.
_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "random_seed": "seed"}


def read_sampling(
    runtime: Runtime,
    body: BaseModel,
    namespace: str,
    config: ServerConfig,
    *,
    renamed: Mapping[str, str] = _NONE,
    **own: Any,
) -> SamplingParams:
    """The sampling parameters of a request: `own`, then the fields of `Sampling` in the body that
    are not null, then the model's defaults.

    A seed of -1 means none; a top_p of 0 means the most likely token; -1 log-probabilities are
    those of the vocabulary. `renamed` maps names of
    SamplingParams to those of the client's protocol, for errors. Raises ApiError.
    """
    fields = {name: getattr(body, name, None) for name in Sampling.model_fields}
    for theirs, ours in _OTHER_NAMES.items():
        if getattr(body, theirs, None) is not None:
            name, fields[ours] = the_one(body, ours, theirs)
            renamed = {**renamed, ours: name}
    fields |= own
    given = {name: value for name, value in fields.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _by_id(given["logit_bias"])
    if given.get("seed") == -1:
        del given["seed"]
    for name in ("logprobs", "prompt_logprobs"):
        if name in given:
            given[name] = _num_logprobs(renamed.get(name, name), given[name], runtime, config)
    is_search = getattr(body, "use_beam_search", None) is True
    if is_search:
        given = {name: value for name, value in given.items() if not _is_no_op(name, value)}
    elif given.get("top_p") == 0:
        given |= {"top_p": 1.0, "top_k": 1}
    try:
        if is_search:
            params = _of_search(namespace, **given)
        else:
            params = runtime.sampling_params(**given, namespace=namespace)
    except InvalidRequest as error:
        raise _renamed(invalid(error), renamed) from None
    if params.num_samples > config.max_n:
        name = "best_of" if params.num_samples > params.n else "n"
        raise ApiError(
            400, f"{name} must be at most {config.max_n} here, got {params.num_samples}", param=name
        )
    # `keep_last` has already been applied to the prompts.
    return (
        params
        if params.truncate_prompt_tokens is None
        else replace(params, truncate_prompt_tokens=None)
    )


def _num_logprobs(name: str, count: int, runtime: Runtime, config: ServerConfig) -> int:
    """How many log-probabilities the field `name` asks for. Raises ApiError for more than
    `max_logprobs` of the server."""
    vocab_size = runtime.model.vocab_size
    most = vocab_size if config.max_logprobs == -1 else config.max_logprobs
    wanted = vocab_size if count == -1 else count
    if wanted > most:
        problem = f"must be at most {most} here (--max-logprobs), got {count}"
        if count == -1:
            problem += f", which is the vocabulary of {vocab_size}"
        raise ApiError(400, f"{name} {problem}", param=name)
    return wanted


def check_logprobs(params: SamplingParams, prompts: Sequence[IntArray], num_tokens: int) -> None:
    """Raise ApiError if a request asks for more than _MAX_ENTRIES log-probabilities.
    `num_tokens`: most tokens of an answer."""
    num_answers = len(prompts) * params.num_samples
    for name, num_top, positions in (
        ("logprobs", params.logprobs, num_answers * num_tokens),
        ("prompt_logprobs", params.prompt_logprobs, sum(map(len, prompts))),
    ):
        if (num_top or 0) > _FEW and (num_top or 0) * positions > _MAX_ENTRIES:
            raise ApiError(
                400,
                f"{name} of {num_top} tokens at up to {positions} positions are more than "
                f"{_MAX_ENTRIES} entries: ask for fewer positions or tokens",
                param=name,
            )


def the_one(body: BaseModel, *names: str) -> tuple[str, Any]:
    """The name and value of the one field that is given among those with the same meaning; the
    first name and None if none is. Raises ApiError if two values differ."""
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise ApiError(400, f"{' and '.join(given)} differ: give one", param=next(iter(given)))
    return next(iter(given.items()), (names[0], None))


def token_limit(body: BaseModel, *names: str, default: int | None = None) -> tuple[str, int | None]:
    """The field among `names` that limits the answer's tokens, and the limit: `default` if none is
    given. None, or -1 in the body: the rest of the context. Raises ApiError."""
    name, limit = the_one(body, *names)
    if limit is None:
        return name, default
    return name, None if limit == -1 else limit


def read_beams(body: GenerationFields) -> BeamParams | None:
    """The parameters of the beam search that a request asks for, with `n` beams; None without
    `use_beam_search`. Raises ApiError."""
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    early = body.early_stopping or False
    if not body.use_beam_search:
        for name, is_given in (("length_penalty", penalty != 1.0), ("early_stopping", early)):
            if is_given:
                raise ApiError(400, f"{name} needs use_beam_search", param=name)
        return None
    width = 1 if body.n is None else body.n
    try:
        return BeamParams(width=width, length_penalty=penalty, early_stopping=early)
    except InvalidRequest as error:
        raise invalid(error) from None


def _of_search(namespace: str, *, n: int = 1, **given: Any) -> SamplingParams:
    """The sampling parameters of a beam search, whose width stays in `n`. As in
    `Runtime.beam_search`, the model's sampling defaults do not apply."""
    params, _ = read_options(SamplingParams(**given, namespace=namespace), None, {})
    return replace(params, n=n)


def _is_no_op(name: str, value: Any) -> bool:
    """Whether a sampling field has no effect on a beam search, which does not sample."""
    return name == "seed" or (name == "top_k" and value == -1)


def _renamed(error: ApiError, renamed: Mapping[str, str]) -> ApiError:
    """The error with its field's name in the client's protocol. `renamed`: {ours: theirs}."""
    theirs = renamed.get(error.param or "")
    if theirs is None:
        return error
    message = error.message.replace(str(error.param), theirs, 1)
    return ApiError(error.status, message, param=theirs, index=error.index)


def keep_last(count: int | None, max_seq_len: int, max_tokens: int) -> int | None:
    """How many of a prompt's tokens a truncate_prompt_tokens of `count` keeps; None: all. -1 keeps
    as many as the context has room for beside `max_tokens`."""
    if count == -1:
        return max(1, max_seq_len - max_tokens)
    return count if count is not None and count > 0 else None  # SamplingParams refuses the others


def _by_id(bias: dict[str, Any]) -> dict[int, Any]:
    """`logit_bias` by token id, since the keys of a JSON object are strings. Raises ApiError."""
    try:
        return {int(name): value for name, value in bias.items()}
    except ValueError:
        message = f"logit_bias must be a map from token ids to numbers, got {shown(bias)}"
        raise ApiError(400, message, param="logit_bias") from None


def check_stream(
    stream: bool | None, options: StreamOptions | None, params: SamplingParams
) -> bool:
    """Whether the answer is streamed. Raises ApiError for parameters that cannot be streamed."""
    if not stream:
        if options is not None:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return False
    if params.num_samples > params.n:
        raise ApiError(
            400, "best_of cannot be streamed: the best are known at the end", param="best_of"
        )
    if params.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return True
