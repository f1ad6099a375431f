"""`ResponseStore`: stored responses, which `previous_response_id` of a later request may name.

`ServerConfig.max_responses` and `max_response_bytes` bound it for each tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from radixserve.server.wire.json_response import dump

_OBJECT_BYTES = 300  # memory of a message's dict and of its strings, beside their characters


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation up to it.

    response       the body of the answer, as JSON
    input_items    the items of its own request, each as JSON, without ids
    messages       the conversation as chat messages, its answer included, without instructions
    message_bytes  memory of `messages`, counted as the bodies of all requests, the answers as JSON,
                   and _OBJECT_BYTES for each message
    num_bytes      memory of the three; a history counts again for each response that continues it
    status         that of the response
    is_background  whether the response was created with `background`
    """

    response_id: str
    namespace: str
    response: str
    input_items: tuple[str, ...]
    messages: tuple[dict[str, Any], ...]
    message_bytes: int
    num_bytes: int
    status: str = "completed"
    is_background: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether it has an answer, so that a request may continue it."""
        return self.status in ("completed", "incomplete")

    def with_response(self, response: dict[str, Any]) -> StoredResponse:
        """The record with another body."""
        text = dump(response)
        num_bytes = self.num_bytes + len(text) - len(self.response)
        return replace(self, response=text, num_bytes=num_bytes, status=response["status"])


def next_response(
    known: StoredResponse | None,
    namespace: str,
    response: dict[str, Any],
    input_items: tuple[str, ...],
    new: list[dict[str, Any]],
    body_bytes: int,
) -> StoredResponse:
    """The record of a new response. O(answer), and a pointer for each earlier message.

    known       the response that it continues; None: it begins a conversation
    new         the messages of its request, then that of the answer, if there is one
    body_bytes  size of the request's body
    """
    messages = tuple(new) if known is None else (*known.messages, *new)
    message_bytes = body_bytes + len(dump(new[-1])) + _OBJECT_BYTES * len(new)
    message_bytes += 0 if known is None else known.message_bytes
    text = dump(response)
    num_bytes = message_bytes + len(text) + sum(map(len, input_items))
    num_bytes += _OBJECT_BYTES * len(input_items)
    return StoredResponse(
        response["id"],
        namespace,
        text,
        input_items,
        messages,
        message_bytes,
        num_bytes,
        response["status"],
        response["background"],
    )


class ResponseStore:
    """Responses by id, bounded for each tenant: its own least recently used ones are dropped. Owned
    by the event loop."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """The bounds of each tenant. `max_responses` 0: nothing is stored."""
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._by_tenant: dict[str, _TenantStore] = {}

    def __len__(self) -> int:
        return sum(len(own.responses) for own in self._by_tenant.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants' responses."""
        return sum(own.num_bytes for own in self._by_tenant.values())

    @property
    def keeps(self) -> bool:
        """Whether responses are stored at all."""
        return self.max_responses > 0

    def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Store a response. Returns False, and stores nothing, if it alone exceeds the bound. O(1),
        and O(responses that are dropped)."""
        if not self.max_responses or stored.num_bytes > self.max_bytes:
            return False
        own = self._by_tenant.setdefault(tenant, _TenantStore())
        own.add(stored)
        while len(own.responses) > self.max_responses or own.num_bytes > self.max_bytes:
            own.drop(next(iter(own.responses)))
        return True

    def find(self, tenant: str, namespace: str, response_id: str) -> StoredResponse | None:
        """The stored response; None if the namespace does not have it."""
        own = self._by_tenant.get(tenant)
        stored = None if own is None else own.responses.get(response_id)
        if own is None or stored is None or stored.namespace != namespace:
            return None
        own.responses.move_to_end(response_id)
        return stored

    def delete(self, tenant: str, namespace: str, response_id: str) -> bool:
        """Delete a response. Returns False if the namespace does not have it."""
        if self.find(tenant, namespace, response_id) is None:
            return False
        self._by_tenant[tenant].drop(response_id)
        return True


class _TenantStore:
    """The responses of one tenant."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def add(self, stored: StoredResponse) -> None:
        self.responses[stored.response_id] = stored
        self.num_bytes += stored.num_bytes

    def drop(self, response_id: str) -> None:
        self.num_bytes -= self.responses.pop(response_id).num_bytes
