"""`LogitsDigest`: a hash of the logits of each generated token, for comparing answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from radixserve.request import Request

_BYTES = 16


class LogitsDigest:
    """A function for `logits_processors` that changes nothing and hashes the bits of the logits.

    It belongs to one request and is called for its tokens in order. A copy in another process
    starts without a history.
    """

    __slots__ = ("_after_tokens", "_hash")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_BYTES)
        self._after_tokens = [self._hash.hexdigest()]  # [n] of the logits of the first n tokens

    def __reduce__(self) -> tuple[type[LogitsDigest], tuple[()]]:
        return LogitsDigest, ()

    def __call__(self, _: Sequence[int], logits: Any) -> Any:
        """Hash and return `logits`, [V] float32 of the next token. _: the ids of the tokens before
        it."""
        self._hash.update(logits.detach().cpu().contiguous().numpy().tobytes())
        self._after_tokens.append(self._hash.hexdigest())
        return logits

    def hexdigest(self, num_tokens: int) -> str | None:
        """Returns the hash of the logits of the first `num_tokens` tokens; None if fewer were
        hashed: another process sampled them."""
        return self._after_tokens[num_tokens] if num_tokens < len(self._after_tokens) else None


def with_digest(request: Request) -> Request:
    """Returns the request with its own digest, if its params request one."""
    params = request.params
    if not params.digest:
        return request
    digest = LogitsDigest()
    others = [each for each in params.logits_processors if not isinstance(each, LogitsDigest)]
    params = replace(params, logits_processors=(digest, *others))
    return replace(request, params=params, digest=digest)
