"""A proxy in front of an HTTP server that slows its answers, cuts them in the middle, refuses them, or hangs up. For
this machine only."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

REFUSAL = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
PER_CONNECTION = ("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding")


class Fault(NamedTuple):
    """What happens to one answer."""

    # it comes in pieces; ends in its body; is a 503, as S3 words it; or does not come
    kind: Literal["slow", "cut", "refuse", "reset"]
    pause_s: float = 0.01  # between two of the eight pieces of a slow answer
    share: float = 0.5  # of the body that comes before a cut


class FaultProxy:
    """The proxy; see `running`."""

    def __init__(self, upstream: int) -> None:
        # called with the number of each GET or HEAD, from 0 on
        self.faults: Callable[[int], Fault | None] = lambda number: None
        self.requests = 0
        self.given: dict[str, int] = {}  # how many faults of each kind
        self.connections = self.most_connections = 0  # open now, and at once
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        proxy = self

        class Handler(_Handler):
            def setup(self) -> None:
                super().setup()
                with proxy._lock:
                    proxy._sockets.add(self.connection)
                    proxy.connections += 1
                    proxy.most_connections = max(proxy.most_connections, proxy.connections)

            def finish(self) -> None:
                with contextlib.suppress(OSError):
                    super().finish()
                with proxy._lock:
                    proxy._sockets.discard(self.connection)
                    proxy.connections -= 1

            def fault(self) -> Fault | None:
                with proxy._lock:
                    number, proxy.requests = proxy.requests, proxy.requests + 1
                    fault = proxy.faults(number)
                    if fault is not None:
                        proxy.given[fault.kind] = proxy.given.get(fault.kind, 0) + 1
                return fault

        Handler.upstream = upstream
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        """Serve until the end of the block; then nothing is left of it."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="fault-proxy")
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            with self._lock:
                left = list(self._sockets)
            for one in left:
                with contextlib.suppress(OSError):
                    one.shutdown(2)
            self._server.server_close()  # waits for its threads


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = 0

    def fault(self) -> Fault | None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        fault = self.fault()
        if fault is not None and fault.kind == "reset":
            self.close_connection = True
            return
        if fault is not None and fault.kind == "refuse":
            self._answer(503, {"Content-Type": "application/xml"}, REFUSAL if self.command == "GET" else b"")
            return
        self._answer(*self._forwarded(), fault)

    def _forwarded(self) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream)
        try:
            upstream.request(self.command, self.path, headers=dict(self.headers))
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), str(len(body)))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in PER_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault is not None and fault.kind == "cut":
            body = body[: int(len(body) * fault.share)]
            self.close_connection = True
        size = max(1, -(-len(body) // 8)) if fault is not None and fault.kind == "slow" else len(body) or 1
        for begin in range(0, len(body), size):
            if fault is not None and fault.kind == "slow":
                time.sleep(fault.pause_s)
            self.wfile.write(body[begin : begin + size])

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
