"""A model hub on loopback: what huggingface_hub and `radixserve pull` ask the real one for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 10_000  # bytes from which a file is in LFS and has a sha256


class FakeHub:
    """Repositories are folders: `root/owner/name`. Made by `serve_hub`."""

    def __init__(self, root: Path, address: str) -> None:
        self.root, self.address = root, address
        self.ranges: list[str] = []  # the Range headers of downloads
        self.num_downloads = 0  # of large files
        self.cut_after: int | None = None  # the next download ends after so many bytes

    def files(self, repo: str) -> list[dict[str, Any]]:
        folder = self.root / repo
        return [
            _facts(path.relative_to(folder).as_posix(), path.read_bytes())
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]


@contextmanager
def serve_hub(root: Path) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(root, f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _facts(name: str, data: bytes) -> dict[str, Any]:
    git_id = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    facts: dict[str, Any] = {"name": name, "size": len(data), "oid": git_id}
    if len(data) >= LARGE:
        facts["sha256"] = hashlib.sha256(data).hexdigest()
    return facts


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/\w+)?", path):
            self._model(match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+/?", path):
            self._tree(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._send(404, b"{}")

    def _model(self, repo: str) -> None:
        if not (self.hub.root / repo).is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = []
        for file in self.hub.files(repo):
            lfs = {"size": file["size"], "sha256": file.get("sha256"), "pointerSize": 130}
            siblings.append(
                {
                    "rfilename": file["name"],
                    "size": file["size"],
                    "blobId": file["oid"],
                    **({"lfs": lfs} if "sha256" in file else {}),
                }
            )
        self._json({"id": repo, "sha": COMMIT, "private": False, "siblings": siblings})

    def _tree(self, repo: str) -> None:
        entries = []
        for file in self.hub.files(repo):
            lfs = {"oid": file.get("sha256"), "size": file["size"], "pointerSize": 130}
            entry = {"type": "file", "path": file["name"], "size": file["size"], "oid": file["oid"]}
            entries.append({**entry, **({"lfs": lfs} if "sha256" in file else {})})
        self._json(entries)

    def _file(self, repo: str, name: str) -> None:
        path = self.hub.root / repo / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data = path.read_bytes()
        facts = _facts(name, data)
        etag = facts.get("sha256", facts["oid"])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if "sha256" in facts:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        status, wanted = 200, self.headers.get("Range")
        if self.command == "GET" and "sha256" in facts:
            self.hub.num_downloads += 1
            if wanted:
                self.hub.ranges.append(wanted)
        if wanted and (match := re.fullmatch(r"bytes=(\d+)-", wanted)):
            begin = int(match[1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[begin:]
        self._send(status, data, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, self.hub.cut_after = self.hub.cut_after, None
        if cut is not None and len(data) > cut:
            self.wfile.write(data[:cut])
            self.close_connection = True
            return
        self.wfile.write(data)
