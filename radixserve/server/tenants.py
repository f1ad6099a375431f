"""Tenants: API keys, and the namespace of the cache that belongs to each."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.server.errors import ApiError

_LEAST_KEY = 16  # characters
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from."""

    tenant: str  # "" where there are no keys
    is_admin: bool
    shares_prefixes: bool = False  # it may share prefixes with other tenants

    @property
    def may_share(self) -> bool:
        return self.is_admin or self.shares_prefixes

    def namespace(self, cache_salt: str | None) -> str:
        """The part of the cache that this caller's requests use, and no others.

        A salt divides it further. A tenant's name has no "/", so that no two pairs collide.
        """
        return self.tenant if not cache_salt else f"{self.tenant}/{cache_salt}"


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    caller: Caller


class Tenants:
    """The keys, as digests; without any every caller is the one, an admin."""

    def __init__(self, keys: tuple[_Key, ...] = ()) -> None:
        self._keys = keys

    @classmethod
    def load(cls, path: str | None) -> Tenants:
        """Lines "TENANT KEY [admin] [share]", the key itself or sha256: and its hexadecimal
        digest; `share` is the permission to share prefixes, which an admin has.

        Several keys may name the same tenant, which they then share with its cache. Raises
        InvalidRequest for a wrong line and for a file that others can read.
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

    def caller(self, authorization: str | None, x_api_key: str | None) -> Caller:
        """The caller with that key. Takes the same time for every wrong key; raises ApiError."""
        if not self._keys:
            return Caller("", is_admin=True)
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else (x_api_key or "")
        if not key:
            raise _unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self._keys:  # all of them, also after one fits
            if hmac.compare_digest(known.digest, digest):
                found = known.caller
        if found is None:
            raise _unauthorized("the API key is not known")
        return found


def _read_key(parts: list[str], where: str) -> _Key:
    tenant, key, *rights = parts if len(parts) >= 2 else ("", "", "")
    if len(set(rights)) < len(rights) or not {"admin", "share"}.issuperset(rights):
        raise InvalidRequest(f"{where}: a line is TENANT KEY [admin] [share]")
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            f"{where}: a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores, "
            f"got {shown(tenant)}"
        )
    match = _DIGEST.fullmatch(key)
    if match is None and (len(key) < _LEAST_KEY or key.startswith("sha256:")):
        raise InvalidRequest(
            f"{where}: a key has at least {_LEAST_KEY} characters, or is sha256: and 64 "
            "hexadecimal digits"
        )
    digest = bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()
    return _Key(digest, Caller(tenant, "admin" in rights, "share" in rights))


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)
