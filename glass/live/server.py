"""The local server of `python explore.py`: it serves one page, and answers the page's requests.

Only the page may ask: the server listens on 127.0.0.1 only, the first part of every path is a
random token, and the `Host` and `Origin` headers must be the server's, so that no other site can
reach it through the reader's browser (DNS rebinding, cross-site requests). A request never names a
file.
"""

import hmac
import io
import json
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from common.errors import UserError
from glass.live.frames import encode_error, encode_frame
from glass.live.jobs import Compute, Jobs, Requests, TooManyJobs

ADDRESS = "127.0.0.1"
TOKEN_BYTES = 16
TIMEOUT_SECONDS = 10.0  # to send a request, and to receive a frame
MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 1_000_000
POLL_SECONDS = 0.05  # between two checks that the client still waits

FRAMES_TYPE = "application/octet-stream"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
REASONS = {
    HTTPStatus.BAD_REQUEST: "The request is malformed.",
    HTTPStatus.FORBIDDEN: "Open the address that explore.py has printed, with its port.",
    HTTPStatus.NOT_FOUND: "There is no such page or request.",
    HTTPStatus.METHOD_NOT_ALLOWED: "Only GET of the page and POST of its requests are allowed.",
    HTTPStatus.LENGTH_REQUIRED: "The request needs a Content-Length.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: f"A request may have {MAX_BODY_BYTES:,} bytes at most.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Too many requests are waiting; try again later.",
}


class Refusal(Exception):
    """A request that gets only a status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


class Server(ThreadingTCPServer):
    """Answers each connection in a thread of its own; a connection has one request."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # a port is free again at once after the command ends
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, page: Callable[[], str], requests: Requests, jobs: Jobs, port: int, timeout: float
    ) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.page = page
        self.requests = requests
        self.jobs = jobs
        self.client_timeout = timeout
        self.port = self.server_address[1]
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.address = f"http://{ADDRESS}:{self.port}/{self.token}/"
        self.hosts = (f"{ADDRESS}:{self.port}", f"localhost:{self.port}")
        self._connections: set[socket.socket] = set()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection may be served; refuse it if there are too many."""
        if len(self._connections) < MAX_CONNECTIONS:
            self._connections.add(request)
            return True
        status = HTTPStatus.SERVICE_UNAVAILABLE
        answer = f"HTTP/1.0 {status.value} {status.phrase}\r\n\r\n{REASONS[status]}\n"
        with suppress(OSError):
            request.send(answer.encode())
        return False

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.discard(request)
        super().close_request(request)


class RequestReader(io.RawIOBase):
    """Reads from a socket, with one deadline for the whole request."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        """Return True, as every file that can be read must."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; raise `TimeoutError` after the deadline."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """Answers the request of one connection."""

    server: Server

    def setup(self) -> None:
        """Limit the time in which the whole request must arrive."""
        super().setup()
        reader = RequestReader(self.connection, self.server.client_timeout)
        self.rfile = io.BufferedReader(reader)

    def handle(self) -> None:
        """Answer the request, unless the client is gone or too slow."""
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """Send the page."""
        try:
            if self._allowed_path() != "":
                raise Refusal(HTTPStatus.NOT_FOUND)
            page = self.server.page().encode()
            self._start_answer(HTTPStatus.OK, "text/html; charset=utf-8")
            self.wfile.write(page)
        except Refusal as refusal:
            self.send_error(refusal.status)

    def do_POST(self) -> None:
        """Answer a request of the page by a stream of frames."""
        try:
            if self._allowed_path() != "ask":
                raise Refusal(HTTPStatus.NOT_FOUND)
            if self._header("Origin") != f"http://{self._header('Host')}":
                raise Refusal(HTTPStatus.FORBIDDEN)
            name, parameters = self._read_request()
            self._answer_request(name, parameters)
        except Refusal as refusal:
            self.send_error(refusal.status)

    def _header(self, name: str) -> str | None:
        """Return a header, or None if it is absent or repeated."""
        values = self.headers.get_all(name, [])
        return values[0] if len(values) == 1 else None

    def _allowed_path(self) -> str:
        """Return the path after the token; raise Refusal if the host or the token is wrong."""
        token, _, path = self.path.removeprefix("/").partition("/")
        is_token = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not is_token or self._header("Host") not in self.server.hosts:
            raise Refusal(HTTPStatus.FORBIDDEN)
        return path

    def _read_request(self) -> tuple[str, dict[str, Any]]:
        length = self.headers.get("Content-Length")
        if length is None or "Transfer-Encoding" in self.headers:
            raise Refusal(HTTPStatus.LENGTH_REQUIRED)
        if self._header("Content-Length") is None or not (length.isascii() and length.isdigit()):
            raise Refusal(HTTPStatus.BAD_REQUEST)
        if len(length) > len(str(MAX_BODY_BYTES)) or int(length) > MAX_BODY_BYTES:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(int(length))
        try:
            parameters = json.loads(body)
        except (ValueError, RecursionError):  # the latter if it is nested too deeply
            raise Refusal(HTTPStatus.BAD_REQUEST) from None
        name = parameters.pop("request", None) if isinstance(parameters, dict) else None
        if not isinstance(name, str):
            raise Refusal(HTTPStatus.BAD_REQUEST)
        return name, parameters

    def _answer_request(self, name: str, parameters: dict[str, Any]) -> None:
        requests = self.server.requests
        if name in requests.immediate:
            frame = _answer_now(requests.immediate[name], parameters)
            self._start_answer(HTTPStatus.OK, FRAMES_TYPE)
            self.wfile.write(frame)
        elif name in requests.handlers:
            self._run_job(partial(requests.handlers[name], parameters))
        else:
            raise Refusal(HTTPStatus.NOT_FOUND)

    def _run_job(self, compute: Compute) -> None:
        """Submit a job and send its frames; cancel it if the client is gone or too slow."""
        try:
            job = self.server.jobs.submit(compute)
        except TooManyJobs:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE) from None
        try:
            self._start_answer(HTTPStatus.OK, FRAMES_TYPE)
            while not self._is_client_gone():
                with suppress(queue.Empty):
                    frame = job.frames.get(timeout=POLL_SECONDS)
                    if frame is None:
                        break
                    self.wfile.write(frame)
        finally:
            job.cancel()

    def _is_client_gone(self) -> bool:
        """Return whether the client has closed its connection, or sends more than its request."""
        is_readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(is_readable)

    def _start_answer(self, status: HTTPStatus, content_type: str) -> None:
        self.connection.settimeout(self.server.client_timeout)
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request in one sentence; http.server also calls this."""
        status = HTTPStatus(code)
        if status == HTTPStatus.NOT_IMPLEMENTED:  # http.server's answer to an unknown method
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._start_answer(status, "text/plain; charset=utf-8")
        if self.command != "HEAD":
            self.wfile.write(f"{REASONS.get(status, status.phrase)}\n".encode())

        # Closing while there is unread input would reset the connection and lose the answer.
        self.connection.shutdown(socket.SHUT_WR)
        while self.rfile.read1(65536):
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request's line has the token."""


def _answer_now(answer: Callable[[dict[str, Any]], object], parameters: dict[str, Any]) -> bytes:
    try:
        return encode_frame("answer", answer(parameters))
    except Exception as e:
        return encode_error(e)


def serve(
    page: Callable[[], str],
    requests: Requests,
    jobs: Jobs,
    port: int,
    timeout: float = TIMEOUT_SECONDS,
) -> Server:
    """Start the server in a thread of its own; port 0 is a free one.

    `page` renders the page, in threads of the server. A client has `timeout` seconds to send a
    request, and to receive a frame.
    """
    try:
        server = Server(page, requests, jobs, port, timeout)
    except OSError as e:
        raise UserError(
            f"port={port} cannot be used ({e.strerror}); choose another, or port=0 for a free one"
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
