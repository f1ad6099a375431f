"""A proxy that keeps what clients ask a server and what it answers, without what names itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# Ids, which differ between two equal runs.
_NAMES = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{64}\b"
    r"|\b(?:[a-z]+)_[0-9A-Za-z]{16,}"  # msg_..., toolu_..., call_..., chatcmpl_...
    r"|\bchatcmpl-[0-9A-Za-z]+|\bcall-[0-9A-Za-z]+|\bses_[0-9A-Za-z]+"
    r"|(?<=Chunk ID: )[0-9a-f]+"
)
_TIMES = re.compile(  # two may be equal in one run and differ in the other
    r"(?<=Wall time: )[0-9.]+|\d{4}-\d\d-\d\dT\d\d:\d\d:[0-9.]+Z?"
    r"|\b1[0-9]{9}(?:[0-9]{3})?\b"  # seconds or milliseconds since 1970
)
_HOP = ("connection", "transfer-encoding", "content-length", "accept-encoding", "host")


class Exchange(NamedTuple):
    """A request and its answer, as JSON in which each id is its number of first appearance."""

    path: str
    request: str
    answer: str


class Recorder:
    """Listens on `url`, and passes all on to the server at `port` of loopback."""

    def __init__(self, port: int) -> None:
        self.exchanges: list[Exchange] = []
        recorder, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name: value for name, value in self.headers.items()
                           if name.lower() not in _HOP}  # fmt: skip
                server = http.client.HTTPConnection("127.0.0.1", port)
                with contextlib.closing(server):
                    server.request(self.command, self.path, body or None, headers)
                    answer = server.getresponse()
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in _HOP:
                            self.send_header(name, value)
                    self.send_header("connection", "close")
                    self.end_headers()
                    self.close_connection = True
                    pieces = []
                    while piece := answer.read1(1 << 16):
                        pieces.append(piece)
                        self.wfile.write(piece)
                        self.wfile.flush()
                if self.command == "POST":
                    with lock:
                        recorder.note(self.path, body, b"".join(pieces))

            do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = _pass_on  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def note(self, path: str, request: bytes, answer: bytes) -> None:
        names: dict[str, str] = {}

        def shown(value: Any) -> str:
            text = json.dumps(value, sort_keys=True, ensure_ascii=False)
            text = _TIMES.sub("<time>", text)
            return _NAMES.sub(lambda found: names.setdefault(found[0], f"<{len(names)}>"), text)

        asked = json.loads(request)
        self.exchanges.append(Exchange(path, shown(asked), shown(said(answer.decode()))))

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def said(answer: str) -> Any:
    """What an answer says, in whatever pieces it came: its texts, thoughts and calls, why it ended,
    and how many tokens it has."""
    if not answer.startswith(("event:", "data:", ":")):
        return _without_times(json.loads(answer)) if answer else None
    events = list(_events(answer))
    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete"):
            return _without_times(event["response"])
    joined: dict[str, str] = {}
    for event in events:
        _join(event, (), joined)
    return joined


def _events(answer: str) -> Iterator[dict[str, Any]]:
    for line in answer.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("created", "created_at", "completed_at", "metrics")
        return {name: _without_times(each) for name, each in value.items() if name not in left_out}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _join(value: Any, place: tuple[str, ...], joined: dict[str, str]) -> None:
    """Append each text of an event to those at the same place of the events before; a list's item
    is found by its "index". Other values are kept as they come last."""
    if isinstance(value, dict):
        if "index" in value:
            place = (*place, str(value["index"]))
        for name, each in value.items():
            if name not in ("created", "index", "metrics"):
                _join(each, (*place, name), joined)
    elif isinstance(value, list):
        for each in value:
            _join(each, place, joined)
    elif isinstance(value, str) and place[-1] in _PIECES:
        joined["/".join(place)] = joined.get("/".join(place), "") + value
    elif value is not None:
        joined["/".join(place)] = json.dumps(value)


# Fields of events whose texts are pieces of a longer one.
_PIECES = ("text", "content", "partial_json", "arguments", "thinking", "reasoning_content",
           "signature")  # fmt: skip
