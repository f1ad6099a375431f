"""`AllowedHosts`: the `Host` and `Origin` headers that a server without keys accepts.

The check keeps web pages from using the server. A page can point a name of its own at 127.0.0.1
(DNS rebinding), but the browser then sends that name as Host. A page cannot make the browser send
an IP address as Host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from radixserve.checks import shown
from radixserve.server.config import ServerConfig
from radixserve.server.wire.errors import ApiError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]*))(?::([0-9]{1,5}))?", re.ASCII)
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#@]+)", re.ASCII)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class AllowedHosts:
    """The hosts and origins of a server without keys."""

    def __init__(self, config: ServerConfig) -> None:
        self._hosts = _LOOPBACK | {config.host.lower(), *map(str.lower, config.allowed_host)}
        self._takes_addresses = config.allow_unauthenticated_network_access
        if self._takes_addresses:
            self._hosts |= {socket.gethostname().lower()}
        self._origins = frozenset(config.cors_origin)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError 403 if the Host header names another host, or if the Origin header names
        a web page that may not use the server, or nothing known. `headers`: by lower-case name;
        `check_host` has taken the Host."""
        host = headers.get("host", "")
        name = _host_name(host)
        if host and name not in self._hosts and not (self._takes_addresses and _is_address(name)):
            raise ApiError(
                403,
                f"the host {shown(host[:256])} is not one of this server: without keys it "
                "answers to localhost and to the names in --host and --allowed-host",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        match = _ORIGIN.fullmatch(origin)
        if match is None or match[1].lower() != host.lower():
            raise ApiError(
                403,
                f"web pages of {shown(origin[:256])} may not use this server: --cors-origin names "
                "those that may",
                code="origin_not_allowed",
            )


def check_host(host: str) -> None:
    """Raise ApiError 400 unless a Host header is a name or an address, with or without a port.
    Empty: there is none."""
    match = _HOST.fullmatch(host)
    if match is None or int(match[3] or 0) > 65_535 or (match[1] and not _is_address(match[1])):
        raise ApiError(400, f"the Host header is not a host with a port: {shown(host[:256])}")


def _host_name(host: str) -> str:
    """The name or address in a Host header, without port and brackets; "" for a wrong one."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
