"""Tenants: `Tenants` reads and checks API keys, `Caller` is the sender of a request.

`TenantUsage` and `TenantConversations` keep each tenant's token counts and answered conversations.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixserve.cache.namespace import Namespace, as_namespace
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.server.wire.errors import ApiError
from radixserve.text.conversations import AnsweredChat, ConversationTable

_MIN_KEY_LENGTH = 16  # characters
_MAX_KEY_LENGTH = 512
_KEY = re.compile(rf"[!-~]{{1,{_MAX_KEY_LENGTH}}}")  # printable ASCII without spaces
_WEIGHT = re.compile(r"weight=(1000|[1-9][0-9]{0,2})")
MAX_SALT_LENGTH = 256  # characters
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_RIGHTS = {"admin", "share"}
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as its API key identifies it."""

    tenant: str  # "" without keys
    is_admin: bool
    shares_prefixes: bool = False  # its key has the permission to share prefixes with other tenants
    weight: int = 1  # its part of the engine and the queue, relative to the other tenants' weights

    @property
    def may_share(self) -> bool:
        """Whether it may share prefixes with other tenants."""
        return self.is_admin or self.shares_prefixes

    def namespace(self, cache_salt: str | None) -> str:
        """The cache namespace of this caller's requests: "TENANT", or "TENANT/SALT".

        Only requests with the same tenant and the same `cache_salt` share it. Names of tenants
        do not contain "/", so two pairs never have the same namespace. Raises ApiError for a salt
        that is too long.
        """
        if cache_salt is not None and len(cache_salt) > MAX_SALT_LENGTH:
            message = (
                f"cache_salt takes at most {MAX_SALT_LENGTH} characters, got {len(cache_salt)}"
            )
            raise ApiError(400, message, param="cache_salt")
        return str(Namespace(self.tenant, salt=cache_salt or None))


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes  # SHA-256
    caller: Caller


class Tenants:
    """The API keys of a server, stored as SHA-256 digests. False in a boolean context without keys:
    then every caller is an admin of the tenant ""."""

    def __init__(self, keys: tuple[_Key, ...] = ()) -> None:
        self._keys = keys
        self._weights: dict[str, float] = {}  # by tenant: the largest weight of its keys
        for key in keys:
            tenant = key.caller.tenant
            self._weights[tenant] = max(key.caller.weight, self._weights.get(tenant, 0))
        self._total_weight = sum(self._weights.values())

    @classmethod
    def load(cls, path: str | None) -> Tenants:
        """Read a file of API keys. None: a server without keys.

        Each line is "TENANT KEY [admin] [share] [weight=N]". KEY is the key itself, or "sha256:"
        and its hexadecimal digest. `share` is the permission to share prefixes; an admin has it,
        too. The weight, 1 to 1,000, is the tenant's part of a full queue and of the computed
        tokens, relative to other tenants. Several keys may belong to one tenant and its cache.

        Raises InvalidRequest for a wrong line and for a file that others can read; OSError for a
        file that cannot be read.
        """
        if path is None:
            return cls()
        mode = os.stat(path).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidRequest(
                f"{path} may be read by others (mode {stat.S_IMODE(mode):03o}): chmod 600 {path}"
            )
        keys = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_read_key(line.split(), f"{path}, line {number}"))
        if not keys:
            raise InvalidRequest(f"{path} holds no key")
        if len({key.digest for key in keys}) < len(keys):
            raise InvalidRequest(f"{path} holds a key twice")
        return cls(tuple(keys))

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each tenant, by its name."""
        return self._weights

    def share(self, tenant: str) -> float:
        """The tenant's weight as a part of the sum of all weights: 0 to 1. 1 for a tenant
        without keys."""
        weight = self._weights.get(tenant)
        return 1.0 if weight is None else weight / self._total_weight

    def caller(self, authorization: str | None, x_api_key: str | None) -> Caller:
        """The caller whose API key the headers contain. Raises ApiError 401 without a known key.

        Takes the same time for every wrong key. `authorization` and `x_api_key` are the headers'
        values.
        """
        if not self._keys:
            return Caller("", is_admin=True)
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else (x_api_key or "")
        if not key:
            raise _unauthorized("an API key is needed: Authorization: Bearer KEY")
        if not _KEY.fullmatch(key):
            raise _unauthorized(f"an API key is 1 to {_MAX_KEY_LENGTH} printable ASCII characters")
        digest = hashlib.sha256(key.encode()).digest()
        caller = None
        for known in self._keys:  # does not stop at a match: the time would tell which key it was
            if hmac.compare_digest(known.digest, digest):
                caller = known.caller
        if caller is None:
            raise _unauthorized("the API key is not known")
        return caller


def _read_key(parts: list[str], where: str) -> _Key:
    """The key of a line, split into words. `where` names the line. Raises InvalidRequest."""
    tenant, key, *words = parts if len(parts) >= 2 else ("", "", "")
    weights = [match[1] for word in words if (match := _WEIGHT.fullmatch(word))]
    rights = [word for word in words if not _WEIGHT.fullmatch(word)]
    is_doubled = len(set(rights)) < len(rights) or len(weights) > 1
    if is_doubled or not _RIGHTS.issuperset(rights):
        raise InvalidRequest(f"{where}: a line is TENANT KEY [admin] [share] [weight=1 to 1000]")
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            f"{where}: a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores, "
            f"got {shown(tenant)}"
        )
    if tenant in _RIGHTS and tenant not in rights:
        raise InvalidRequest(
            f"{where}: this tenant is only called {tenant}. For a key with that right write "
            f"{tenant} KEY {tenant}, else choose another name"
        )
    match = _DIGEST.fullmatch(key)
    is_key = len(key) >= _MIN_KEY_LENGTH and _KEY.fullmatch(key) and not key.startswith("sha256:")
    if match is None and not is_key:
        raise InvalidRequest(
            f"{where}: a key has {_MIN_KEY_LENGTH} to {_MAX_KEY_LENGTH} printable ASCII "
            "characters, or is sha256: and 64 hexadecimal digits"
        )
    digest = bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()
    weight = int(weights[0]) if weights else 1
    return _Key(digest, Caller(tenant, "admin" in rights, "share" in rights, weight))


def check_priority(tenants: Tenants, caller: Caller, priority: int) -> None:
    """Raise ApiError 403 for a priority above 0 without an admin key: with the eviction policy
    "priority", its K/V would be evicted later than that of other tenants."""
    if tenants and priority > 0 and not caller.is_admin:
        message = "a priority above 0 needs an admin key"
        raise ApiError(403, message, param="priority", code="admin_only")


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


_USAGE_NAMES = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "completion_tokens",
)


class TenantUsage:
    """Sums of each tenant's usage. Owned by the event loop."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Counter[str]] = {}

    def add(self, tenant: str, usage: Mapping[str, Any]) -> None:
        """Count a request that has ended. `usage`: in OpenAI's format, see `completion_usage`."""
        counts = self._by_tenant.setdefault(tenant, Counter())
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        counts["requests"] += 1
        counts["prompt_tokens"] += prompt
        counts["cached_tokens"] += cached
        counts["computed_tokens"] += prompt - cached
        counts["completion_tokens"] += usage["completion_tokens"]

    def of(self, tenant: str) -> dict[str, int | str]:
        """The tenant's sums by name, and its name."""
        counts = self._by_tenant.get(tenant, Counter())
        return {"tenant": tenant, **{name: counts[name] for name in _USAGE_NAMES}}


class TenantConversations:
    """The exact token ids of answered conversations. Each tenant has a table of its own, so that
    a tenant's conversations are dropped only for others of the same tenant. Owned by the event
    loop."""

    def __init__(self, max_entries: int) -> None:
        """`max_entries`: the most conversations of one tenant."""
        self._tables: dict[str, ConversationTable] = defaultdict(
            lambda: ConversationTable(max_entries)
        )

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def note(self, namespace: str, chat: AnsweredChat) -> None:
        """Remember an answer; see `ConversationTable.note`."""
        self._tables[as_namespace(namespace).tenant].note(namespace, chat)

    def find(self, namespace: str, text: str, answers: Collection[str]) -> AnsweredChat | None:
        """The longest conversation that `text` continues; see `ConversationTable.find`."""
        return self._tables[as_namespace(namespace).tenant].find(namespace, text, answers)

    def forget(self, namespace: str | None) -> None:
        """Drop the conversations of one namespace; None: of all namespaces."""
        for table in self._tables.values():
            table.forget(namespace)
