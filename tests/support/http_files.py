"""An HTTP server for files in memory, which knows ranges and versions, or not, and hangs up where a test says. For this
machine only."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class HttpFiles:
    """The server, while its ``with`` lasts.

    Attributes:
        files: The bytes by path; with ``queries`` the query is a part of the path.
        asked: What was requested by GET: the path, and the byte from which on.
        cut: Called with the number of a GET and its bytes; returns how many of them come before the server hangs up, or
            None.
        before: Called before each answer, with its number.
        encoded: Called with what the client accepts and the bytes of a file; returns the Content-Encoding, or nothing,
            and the bytes to send.
    """

    def __init__(self, *, ranges: bool = True, versions: bool = True, queries: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.cut: Callable[[int, bytes], int | None] = lambda number, body: None
        self.before: Callable[[int], Any] = lambda number: None
        self.encoded: Callable[[str, bytes], tuple[str, bytes]] = lambda accepted, body: ("", body)
        files = self

        class Handler(BaseHTTPRequestHandler):
            # One request to a connection, as HTTP/1.0 has it, so that nothing stays open.
            def do_HEAD(self) -> None:
                self._answer(200, b"", len(self._body()))

            def do_GET(self) -> None:
                body, begin, status = self._body(), 0, 200
                if ranges and (asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
                    begin, status = int(asked[1]), 206
                    body = body[begin : int(asked[2]) + 1 if asked[2] else None]
                if self.headers.get("If-Match", self._tag()) != self._tag():
                    return self._answer(412, b"", 0)
                number = len(files.asked)
                files.asked.append((self.path, begin))
                files.before(number)
                cut = files.cut(number, body)
                self._answer(status, body[:cut], len(body))
                return None

            def _body(self) -> bytes:
                accepted = self.headers.get("Accept-Encoding", "")
                self.encoding, body = files.encoded(accepted, files.files.get(self._name(), b""))
                return body

            def _name(self) -> str:
                return self.path if queries else self.path.partition("?")[0]

            def _tag(self) -> str:
                return f'"{hashlib.md5(files.files.get(self._name(), b"")).hexdigest()}"'

            def _answer(self, status: int, body: bytes, length: int) -> None:
                self.send_response(404 if self._name() not in files.files else status)
                if versions:
                    self.send_header("ETag", self._tag())
                else:
                    self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                if self.encoding:
                    self.send_header("Content-Encoding", self.encoding)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[HttpFiles]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="http-files")
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
