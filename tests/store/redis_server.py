"""`RedisServer`: a server in this process with the commands of Redis that a store needs."""

from __future__ import annotations

import fnmatch
import socketserver
import threading
from typing import BinaryIO

Reply = bytes | int | str | list["Reply"] | None


class RedisServer(socketserver.ThreadingTCPServer):
    """GET, SET, GETRANGE and so on over a dictionary. `with` starts and ends it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.values: dict[bytes, bytes] = {}
        self.fault = ""  # "error": each command is answered with one; "hang": with nothing
        self.let_go = threading.Event()  # ends what hangs

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"

    def __enter__(self) -> RedisServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.shutdown()
        self.server_close()

    def answer(self, name: str, arguments: list[bytes]) -> Reply:
        """The reply to a command."""
        values = self.values
        if name in ("PING", "SELECT", "CLIENT"):
            return "OK"
        if name == "SCAN":  # the client has asked for MATCH pattern
            pattern = arguments[arguments.index(b"MATCH") + 1].decode()
            return [b"0", [key for key in values if fnmatch.fnmatchcase(key.decode(), pattern)]]
        if name == "OBJECT":
            return 5  # IDLETIME
        key = arguments[0]
        if name == "SET":
            values[key] = arguments[1]
            return "OK"
        if name == "GETRANGE":
            begin, end = map(int, arguments[1:])
            return values.get(key, b"")[begin : end + 1]
        if name == "DEL":
            return 1 if values.pop(key, None) is not None else 0
        replies: dict[str, Reply] = {
            "GET": values.get(key),
            "EXISTS": int(key in values),
            "STRLEN": len(values.get(key, b"")),
        }
        return replies[name]


class _Connection(socketserver.StreamRequestHandler):
    server: RedisServer

    def handle(self) -> None:
        while (command := _read_command(self.rfile)) is not None:
            name = command[0].decode().upper()
            if self.server.fault == "hang":
                self.server.let_go.wait(60)
                return
            elif self.server.fault == "error":
                self.wfile.write(b"-OOM command not allowed when used memory > 'maxmemory'\r\n")
            else:
                self.wfile.write(_encode(self.server.answer(name, command[1:])))


def _read_command(file: BinaryIO) -> list[bytes] | None:
    """An array of strings; None at the end."""
    line = file.readline()
    if not line:
        return None
    command = []
    for _ in range(int(line[1:])):
        size = int(file.readline()[1:])
        command.append(file.read(size))
        file.read(2)
    return command


def _encode(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, str):
        return b"+%s\r\n" % reply.encode()
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(_encode, reply))
