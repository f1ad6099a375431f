"""`PromptRecords`: each tenant's earlier requests, with which later ones are compared."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixserve.output import Completion
from radixserve.request import tenant_of

_MAX_TOKENS = 4_000_000  # of a tenant's prompts and answers; four bytes each


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Hashes of what a prompt was made of, so that two can be told apart by their parts.

    tools      of all tools
    system     of the system messages that it begins with
    verbosity  of the template's variable of that name
    variables  of the template's other variables, such as effort and thinking
    messages   of each other message
    """

    tools: int
    system: int
    verbosity: int
    variables: int
    messages: array[int]

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
    ) -> PromptParts:
        """O(all of it)."""
        hashes = [hash(repr(message)) for message in messages]
        roles = [message["role"] for message in messages]
        num_system = next(
            (index for index, role in enumerate(roles) if role not in ("system", "developer")),
            len(roles),
        )
        others = {**(variables or {})}
        verbosity = others.pop("verbosity", None)
        return cls(
            tools=hash(repr(list(tools))),
            system=hash(tuple(hashes[:num_system])),
            verbosity=hash(repr(verbosity)),
            variables=hash(repr(sorted(others.items()))),
            messages=array("q", hashes[num_system:]),
        )

    def changed_since(self, previous: PromptParts) -> str:
        """The first part that differs, in the order in which templates render them; "messages" also
        where these merely continue in another way."""
        if self.tools != previous.tools:
            return "tools"
        if self.system != previous.system:
            return "system"
        goes_on = self.messages[: len(previous.messages)] == previous.messages
        if goes_on and self.variables != previous.variables:
            return "reasoning"
        if goes_on and self.verbosity != previous.verbosity:
            return "verbosity"
        return "messages"


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A request that has ended, with its samples."""

    namespace: str
    parts: PromptParts
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        answers = sum(len(completion.token_ids) for completion in self.completions)
        return len(self.completions[0].prompt_token_ids) + answers


class PromptRecords:
    """The oldest ones of a tenant are dropped first; another tenant's never. Owned by the event
    loop."""

    def __init__(self, max_records: int) -> None:
        """`max_records`: of each tenant; 0: none are kept."""
        self._max_records = max_records
        self._by_tenant: dict[str, _TenantRecords] = {}

    def __len__(self) -> int:
        return sum(len(own.records) for own in self._by_tenant.values())

    def put(
        self,
        request_id: str,
        namespace: str,
        parts: PromptParts,
        completions: Sequence[Completion],
    ) -> None:
        """Remember a request by its id. O(1), and what is dropped."""
        if not self._max_records:
            return
        slim = tuple(
            replace(
                completion, text="", logprobs=None, top_logprobs=None,
                prompt_logprobs=None, prompt_top_logprobs=None,
            )
            for completion in completions
        )  # fmt: skip
        own = self._by_tenant.setdefault(tenant_of(namespace), _TenantRecords())
        own.records[request_id] = PromptRecord(namespace, parts, slim)
        own.num_tokens += own.records[request_id].num_tokens
        while len(own.records) > self._max_records or own.num_tokens > _MAX_TOKENS:
            _, oldest = own.records.popitem(last=False)
            own.num_tokens -= oldest.num_tokens

    def find(self, namespace: str, answer_id: str) -> PromptRecord | None:
        """The request with this answer id: "chatcmpl-...", "resp_...", "msg_...". None if it is
        unknown or of another namespace."""
        own = self._by_tenant.get(tenant_of(namespace))
        request_id = answer_id.replace("-", "_").rpartition("_")[2]
        record = None if own is None else own.records.get(request_id)
        return record if record is not None and record.namespace == namespace else None


class _TenantRecords:
    def __init__(self) -> None:
        self.records: OrderedDict[str, PromptRecord] = OrderedDict()
        self.num_tokens = 0
