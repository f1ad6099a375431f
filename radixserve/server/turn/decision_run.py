"""`run_decisions`: computes the decisions of a request, as far as the queue has room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from radixserve.output import Usage, add_usages
from radixserve.server.gate.disconnect import CancelOnDisconnect
from radixserve.server.gate.state import caller_of, server_of
from radixserve.server.wire.usage import usage_body


class _Decided(Protocol):
    @property
    def usage(self) -> Usage: ...


Decided = TypeVar("Decided", bound=_Decided, covariant=True)


class _Decisions(Protocol[Decided]):
    """Checked questions, such as a `DecisionBatch`."""

    num_requests: int
    num_tokens: int

    async def arun(self, max_in_flight: int, admit: Callable[[], object]) -> Sequence[Decided]: ...


async def run_decisions(
    request: Request, decisions: _Decisions[Decided], at_once: int, num_answers: int = 0
) -> tuple[Sequence[Decided], Usage, dict[str, Any]]:
    """Returns the decisions, and what they used: as a record, and in OpenAI's format, which the
    tenant's counters get.

    at_once: most engine requests at a time. num_answers: that count as output tokens. Raises
    ApiError 429 if the queue has no room.
    """
    server, caller = server_of(request), caller_of(request)
    num_requests = min(decisions.num_requests, at_once, server.config.max_queued_requests)
    check_room = partial(server.check_room, caller.tenant, num_requests, decisions.num_tokens)
    check_room()  # before requests are built
    with CancelOnDisconnect(server, request) as watched:

        def admit() -> None:
            check_room()
            watched.num_requests = num_requests

        decided = await decisions.arun(num_requests, admit)
    usage = add_usages([one.usage for one in decided])
    counts = usage_body(usage.prompt_tokens, usage.cached_tokens, num_answers, usage.loaded_tokens)
    watched.note_usage(decisions.num_requests, counts)
    return decided, usage, counts
