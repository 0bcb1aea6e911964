"""A Hub on the loopback interface that misbehaves on purpose, for tests.

It speaks what huggingface_hub asks for (a model's information with its files' metadata) and what every client does
(resolve addresses; large files redirect to another origin, as the real one's do). A plan says what goes wrong: for a
path, a list of faults, one a request for its body, in order; after that all is well.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40
LFS_FROM = 1024  # files from this length on are in large file storage, as are all shards
PAGE = b"<!DOCTYPE html>\n<title>\x1b[31mLog in</title>" + b"." * 16_000


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request for a body.

    Attributes:
        status: this status with an empty body.
        drop_at: the connection is closed after so many bytes of the body.
        stall_at: nothing more comes after so many bytes.
        trickle: one byte each so many seconds.
        ignore_range: all of the file, status 200, although a range was asked for.
        ignore_condition: the range that was asked for, although it was asked for under another etag.
        shift: a range that begins so many bytes later than asked for, and says so.
        flip: this byte of the file has another value.
        body: another body, with status 200 and its own length.
        headers: sent in addition, or in the place of those of that name; None leaves one out.
        gzip: the body is compressed.
        no_length: the body ends with the connection.
        at_hub: the fault happens at the resolve address, not where it redirects to.
    """

    status: int | None = None
    drop_at: int | None = None
    stall_at: int | None = None
    trickle: float | None = None
    ignore_range: bool = False
    ignore_condition: bool = False
    shift: int = 0
    flip: int | None = None
    body: bytes | None = None
    headers: dict[str, str | None] = field(default_factory=dict)
    gzip: bool = False
    no_length: bool = False
    at_hub: bool = False


@dataclass
class Request:
    """A request that was seen."""

    path: str
    range: str | None
    headers: dict[str, str]
    sent: int = 0


class HubServer:
    """See :func:`serve`. ``files`` and ``faults`` may be changed between requests."""

    def __init__(self, files: dict[str, bytes], repository: str = "owner/model") -> None:
        self.repository = repository
        self.files = files
        self.commit = COMMIT
        self.faults: dict[str, list[Fault]] = {}
        self.every: Callable[[str], Fault | None] = lambda path: None
        self.listing_faults: list[int | bytes] = []
        self.listed: Callable[[list[dict[str, Any]]], Any] = lambda siblings: siblings
        self.token: str | None = None
        self.pace = 0.0  # seconds of rest between two pieces of a body
        self.piece = 64 << 10
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.hub = self._start()
        self.store = self._start()  # another port is another origin
        self.endpoint = f"http://127.0.0.1:{self.hub.server_address[1]}"

    @property
    def sent(self) -> int:
        """Bytes of bodies that went out."""
        with self.lock:
            return sum(request.sent for request in self.requests)

    def bodies(self, path: str) -> list[Request]:
        """Requests for the body of a file, at its last address."""
        with self.lock:
            return [request for request in self.requests if request.path == path]

    def is_lfs(self, path: str) -> bool:
        return len(self.files[path]) >= LFS_FROM or path.endswith(".safetensors")

    def siblings(self) -> list[dict[str, Any]]:
        found = []
        for path, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_oid(data)}
            if self.is_lfs(path):
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            found.append(entry)
        return found

    def close(self) -> None:
        self.closing.set()
        for server in (self.hub, self.store):
            server.shutdown()
            server.server_close()

    def _start(self) -> ThreadingHTTPServer:
        outer = self

        class Handler(_Handler):
            hub = outer

        server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server


@contextmanager
def serve(files: dict[str, bytes], **options: Any) -> Iterator[HubServer]:
    """A hub with one repository of these files, for the duration of a ``with`` block."""
    server = HubServer(dict(files), **options)
    try:
        yield server
    finally:
        server.close()


def git_oid(data: bytes) -> str:
    """The name that git gives to a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        # Small buffers: what was counted as sent is not far ahead of what was received.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.close_connection = True
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if match := re.fullmatch(rf"/api/models/{hub.repository}(?:/revision/(.+))?", path):
            self._listing(match[1] or "main")
        elif match := re.fullmatch(rf"/{hub.repository}/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2])
        elif (match := re.fullmatch(r"/store/(.+)", path)) and match[1] in hub.files:
            self._body(match[1], self._fault(match[1]))
        else:
            self._plain(404, b"Not Found", {"X-Error-Code": "RepoNotFound"})

    def _fault(self, path: str) -> Fault:
        with self.hub.lock:
            waiting = self.hub.faults.get(path)
            return (waiting.pop(0) if waiting else self.hub.every(path)) or Fault()

    def _permitted(self) -> bool:
        token = self.hub.token
        return token is None or self.headers.get("authorization") == f"Bearer {token}"

    def _listing(self, revision: str) -> None:
        hub = self.hub
        if not self._permitted():
            self._plain(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        fault = hub.listing_faults.pop(0) if hub.listing_faults else None
        if isinstance(fault, int):
            self._plain(fault, b"", {"Retry-After": "0"})
        elif fault is not None:
            self._plain(200, fault, {"Content-Type": "text/html"})
        elif revision not in ("main", hub.commit, "refs/pr/1"):
            self._plain(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            document = {"id": hub.repository, "sha": hub.commit, "siblings": hub.listed(hub.siblings())}
            self._plain(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _resolve(self, commit: str, path: str) -> None:
        hub = self.hub
        if not self._permitted():
            self._plain(401, b"", {"X-Error-Code": "GatedRepo"})
        elif path not in hub.files or commit != hub.commit:
            self._plain(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            peek = (hub.faults.get(path) or [Fault()])[0]
            data = hub.files[path]
            if hub.is_lfs(path) and not peek.at_hub:
                port = hub.store.server_address[1]
                headers = {
                    "Location": f"http://127.0.0.1:{port}/store/{path}?signed=1",
                    "X-Repo-Commit": hub.commit,
                    "X-Linked-Size": str(len(data)),
                    "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                }
                self._plain(302, b"Found", headers)
            else:
                self._body(path, self._fault(path))

    def _plain(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _body(self, path: str, fault: Fault) -> None:
        hub = self.hub
        data = hub.files[path] if fault.body is None else fault.body
        seen = Request(path, self.headers.get("range"), {key.lower(): value for key, value in self.headers.items()})
        with hub.lock:
            hub.requests.append(seen)
        if fault.flip is not None:
            data = data[: fault.flip] + bytes([data[fault.flip] ^ 1]) + data[fault.flip + 1 :]
        etag = fault.headers.get("ETag") or f'"{hashlib.md5(data).hexdigest()}"'
        headers: dict[str, str | None] = {"ETag": etag, "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
        status, start, stop = 200, 0, len(data)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.range or "")
        asked = match is not None and (fault.ignore_condition or self.headers.get("if-range", etag) == etag)
        if fault.status is not None:
            status, data, stop = fault.status, b"", 0
        elif asked and match is not None and not fault.ignore_range and fault.body is None:
            start = int(match[1]) + fault.shift
            stop = min(len(data), int(match[2]) + 1 if match[2] else len(data))
            status = 206 if start < stop else 416
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}" if status == 206 else f"*/{len(data)}"
        body = data[start:stop]
        if fault.gzip:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        if not fault.no_length:
            headers["Content-Length"] = str(len(body))
        headers["Connection"] = "close"
        self.send_response(status)
        for name, value in {**headers, **fault.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self._send(body, fault, seen)

    def _send(self, body: bytes, fault: Fault, seen: Request) -> None:
        hub = self.hub
        end = next((at for at in (fault.drop_at, fault.stall_at) if at is not None), len(body))
        step = 1 if fault.trickle is not None else hub.piece
        with suppress(OSError):
            for at in range(0, min(end, len(body)), step):
                piece = body[at : min(at + step, end)]
                self.wfile.write(piece)
                with hub.lock:
                    seen.sent += len(piece)
                if hub.closing.wait(fault.trickle or 0) or (hub.pace and hub.closing.wait(hub.pace)):
                    return
            if fault.stall_at is not None:
                self.wfile.flush()
                hub.closing.wait(60)
            time.sleep(0)
