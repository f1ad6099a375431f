"""`Namespace`: what requests must have in common to share K/V."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from radixserve.checks import check_str

_MAX_PARSED = 4096  # texts whose records are remembered


class Namespace(NamedTuple):
    """A key of the cache. Equal tokens share K/V only if all fields of their namespaces are equal.

    tenant   owner of the requests; the engine shares its time between tenants
    adapter  key of the adapter that computed the K/V, "NAME@DIGEST"; "": the model alone
    salt     separates requests of a tenant; None: it does not

    As text: "TENANT" or "TENANT/SALT", after "\\0ADAPTER\\0" if there is an adapter. Callers,
    reports and files have the text. `as_namespace` and `str` alone convert it: every text is that
    of one namespace. The epoch of the weights is no field: it is the cache's, and the same for all
    requests at a time, see `PrefixCache.begin_epoch`.
    """

    tenant: str = ""
    adapter: str = ""
    salt: str | None = None

    def __str__(self) -> str:
        text = self.tenant if self.salt is None else f"{self.tenant}/{self.salt}"
        return f"\0{self.adapter}\0{text}" if self.adapter else text

    def covers(self, other: Namespace) -> bool:
        """Whether `other` is this namespace or lies below it: "acme/a/b" below "acme/a" and
        "acme", and those of adapters below the model's."""
        if self.tenant != other.tenant or self.adapter not in ("", other.adapter):
            return False
        if self.salt is None or self.salt == other.salt:
            return True
        return other.salt is not None and other.salt.startswith(f"{self.salt}/")


DEFAULT_NAMESPACE = Namespace()


def is_within(namespace: str | Namespace, within: str | Namespace | None) -> bool:
    """Whether a namespace is `within` or lies below it, see `Namespace.covers`. None: all are."""
    return within is None or as_namespace(within).covers(as_namespace(namespace))


def as_namespace(namespace: str | Namespace) -> Namespace:
    """Returns the record of a text, and a record as it is. Raises InvalidRequest for others."""
    if isinstance(namespace, Namespace):
        return namespace
    return _parse(check_str("namespace", namespace))


@lru_cache(_MAX_PARSED)
def _parse(text: str) -> Namespace:
    adapter, rest = "", text
    if text.startswith("\0"):
        name, mark, after = text[1:].partition("\0")
        if name and mark:
            adapter, rest = name, after
    tenant, slash, salt = rest.partition("/")
    return Namespace(tenant, adapter, salt if slash else None)
