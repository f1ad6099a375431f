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
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from radixserve.checks import shown
from radixserve.daemon_call import call_in_thread
from radixserve.errors import InvalidRequest

_MAX_REDIRECTS = 5
_TIMEOUTS_OF_PROMPT = 4  # for all of its URLs together
_LOOK_UPS = threading.Semaphore(32)  # of hosts at once; one that hangs cannot be ended
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_URL_LENGTH = 8_192
_NAT64 = ip_network("64:ff9b::/96")  # carries IPv4 addresses
_UNICAST = ip_network("2000::/3")  # all that IPv6 has given out
# Not of the internet, whatever a version of Python says: what belongs to protocols, relays and
# documentation, and addresses of 6to4 and ISATAP, which lead to IPv4.
_RESERVED = [
    ip_network(block) for block in ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "3fff::/20")
]
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")  # bytes 8 to 12
_UNQUOTED = "/?:@!$&'()*+,;=%~[]"  # of a path and a query


class UrlFetcher:
    """Any thread may call it; each call has connections of its own."""

    def __init__(
        self, hosts: Iterable[str], timeout_s: float = 5.0, *, allows_private: bool = False
    ) -> None:
        """hosts: allowed names; those of their subdomains are not. timeout_s: for a picture, its
        redirects included. allows_private: addresses of private networks, too, for tests."""
        self._hosts = frozenset(map(_as_ascii, hosts))
        self._timeout_s, self._allows_private = timeout_s, allows_private

    def __call__(self, url: str, max_bytes: int, spent_s: float = 0.0) -> bytes:
        """See `FetchUrl`."""
        left = _TIMEOUTS_OF_PROMPT * self._timeout_s - spent_s
        deadline = time.monotonic() + min(self._timeout_s, left)
        try:
            for _ in range(1 + _MAX_REDIRECTS):
                checked = self._checked(url)
                with httpcore.ConnectionPool(
                    network_backend=_CheckedBackend(deadline, self._allows_private)
                ) as pool:
                    location, data = _get(pool, checked, max_bytes)
                if location is None:
                    return data
                url = urljoin(url, location)
        except InvalidRequest:
            raise
        except Exception as error:  # of the network, of many kinds
            kind = "takes too long" if time.monotonic() >= deadline else "cannot be fetched"
            raise InvalidRequest(f"the picture {shown(url)} {kind}: {error!r}") from None
        raise InvalidRequest(f"the picture {shown(url)} has more than {_MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> httpcore.URL:
        """Returns an allowed URL. Raises InvalidRequest."""
        if len(url) > _MAX_URL_LENGTH:
            raise InvalidRequest(f"a picture's URL has more than {_MAX_URL_LENGTH} characters")
        try:
            parts = urlsplit(url)
            host, port = _as_ascii(parts.hostname or ""), parts.port
        except ValueError as error:
            raise InvalidRequest(f"{shown(url)} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or parts.username is not None:
            raise InvalidRequest(f"a picture's URL must be http or https, got {shown(url)}")
        if host not in self._hosts:
            raise InvalidRequest(
                f"pictures are not fetched from {shown(host)}: the operator has not allowed it"
            )
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = quote(target, safe=_UNQUOTED)
        return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=target)


def _as_ascii(host: str) -> str:
    """A host's name as it is looked up, in one form. Raises ValueError."""
    return host.encode("idna").decode().lower().rstrip(".")


def _get(
    pool: httpcore.ConnectionPool, url: httpcore.URL, max_bytes: int
) -> tuple[str | None, bytes]:
    """Returns (where a redirect leads, b"") or (None, the body). Raises InvalidRequest."""
    name = shown(bytes(url).decode())
    headers = {"user-agent": "radixserve", "accept": "image/*", "accept-encoding": "identity"}
    with pool.stream("GET", url, headers=list(headers.items())) as response:
        answered = {key.decode("latin-1").lower(): value for key, value in response.headers}
        if response.status in _REDIRECTS and "location" in answered:
            return answered["location"].decode("latin-1"), b""
        if response.status != 200:
            raise InvalidRequest(f"the picture {name} is answered {response.status}")
        parts, size = [], 0
        for part in response.iter_stream():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise InvalidRequest(f"the picture {name} has more than {max_bytes} bytes")
        return None, b"".join(parts)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. Of an IPv6 address that carries an IPv4 one,
    that is checked."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        packed = ip.packed
        if ip in _NAT64 or ip.ipv4_mapped is not None:
            ip = IPv4Address(packed[12:])
        elif ip not in _UNICAST or packed[8:12] in _ISATAP:
            return False
    if ip.is_multicast or any(ip in block for block in _RESERVED):
        return False
    return ip.is_global


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
        for number, address in enumerate(addresses, 1):
            left = _left(self._deadline) / (len(addresses) + 1 - number)
            try:
                stream = self._sockets.connect_tcp(
                    address, port, left, local_address, socket_options
                )
            except (httpcore.NetworkError, httpcore.ConnectTimeout):  # no route to IPv6, for one
                if number == len(addresses):
                    raise
            else:
                return _TimedStream(stream, self._deadline)
        raise OSError("a host without addresses")


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
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        finally:
            _LOOK_UPS.release()
        return list(dict.fromkeys(str(address[4][0]) for address in addresses))

    if not _LOOK_UPS.acquire(timeout=_left(deadline)):
        raise TimeoutError("other look-ups of hosts hang")
    return call_in_thread("radixserve-pictures", look_up).result(_left(deadline))


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
