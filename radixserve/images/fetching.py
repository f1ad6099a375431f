"""`UrlFetcher`: gets pictures from http and https URLs of hosts that the operator allows.

A host's name is resolved once, all of its addresses are checked, and the connection goes to one of
those that were checked: so a name whose address changes meanwhile reaches nothing else. Redirects
are followed by hand, each checked like the first URL.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from radixserve.checks import shown
from radixserve.daemon_call import call_in_thread
from radixserve.errors import InvalidRequest

_MAX_REDIRECTS = 5
_LOOK_UPS = threading.Semaphore(32)  # of hosts at once; one that hangs cannot be ended
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64, _6TO4 = b"\x00\x64\xff\x9b", b"\x20\x02"  # prefixes of IPv6 that carry an IPv4 address


class UrlFetcher:
    """Any thread may call it; each call has connections of its own."""

    def __init__(
        self, hosts: Iterable[str], timeout_s: float = 5.0, *, allows_private: bool = False
    ) -> None:
        """hosts: allowed names; those of their subdomains are not. timeout_s: for a picture, its
        redirects included. allows_private: addresses of private networks, too, for tests."""
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._timeout_s, self._allows_private = timeout_s, allows_private

    def __call__(self, url: str, max_bytes: int) -> bytes:
        """Returns the bytes behind a URL. Raises InvalidRequest."""
        deadline = time.monotonic() + self._timeout_s
        try:
            for _ in range(1 + _MAX_REDIRECTS):
                self._check_url(url)
                with httpcore.ConnectionPool(
                    network_backend=_CheckedBackend(deadline, self._allows_private)
                ) as pool:
                    found, data = _get(pool, url, max_bytes)
                if found is None:
                    return data
                url = urljoin(url, found)
        except InvalidRequest:
            raise
        except Exception as error:  # of the network, of many kinds
            kind = "takes too long" if time.monotonic() >= deadline else "cannot be fetched"
            raise InvalidRequest(f"the picture {shown(url)} {kind}: {error!r}") from None
        raise InvalidRequest(f"the picture {shown(url)} has more than {_MAX_REDIRECTS} redirects")

    def _check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").lower().rstrip(".")
            _ = parts.port
        except ValueError as error:
            raise InvalidRequest(f"{shown(url)} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or parts.username is not None:
            raise InvalidRequest(f"a picture's URL must be http or https, got {shown(url)}")
        if host not in self._hosts:
            raise InvalidRequest(
                f"pictures are not fetched from {shown(host)}: the operator has not allowed it"
            )


def _get(pool: httpcore.ConnectionPool, url: str, max_bytes: int) -> tuple[str | None, bytes]:
    """Returns (where a redirect leads, b"") or (None, the body). Raises InvalidRequest."""
    headers = {"user-agent": "radixserve", "accept": "image/*", "accept-encoding": "identity"}
    with pool.stream("GET", url, headers=list(headers.items())) as response:
        found = {name.decode("latin-1").lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and "location" in found:
            return found["location"].decode("latin-1"), b""
        if response.status != 200:
            raise InvalidRequest(f"the picture {shown(url)} is answered {response.status}")
        parts, size = [], 0
        for part in response.iter_stream():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise InvalidRequest(f"the picture {shown(url)} has more than {max_bytes} bytes")
        return None, b"".join(parts)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. Of an IPv6 address that carries an IPv4 one,
    that is checked too."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    carried = ip
    if isinstance(ip, IPv6Address):
        packed = ip.packed
        if ip.ipv4_mapped is not None or packed[:12] == bytes(12) or packed[:4] == _NAT64:
            carried = IPv4Address(packed[12:])
        elif packed[:2] == _6TO4:
            carried = IPv4Address(packed[2:6])
    return all(one.is_global and not one.is_multicast for one in (ip, carried))


class _CheckedBackend(httpcore.NetworkBackend):
    """Connects to checked addresses alone, and reads until a deadline."""

    def __init__(self, deadline: float, allows_private: bool) -> None:
        self._deadline, self._allows_private = deadline, allows_private
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        del timeout
        addresses = _resolve(host, port, self._deadline)
        if not self._allows_private and not all(map(is_public, addresses)):
            raise InvalidRequest(
                f"pictures are not fetched from {shown(host)}: its address is not of the internet"
            )
        left = _left(self._deadline)
        stream = self._sockets.connect_tcp(addresses[0], port, left, local_address, socket_options)
        return _TimedStream(stream, self._deadline)


class _TimedStream(httpcore.NetworkStream):
    """A stream whose calls all end at a deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        del timeout
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        del timeout
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        del timeout
        secured = self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline))
        return _TimedStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _resolve(host: str, port: int, deadline: float) -> list[str]:
    """Returns the addresses of a host. Raises TimeoutError after the deadline, OSError."""

    def look_up() -> list[str]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        finally:
            _LOOK_UPS.release()
        return [str(address[4][0]) for address in found]

    if not _LOOK_UPS.acquire(timeout=_left(deadline)):
        raise TimeoutError("other look-ups of hosts hang")
    return call_in_thread("radixserve-pictures", look_up).result(_left(deadline))


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
