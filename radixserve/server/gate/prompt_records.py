"""`PromptRecords`: each tenant's earlier prompts, with which later ones are compared to diagnose
cache misses."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixserve.cache.namespace import as_namespace
from radixserve.completion import Completion

_MAX_TOKENS = 4_000_000  # of a tenant's prompts and answers; four bytes each


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Hashes of the parts that a prompt was rendered from, to find the part in which two prompts
    differ.

    tools      of all tools
    system     of the system messages at its beginning
    verbosity  of the template's variable of that name
    variables  of the template's other variables, to which effort and thinking are mapped
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
        """The parts of a prompt. O(length of the tools and messages)."""
        hashes = [hash(repr(message)) for message in messages]
        roles = [message["role"] for message in messages]
        num_system = next(
            (index for index, role in enumerate(roles) if role not in ("system", "developer")),
            len(roles),
        )
        others = dict(variables or {})
        verbosity = others.pop("verbosity", None)
        return cls(
            tools=hash(repr(list(tools))),
            system=hash(tuple(hashes[:num_system])),
            verbosity=hash(repr(verbosity)),
            variables=hash(repr(sorted(others.items()))),
            messages=array("q", hashes[num_system:]),
        )

    def goes_on_from(self, previous: PromptParts) -> bool:
        """Whether nothing but new messages at the end differs."""
        if self.messages[: len(previous.messages)] != previous.messages:
            return False
        return self == replace(previous, messages=self.messages)

    def changed_since(self, previous: PromptParts) -> str:
        """The first part that differs from that of `previous`, in the order in which templates
        render them: "tools", "system", "reasoning" or "verbosity" (variables), or "messages".

        It is "messages" also if nothing but the new messages at the end differs.
        """
        if self.tools != previous.tools:
            return "tools"
        if self.system != previous.system:
            return "system"
        continues = self.messages[: len(previous.messages)] == previous.messages
        if continues and self.variables != previous.variables:
            return "reasoning"
        if continues and self.verbosity != previous.verbosity:
            return "verbosity"
        return "messages"


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The prompt and the samples of a request that has ended."""

    namespace: str
    parts: PromptParts
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all samples."""
        answers = sum(len(completion.token_ids) for completion in self.completions)
        return len(self.completions[0].prompt_token_ids) + answers


class PromptRecords:
    """Records by request id, bounded for each tenant: its own oldest records are dropped. Owned by
    the event loop."""

    def __init__(self, max_records: int) -> None:
        """`max_records`: per tenant; 0: nothing is recorded."""
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
        """Add a record. O(1), and O(records that are dropped)."""
        if not self._max_records:
            return
        scores = ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs")
        dropped: dict[str, Any] = dict.fromkeys((*scores, "prompt_ranks"))
        slim = tuple(replace(completion, text="", **dropped) for completion in completions)
        own = self._by_tenant.setdefault(as_namespace(namespace).tenant, _TenantRecords())
        own.records[request_id] = PromptRecord(namespace, parts, slim)
        own.num_tokens += own.records[request_id].num_tokens
        while len(own.records) > self._max_records or own.num_tokens > _MAX_TOKENS:
            _, oldest = own.records.popitem(last=False)
            own.num_tokens -= oldest.num_tokens

    def find(self, namespace: str, answer_id: str) -> PromptRecord | None:
        """The record of the request that was answered under this id: "chatcmpl-...", "resp_..." or
        "msg_...". None if the namespace does not have it."""
        own = self._by_tenant.get(as_namespace(namespace).tenant)
        request_id = answer_id.replace("-", "_").rpartition("_")[2]
        record = None if own is None else own.records.get(request_id)
        return record if record is not None and record.namespace == namespace else None


class _TenantRecords:
    def __init__(self) -> None:
        self.records: OrderedDict[str, PromptRecord] = OrderedDict()
        self.num_tokens = 0
