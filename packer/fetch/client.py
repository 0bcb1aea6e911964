"""Single HTTP requests: redirects, proxies, no compression, and connections that are given up when they stall.

The standard library's client is used for what it does well, one request on one connection. Credentials are sent to
the origin of the first address only, never to where it redirects. A second thread watches each connection: it ends
the wait when the caller wants to stop or the other side goes quiet, which a timeout a read cannot do for a server
that sends one byte now and then.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from formats.errors import EnvironmentProblem, Interrupted
from formats.starting import start
from packer.fetch.retry import Limits, Trouble

CHUNK_BYTES = 256 << 10  # received at a time, and lost at most when the process is killed
MAX_REDIRECTS = 10

_REDIRECTS = (301, 302, 303, 307, 308)
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Hop:
    """One answer on the way: status and headers, names in lower case."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """The last answer, its body unread.

    Attributes:
        status: of the last answer.
        headers: of the last answer, names in lower case.
        hops: all answers, the redirects first.
        host: who gave the last answer, for messages.
        foreign: whether that was another origin than the one that was asked.
        read: at most so many bytes of the body, as soon as there are any; none at its end.
    """

    status: int
    headers: Mapping[str, str]
    hops: tuple[Hop, ...]
    host: str
    foreign: bool
    read: Callable[[int], bytes]


@contextmanager
def request(url: str, headers: Mapping[str, str], *, limits: Limits, stop: threading.Event) -> Iterator[Answer]:
    """GET ``url`` in a ``with`` block.

    Args:
        url: http or https.
        headers: sent along; ``authorization`` to the origin of ``url`` only.
        limits: when to give up.
        stop: set it to end the wait.

    Raises:
        Trouble: no connection, a broken or a stalled one, also out of ``read``.
        EnvironmentProblem: what trying again cannot mend: a certificate that is not trusted, a redirect to nowhere.
        Interrupted: ``stop`` was set.
    """
    origin = _origin(urlsplit(url))
    hops: list[Hop] = []
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, origin)
        own = _origin(parts) == origin
        sent = {name: value for name, value in headers.items() if own or name.lower() != "authorization"}
        with _exchange(parts, sent, limits=limits, stop=stop) as (response, read):
            hop = Hop(response.status, {name.lower(): value for name, value in response.getheaders()})
            hops.append(hop)
            location = hop.headers.get("location")
            if hop.status not in _REDIRECTS or location is None:
                host = parts.hostname or "?"
                yield Answer(hop.status, hop.headers, tuple(hops), host, not own, read)
                return
        try:
            url = urljoin(url, location)
        except ValueError:
            raise Trouble(f"redirect to an address that is none: {location[:80]!r}") from None
    raise EnvironmentProblem("too many redirects", where=urlsplit(url).hostname, expected=f"at most {MAX_REDIRECTS}")


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, (parts.hostname or "").lower(), port or {"https": 443}.get(parts.scheme, 80)


def _checked(url: str, origin: tuple[str, str, int]) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and _origin(parts)[2] > 0
    except ValueError:
        good = False
    if not good:
        raise EnvironmentProblem("not an address that can be fetched", where=url[:200])
    if origin[0] == "https" and parts.scheme != "https":
        raise EnvironmentProblem("redirected from https to http, which is refused", where=parts.hostname)
    return parts


@contextmanager
def _exchange(
    parts: SplitResult, headers: Mapping[str, str], *, limits: Limits, stop: threading.Event
) -> Iterator[tuple[http.client.HTTPResponse, Callable[[int], bytes]]]:
    """One request on a connection of its own; everything that can go wrong on it becomes :class:`Trouble`."""
    connection, target, extra = _connection(parts, limits)
    if stop.is_set():
        raise Interrupted("stopped")
    watch: _Watch | None = None
    try:
        with _translated(parts, lambda: watch, stop):
            connection.connect()
            sock = connection.sock
            sock.settimeout(limits.stall_seconds + 5.0)  # the watch is quicker; this is for a watch that died
            watch = _Watch(sock, limits, stop)
            with watch.waiting():
                fixed = {"Accept-Encoding": "identity", "Connection": "close"}
                connection.request("GET", target, headers={**headers, **extra, **fixed})
                response = connection.getresponse()

        def read(length: int) -> bytes:
            with _translated(parts, lambda: watch, stop):
                with watch.waiting() as arrived:
                    data = response.read1(min(length, CHUNK_BYTES))
                    arrived(len(data))
                if not data and watch.ended is not None:  # our own shutdown of the socket looks like an end of file
                    raise ConnectionError
                return data

        try:
            yield response, read
        finally:
            response.close()
    finally:
        if watch is not None:
            watch.close()
        connection.close()


@contextmanager
def _translated(parts: SplitResult, watch: Callable[[], _Watch | None], stop: threading.Event) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise EnvironmentProblem(
            f"certificate is not trusted: {error.verify_message}",
            where=parts.hostname,
            hint="set SSL_CERT_FILE if a proxy of your own signs certificates here",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        if stop.is_set():
            raise Interrupted("stopped") from None
        guard = watch()
        if guard is not None and guard.ended is not None:
            raise Trouble(f"{parts.hostname}: {guard.ended}") from None
        text = str(error) or type(error).__name__
        raise Trouble(f"{parts.hostname}: {text[:200]}") from None


def _connection(parts: SplitResult, limits: Limits) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection not yet made, what to ask it for, and headers for a proxy; the usual variables name the proxy."""
    host, port = parts.hostname or "", _origin(parts)[2]
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    proxy = None
    if not urllib.request.proxy_bypass(host):
        address = urllib.request.getproxies().get(parts.scheme)
        proxy = urlsplit(address if "://" in address else f"http://{address}") if address else None
    if proxy is not None and (proxy.scheme not in ("http", "") or not proxy.hostname):
        raise EnvironmentProblem("proxy of a kind that is not supported", where=proxy.scheme, expected="http")
    seconds = limits.connect_seconds
    there, door = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
    connection: http.client.HTTPConnection
    if secure:
        connection = http.client.HTTPSConnection(
            there, door, timeout=seconds, context=ssl.create_default_context(), blocksize=CHUNK_BYTES
        )
    else:
        connection = http.client.HTTPConnection(there, door, timeout=seconds, blocksize=CHUNK_BYTES)
    if proxy is None:
        return connection, target, {}
    extra = {}
    if proxy.username is not None:
        secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        extra["Proxy-Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
    if secure:
        connection.set_tunnel(host, port, headers=extra)
        return connection, target, {}
    shown = f"[{host}]" if ":" in host else host
    return connection, f"http://{shown}:{port}{target}", extra


class _Watch:
    """Ends a connection by shutting it down when it stalls or the caller wants to stop; ``ended`` says why."""

    def __init__(self, sock: socket.socket, limits: Limits, stop: threading.Event) -> None:
        self.ended: str | None = None
        self._sock = sock
        self._limits = limits
        self._stop = stop
        self._lock = threading.Lock()
        self._since: float | None = None  # when the present wait for bytes began
        self._waited = 0.0  # seconds of waiting, and bytes, since the last stall_bytes came together
        self._bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fetch-watch", daemon=True)
        start(self._thread)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[int], None]]:
        """Around every wait for the other side; call what it gives with the bytes that came."""
        with self._lock:
            self._since = time.monotonic()
        try:
            yield self._arrived
        finally:
            with self._lock:
                self._waited += time.monotonic() - self._since
                self._since = None

    def _arrived(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if self._bytes >= self._limits.stall_bytes:
                self._bytes, self._waited, self._since = 0, 0.0, time.monotonic()

    def _run(self) -> None:
        limits = self._limits
        while not self._done.wait(_POLL_SECONDS):
            with self._lock:
                now = 0.0 if self._since is None else time.monotonic() - self._since
                stalled = self._since is not None and self._waited + now > limits.stall_seconds
                count = self._bytes
            if self._stop.is_set():
                self.ended = "stopped"
            elif stalled:
                self.ended = f"stalled: {count} bytes in {limits.stall_seconds:g} s"
            if self.ended is not None:
                with suppress(OSError):  # of the plain socket: TLS would want to talk first
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
                return

    def close(self) -> None:
        """End the watching."""
        self._done.set()
        self._thread.join()
