"""The local server of `python explore.py`: it serves one page, and answers the page's requests.

Only the page may ask: the server listens on 127.0.0.1 only, the first part of every path is a
random token, and the `Host` and `Origin` headers must be the server's, so that no other site can
reach it through the reader's browser (DNS rebinding, cross-site requests). A request never names a
file.
"""

import secrets
import select
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from common.errors import UserError

ADDRESS = "127.0.0.1"
TOKEN_BYTES = 16
FRAMES_TYPE = "application/octet-stream"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# Yields the frames that answer the body of a request, until the client is gone.
Answer = Callable[[bytes, Callable[[], bool]], Generator[bytes, None, None]]


class Server(ThreadingTCPServer):
    """Answers each connection in a thread of its own; a connection has one request."""

    daemon_threads = True
    allow_reuse_address = True  # a port is free again at once after the command ends
    request_queue_size = 64  # connections of a browser that wait for their threads
    page: Callable[[], str]
    answer: Answer

    def __init__(self, port: int) -> None:
        """Listen on a port; 0 is a free one. Raise `UserError` if it cannot be used."""
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as e:
            raise UserError(
                f"port={port} cannot be used ({e.strerror}): choose another, or leave it out"
            ) from None
        port = self.server_address[1]
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.address = f"http://{ADDRESS}:{port}/{self.token}/"
        self.hosts = (f"{ADDRESS}:{port}", f"localhost:{port}")
        self.refusal = (
            f"the page opens only at the printed address, on {' or '.join(self.hosts)}, in a tab "
            "of its own: no proxy or frame of a notebook passes its requests on; on another "
            f"machine, first run ssh -L {port}:localhost:{port} HOST"
        )

    def serve(self, page: Callable[[], str], answer: Answer) -> None:
        """Serve the HTML of `page`, and `answer` its requests, until Ctrl-C; free the port."""
        self.page = page
        self.answer = answer
        with self:
            self.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """Answers the request of one connection."""

    server: Server
    timeout = 10.0  # seconds without a byte of the request, or to send a frame
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(message)s: %(explain)s\n"

    def handle(self) -> None:
        """Answer the request, unless the client is gone."""
        with suppress(ConnectionError):
            super().handle()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error without the message of the library, which repeats what was requested."""
        super().send_error(code, explain=explain)

    def do_GET(self) -> None:
        """Send the page."""
        if self._allowed_path() != "":
            self.send_error(HTTPStatus.FORBIDDEN, explain=self.server.refusal)
            return
        page = self.server.page().encode()
        self._start_answer("text/html; charset=utf-8")
        self.wfile.write(page)

    def do_POST(self) -> None:
        """Answer a request of the page by a stream of frames."""
        is_same_origin = self.headers["Origin"] == f"http://{self.headers['Host']}"
        if self._allowed_path() != "ask" or not is_same_origin:
            self.send_error(HTTPStatus.FORBIDDEN, explain=self.server.refusal)
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
            return
        body = self.rfile.read(int(length))
        self._start_answer(FRAMES_TYPE)
        with closing(self.server.answer(body, self._is_client_gone)) as frames:
            for frame in frames:
                self.wfile.write(frame)

    def _allowed_path(self) -> str | None:
        """Return the path after the token; None if the host or the token is wrong."""
        token, _, path = self.path.removeprefix("/").partition("/")
        is_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        return path if is_token and self.headers["Host"] in self.server.hosts else None

    def _is_client_gone(self) -> bool:
        """Return whether the client has closed its connection, or sends more than its request."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def _start_answer(self, content_type: str) -> None:
        self.send_response_only(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request's line has the token."""
