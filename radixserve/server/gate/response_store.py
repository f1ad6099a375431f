"""`ResponseStore`: each tenant's answers that later requests may continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from radixserve.server.wire.json_response import dump

_OBJECT_BYTES = 300  # a message's dict and its texts' headers


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer with all that was said before it.

    response       as it was answered, as JSON
    input_items    of its request alone, each as JSON, without ids
    messages       the conversation in the format of chats, with the answer, without instructions
    message_bytes  of `messages`: of the requests' bodies, of the answers as JSON, and of the
                   objects that hold them
    num_bytes      of all three: a history counts for each answer that continues it
    """

    response_id: str
    namespace: str
    response: str
    input_items: tuple[str, ...]
    messages: tuple[dict[str, Any], ...]
    message_bytes: int
    num_bytes: int


def next_response(
    known: StoredResponse | None,
    namespace: str,
    response: dict[str, Any],
    input_items: tuple[str, ...],
    new: list[dict[str, Any]],
    body_bytes: int,
) -> StoredResponse:
    """The record of an answer, the last of the `new` messages, to a body of `body_bytes`.
    O(answer), and a pointer for each earlier message."""
    messages = tuple(new) if known is None else (*known.messages, *new)
    message_bytes = body_bytes + len(dump(new[-1])) + _OBJECT_BYTES * len(new)
    message_bytes += 0 if known is None else known.message_bytes
    text = dump(response)
    num_bytes = message_bytes + len(text) + sum(map(len, input_items))
    num_bytes += _OBJECT_BYTES * len(input_items)
    return StoredResponse(
        response["id"], namespace, text, input_items, messages, message_bytes, num_bytes
    )


class ResponseStore:
    """The least recently used ones of a tenant are dropped first; another tenant's never.

    Owned by the event loop.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Bounds for each tenant; `max_responses` 0: nothing is kept."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, _TenantStore] = {}

    def __len__(self) -> int:
        return sum(len(own.responses) for own in self._by_tenant.values())

    @property
    def num_bytes(self) -> int:
        return sum(own.num_bytes for own in self._by_tenant.values())

    @property
    def keeps(self) -> bool:
        return self._max_responses > 0

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Store a response that is within the bound. O(1), plus O(dropped responses)."""
        if not self._max_responses or stored.num_bytes > self._max_bytes:
            return
        own = self._by_tenant.setdefault(tenant, _TenantStore())
        own.add(stored)
        while len(own.responses) > self._max_responses or own.num_bytes > self._max_bytes:
            own.drop(next(iter(own.responses)))

    def find(self, tenant: str, namespace: str, response_id: str) -> StoredResponse | None:
        """The stored response; None if it is unknown or of another namespace."""
        own = self._by_tenant.get(tenant)
        stored = None if own is None else own.responses.get(response_id)
        if own is None or stored is None or stored.namespace != namespace:
            return None
        own.responses.move_to_end(response_id)
        return stored

    def delete(self, tenant: str, namespace: str, response_id: str) -> bool:
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
