"""`WorthExtension`: counts what caching has saved, in tokens and seconds, by tenant and session.

A cached token saves what a computed one costs: the seconds in which prompts were computed so far,
divided by their tokens, as measured by the engine. Tokens far back in a long prompt cost more than
that, so long prefixes saved more than is told here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.advice.messages import GetWorth
from radixserve.checks import check_float, shown
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.errors import InvalidRequest
from radixserve.output import Finish
from radixserve.reports import CacheWorth, RequestWorth, Worth
from radixserve.request import Request

MOST_OWNERS = 1024  # tenants, and sessions, that are told apart: those used last
_NUM_LAST = 64  # requests that are told one by one
_PARTS = ("schedule_s", "prepare_s", "forward_s", "sample_s", "commit_s")


class Prices(NamedTuple):
    """A price list, per million prompt tokens."""

    input: float  # that are computed
    cached_input: float = 0.0
    currency: str = "USD"

    @classmethod
    def read(cls, name: str, text: str) -> Prices:
        """Read "input=3,cached_input=0.3,currency=EUR". Raises InvalidRequest, which names the
        setting `name`."""
        fields: dict[str, Any] = {}
        for part in text.split(","):
            key, _, value = (item.strip() for item in part.partition("="))
            if key not in cls._fields or not value or key in fields:
                raise InvalidRequest(
                    f"{name} takes input, cached_input and currency, such as "
                    f'"input=3,cached_input=0.3,currency=EUR", got {shown(text)}'
                )
            fields[key] = value
        for key in {"input", "cached_input"} & fields.keys():
            try:
                price = float(fields[key])
            except ValueError:
                raise InvalidRequest(
                    f"{name}: {key} must be a price per million tokens, got {shown(fields[key])}"
                ) from None
            fields[key] = check_float(f"{name}: {key}", price, 0.0, 1e9)
        if "input" not in fields:
            raise InvalidRequest(f"{name} needs the price of input tokens, such as input=3")
        return cls(**fields)

    def saved(self, cached_tokens: int) -> float:
        """What a caller pays less for cached tokens."""
        return cached_tokens * (self.input - self.cached_input) / 1e6


@dataclass(slots=True)
class _Sum:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    saved_s: float = 0.0

    def add(self, prompt: int, cached: int, saved_s: float) -> None:
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.saved_s += saved_s

    def document(self) -> Worth:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "saved_s": self.saved_s,
        }


class WorthExtension(EngineExtension):
    """Adds up what caching saved. Under 2 us per request.

    prefill_cost  seconds in which prompts were computed, and their tokens, since the start
    stats         the engine's
    """

    name = "worth"

    def __init__(
        self,
        prefill_cost: Callable[[], tuple[float, int]],
        stats: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._prefill_cost, self._stats = prefill_cost, stats
        self._total = _Sum()
        self._tenants: OrderedDict[str, _Sum] = OrderedDict()  # the last used one last
        self._sessions: OrderedDict[tuple[str, str], _Sum] = OrderedDict()  # (tenant, session)
        self._last: deque[RequestWorth] = deque(maxlen=_NUM_LAST)

    def on_finish(
        self,
        request: Request,
        output_ids: Sequence[int],  # noqa: ARG002
        finish: Finish,
        arrived_at: float,
    ) -> None:
        if request.is_prefetch:
            return
        usage = finish.usage
        counts = usage.cached_tokens + usage.computed_tokens, usage.cached_tokens
        saved_s = usage.cached_tokens * self._token_s()
        tenant = request.namespace.tenant
        self._total.add(*counts, saved_s)
        _sum_of(self._tenants, tenant).add(*counts, saved_s)
        if request.session:
            _sum_of(self._sessions, (tenant, request.session)).add(*counts, saved_s)
        self._last.append(
            {
                "request_id": request.request_id,
                "tenant": tenant,
                "session": request.session,
                "arrived_at": arrived_at,
                "prompt_tokens": counts[0],
                "cached_tokens": counts[1],
                "saved_s": saved_s,
                "ttft_s": finish.metrics.ttft_s,
            }
        )

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        return self.worth(message.tenant) if isinstance(message, GetWorth) else answer

    def stats(self) -> dict[str, Any]:
        return {"saved_s": self._total.saved_s}

    def worth(self, tenant: str | None = None) -> CacheWorth:
        """See `Runtime.cache_worth`."""
        total = self._total if tenant is None else self._tenants.get(tenant, _Sum())
        spent = self._stats()
        seconds = sum(spent[part] for part in _PARTS)
        return {
            **total.document(),
            "token_s": self._token_s(),
            "tenants": {
                name: one.document()
                for name, one in self._tenants.items()
                if tenant in (None, name)
            },
            "sessions": [
                {"tenant": owner, "session": name, **one.document()}
                for (owner, name), one in self._sessions.items()
                if tenant in (None, owner)
            ],
            "last": [one for one in self._last if tenant in (None, one["tenant"])],
            "parts": {part[:-2]: spent[part] / max(seconds, 1e-9) for part in _PARTS},
        }

    def _token_s(self) -> float:
        seconds, num_tokens = self._prefill_cost()
        return seconds / num_tokens if num_tokens else 0.0


def _sum_of(sums: OrderedDict[Any, _Sum], owner: Any) -> _Sum:
    """An owner's sum, as the last used one; the least recently used one is forgotten."""
    if owner not in sums:
        sums[owner] = _Sum()
        if len(sums) > MOST_OWNERS:
            sums.popitem(last=False)
    sums.move_to_end(owner)
    return sums[owner]
