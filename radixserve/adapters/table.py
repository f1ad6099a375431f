"""`AdapterTable`: the adapters that callers may name, and what their requests need of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from radixserve.arrays import IntArray
from radixserve.cache.namespace import Namespace, as_namespace
from radixserve.cache.tokens import token_bytes
from radixserve.checks import check_str, shown, suggestion
from radixserve.errors import InvalidRequest
from radixserve.request import (
    FIRST_PICTURE_ID,
    MAX_TOKEN_IDS,
    AdapterUse,
    SamplingParams,
    keyed_tokens,
)
from radixserve.text.token_search import find_last

MAX_NAME = 256  # characters
MAX_ACTIVATED = FIRST_PICTURE_ID // MAX_TOKEN_IDS - 1  # the largest `AdapterUse.mark`


class AdapterInfo(NamedTuple):
    """A loaded adapter."""

    name: str
    path: str
    rank: int  # the largest of its modules
    invocation: tuple[int, ...]  # token ids from whose last occurrence on it computes a prompt; ():
    # it computes all of it
    num_bytes: int  # in memory
    digest: str  # of its files, 16 hexadecimal digits


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter under one name. Namespaces name it by `key`: other files have another one, so that
    no K/V of theirs is ever found."""

    info: AdapterInfo
    number: int  # in the runner

    @property
    def key(self) -> str:
        return f"{self.info.name}@{self.info.digest}"

    @property
    def mark(self) -> int:
        return self.number if self.info.invocation else 0


class AdapterTable:
    """Any thread may look up. The engine's thread alone adds and removes names."""

    def __init__(self) -> None:
        self.named: dict[str, Adapter] = {}  # those that new requests may name
        self.known: dict[str, Adapter] = {}  # all that were loaded since the start, by key
        self.numbered: dict[int, Adapter] = {}  # the same, by number

    def add(self, info: AdapterInfo, *, replaces: bool = False) -> Adapter:
        """Let requests name it. replaces: also under a name in use, else InvalidRequest."""
        if info.name in self.named and not replaces:
            raise InvalidRequest(f"the adapter {shown(info.name)} is loaded: unload it first")
        adapter = Adapter(info, len(self.known) + 1)
        if (known := self.known.get(adapter.key)) is not None:
            adapter = replace(known, info=info)
        if adapter.mark > MAX_ACTIVATED:
            raise InvalidRequest(
                f"{MAX_ACTIVATED} adapters were loaded since the start: restart to load activated "
                "ones"
            )
        self.numbered = {**self.numbered, adapter.number: adapter}
        self.known = {**self.known, adapter.key: adapter}
        self.named = {**self.named, info.name: adapter}
        return adapter

    def remove(self, name: str) -> Adapter:
        """Take a name from new requests. Raises InvalidRequest."""
        adapter = self.find(name)
        self.named = {own: other for own, other in self.named.items() if own != name}
        return adapter

    def find(self, name: str) -> Adapter:
        """Raises InvalidRequest for a name that is not loaded."""
        adapter = self.named.get(name)
        if adapter is None:
            loaded = ", ".join(map(shown, self.named)) or "none"
            hint = suggestion(name, self.named)
            raise InvalidRequest(f"no adapter {shown(name)} is loaded{hint}; loaded: {loaded}")
        return adapter

    # -- of requests --------------------------------------------------------------------------

    def namespace(self, namespace: str, adapter: str) -> str:
        """Returns a namespace that names the adapter of its requests, "": none. Raises
        InvalidRequest."""
        if not adapter:
            return namespace
        record, key = as_namespace(namespace), self.find(adapter).key
        if record.adapter not in ("", key):
            raise InvalidRequest(
                f"the namespace is of the adapter {shown(record.adapter)}, not of {shown(key)}"
            )
        return str(record._replace(adapter=key))

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Returns params whose namespace names their adapter. Raises InvalidRequest."""
        if not params.adapter:
            return params
        return replace(params, namespace=self.namespace(params.namespace, params.adapter))

    def use(self, namespace: Namespace, token_ids: IntArray) -> tuple[Namespace, AdapterUse | None]:
        """Returns the namespace that has a prompt's K/V, and the adapter that computes it.

        namespace: see `namespace`. With an activated adapter the K/V is in the model's own; without
        an invocation in the prompt it computes nothing. Raises InvalidRequest.
        """
        if not namespace.adapter:
            return namespace, None
        adapter = self.known.get(namespace.adapter)
        if adapter is None or self.named.get(adapter.info.name) is not adapter:
            name = namespace.adapter.rpartition("@")[0]
            raise InvalidRequest(f"the adapter {shown(name)} was unloaded, or other files loaded")
        if not adapter.mark:
            return namespace, AdapterUse(adapter.number)
        base, wanted = namespace._replace(adapter=""), adapter.info.invocation
        end = find_last(token_bytes(token_ids), token_bytes(wanted), len(token_ids))
        if end < 0:
            return base, None
        return base, AdapterUse(adapter.number, end - len(wanted), adapter.mark)

    def cache_place(self, tokens: IntArray, namespace: str) -> tuple[IntArray, str]:
        """Returns a prompt's tokens and namespace as the cache has them. Raises InvalidRequest."""
        place, use = self.use(as_namespace(namespace), tokens)
        return keyed_tokens(tokens, use), str(place)


def check_name(name: object) -> str:
    """Returns an adapter's name. Raises InvalidRequest."""
    text = check_str("name", name)
    if not 0 < len(text) <= MAX_NAME or not text.isprintable():
        raise InvalidRequest(
            f"an adapter's name is 1 to {MAX_NAME} printable characters, got {shown(name)}"
        )
    return text
