"""The server answers its own page only, whatever else reaches its port, and never hangs."""

import http.client
import json
import socket
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from frame_reader import decode_frames
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from glass.live.jobs import MAX_WAITING_JOBS, Jobs
from glass.live.server import MAX_BODY_BYTES, MAX_CONNECTIONS, REASONS, serve

TIMEOUT = 0.5  # seconds, of the server
SECONDS = 10  # that no answer of a passing test takes
PAGE = "<!doctype html><title>né 日本</title>"
LARGE_PART_BYTES = 4_000_000  # more than what the system buffers of a connection


class CountingSession:
    """A session that counts instead of running a model."""

    def __init__(self, check_canceled):
        self.immediate = {"echo": self.echo, "broken": self.broken}
        self.handlers = {"count": self.count, "large": self.large, "spin": self.spin}
        self.check_canceled = check_canceled
        self.started = threading.Event()
        self.ended = threading.Event()  # that a job has ended, in whatever way

    def page(self):
        return PAGE

    def echo(self, parameters):
        if "error" in parameters:
            raise UserError(f"error={parameters['error']} was asked for")
        return parameters

    def broken(self, parameters):
        return parameters["missing"]

    def count(self, parameters):
        for n in range(parameters["to"]):
            yield {"n": n, "values": np.full(3, n, np.float16)}
        return parameters["to"]

    def large(self, parameters):
        try:
            for _ in range(100):
                yield np.zeros(LARGE_PART_BYTES // 4, np.float32)
        finally:
            self.ended.set()

    def spin(self, parameters):
        """Compute until canceled, as a model does that checks before each block."""
        self.started.set()
        try:
            while True:
                self.check_canceled()
                time.sleep(0.001)
        finally:
            self.ended.set()
        yield


class Client:
    """Talks to the server as the page does, unless told otherwise."""

    def __init__(self, server, session):
        self.server, self.session = server, session
        self.host = f"127.0.0.1:{server.port}"
        self.ask_path = f"/{server.token}/ask"
        self.headers = {"Host": self.host, "Origin": f"http://{self.host}"}

    def request(self, method="POST", path=None, body=b"", **headers):
        """Return the response and its body; a header that is None is not sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        with closing(connection):
            connection.putrequest(
                method, path or self.ask_path, skip_host=True, skip_accept_encoding=True
            )
            lengths = {"Content-Length": len(body)} if body else {}
            for name, value in (self.headers | lengths | headers).items():
                if value is not None:
                    connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response, response.read()

    def ask(self, request, **parameters):
        """Return the frames that answer a request."""
        body = json.dumps({"request": request, **parameters}).encode()
        response, answer = self.request(body=body)
        assert response.status == 200, answer
        return decode_frames(answer)

    def status(self, *args, **headers):
        """Return the status of a request that may be refused, and check what a refusal says."""
        response, answer = self.request(*args, **headers)
        if response.status != 200:
            assert response.getheader("Content-Type").startswith("text/plain")
            assert response.getheader("X-Content-Type-Options") == "nosniff"
            if args[:1] != ("HEAD",):
                assert answer.decode().strip() in REASONS.values()
            assert self.server.token.encode() not in answer + str(response.headers).encode()
        return response.status

    def open(self, data=b""):
        """Return a connection on which some bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=SECONDS)
        connection.sendall(data)
        return connection

    def text(self, request, length=None, **parameters):
        """Return the bytes of a request, which may state another length."""
        body = json.dumps({"request": request, **parameters}).encode()
        lines = [f"POST {self.ask_path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
        return "\r\n".join(lines).encode() + body

    def assert_works(self):
        assert self.ask("count", to=1)[-1] == ("answer", 1)


def wait_until_true(is_true):
    """Wait until a function returns True."""
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running_server():
    """Run a server whose jobs another thread than the main one runs."""
    jobs = Jobs()
    session = CountingSession(jobs.check_canceled)
    server = serve(session.page, session, jobs, port=0, timeout=TIMEOUT)
    worker = threading.Thread(target=jobs.run, daemon=True)
    worker.start()
    try:
        yield Client(server, session)
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def shared_client():
    with running_server() as client:
        yield client


@pytest.fixture
def client(shared_client):
    """A client of the server that all tests share: each leaves it working."""
    shared_client.session.started.clear()
    shared_client.session.ended.clear()
    yield shared_client
    shared_client.assert_works()


def read_to_end(connection):
    """Return what the server sends until it closes the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def test_the_page_is_served_at_the_address_only(client):
    response, answer = client.request("GET", f"/{client.server.token}/", Origin=None)
    assert (response.status, answer.decode()) == (200, PAGE)
    assert response.getheader("Content-Type") == "text/html; charset=utf-8"
    assert response.getheader("Cache-Control") == "no-store"
    assert response.getheader("Referrer-Policy") == "no-referrer"
    assert response.getheader("Cross-Origin-Resource-Policy") == "same-origin"
    assert response.getheader("Access-Control-Allow-Origin") is None
    assert "frame-ancestors 'none'" in response.getheader("Content-Security-Policy")
    assert client.server.address == f"http://{client.host}/{client.server.token}/"
    assert client.server.socket.getsockname()[0] == "127.0.0.1"


def test_a_job_streams_parts_and_an_answer(client):
    frames = client.ask("count", to=20)
    assert [kind for kind, _ in frames] == ["part"] * 20 + ["answer"]
    assert frames[7][1]["n"] == 7 and frames[7][1]["values"].tolist() == [7, 7, 7]


def test_an_immediate_request_is_answered_while_a_job_runs(client):
    with client.open(client.text("spin")):
        assert client.session.started.wait(SECONDS)
        assert client.ask("echo", a=[1, "é"]) == [("answer", {"a": [1, "é"]})]
    assert client.session.ended.wait(SECONDS)


def test_a_mistake_becomes_an_error_frame(client, capsys):
    [(kind, error)] = client.ask("echo", error=3)
    assert (kind, error["name"]) == ("error", "UserError") and "error=3" in error["message"]
    for request in ("broken", "count"):  # both lack a parameter
        [(kind, error)] = client.ask(request)
        assert (kind, error["name"]) == ("error", "InternalError")


def test_localhost_is_the_same_host(client):
    host = f"localhost:{client.server.port}"
    body = b'{"request": "echo"}'
    assert client.status(body=body, Host=host, Origin=f"http://{host}") == 200
    assert client.status(body=body, Host=host) == 403  # the page's origin is another one


@pytest.mark.parametrize("method, path", [("GET", "{}/"), ("POST", "{}/ask")])
@pytest.mark.parametrize("change", ["", "x", "é", "%00", "/", None])
def test_a_wrong_token_is_refused(client, method, path, change):
    token = client.server.token
    wrong = "" if change is None else token[:-1] if change == "" else token + change
    wrong = "A" * len(token) if change == "x" else wrong
    body = b'{"request": "echo"}' if method == "POST" else b""
    target = "/" + path.format(wrong).encode().decode("latin-1")
    request = f"{method} {target} HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: {len(body)}"
    request += f"\r\nOrigin: http://{client.host}\r\n\r\n"
    with client.open(request.encode("latin-1") + body) as connection:
        status = int(read_to_end(connection).split()[1])
    assert status == (404 if change == "/" else 403)


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:{}",
        "127.0.0.1",
        "127.0.0.1:1",
        "0.0.0.0:{}",
        "[::1]:{}",
        "127.0.0.1:{}.attacker.example",
        "LOCALHOST@attacker.example:{}",
        "",
        None,
    ],
)
def test_another_host_is_refused(client, host):
    host = host and host.format(client.server.port)
    origin = f"http://{host}"
    assert client.status("GET", f"/{client.server.token}/", Host=host, Origin=None) == 403
    assert client.status(body=b'{"request": "echo"}', Host=host, Origin=origin) == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://attacker.example",
        "null",
        None,
        "https://{}",
        "http://{}/",
        "http://{}.example",
        "",
        "file://",
        "http://localhost:1",
    ],
)
def test_another_origin_is_refused(client, origin):
    origin = origin and origin.format(client.host)
    assert client.status(body=b'{"request": "echo"}', Origin=origin) == 403


def test_a_repeated_header_is_refused(client):
    body = b'{"request": "echo"}'
    start = client.text("echo").partition(b"\r\n\r\n")[0].decode()
    for line, status in [
        (f"Host: {client.host}", 403),
        ("Origin: http://attacker.example", 403),
        (f"Content-Length: {len(body)}", 400),
        ("Transfer-Encoding: chunked", 411),
    ]:
        with client.open(f"{start}\r\n{line}\r\n\r\n".encode() + body) as connection:
            assert read_to_end(connection).split()[1] == str(status).encode()


@pytest.mark.parametrize(
    "path",
    [
        "ask",
        "../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "explore.py",
        "favicon.ico",
        "/etc/passwd",
        "file:///etc/passwd",
        "?",
        "\\..\\",
        "%00",
    ],
)
def test_no_other_path_is_served(client, path):
    assert client.status("GET", f"/{client.server.token}/{path}") == 404
    assert client.status("GET", f"/{path}") == 403
    assert client.status("POST", f"/{client.server.token}/{path}x", b"{}") == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "get"])
def test_another_method_is_refused(client, method):
    assert client.status(method) == 405
    assert client.status(method, f"/{client.server.token}/") == 405


@pytest.mark.parametrize(
    "length, status",
    [
        (MAX_BODY_BYTES + 1, 413),
        (10**18, 413),
        ("9" * 10_000, 413),
        ("-1", 400),
        ("1e3", 400),
        ("²", 400),
        ("1 1", 400),
        ("0x10", 400),
        ("", 400),
        (None, 411),
        ("0", 400),
    ],
)
def test_a_length_that_is_wrong_is_refused(client, length, status):
    assert client.status(Content_Length=length) == status


def test_a_body_that_is_too_large_gets_the_answer_while_it_is_sent(client):
    assert client.status(body=b" " * (5 * MAX_BODY_BYTES)) == 413
    largest = b'{"request": "echo"}'.ljust(MAX_BODY_BYTES)
    assert client.status(body=largest) == 200


def test_a_chunked_body_is_refused(client):
    chunks = b"13\r\n" + b'{"request": "echo"}' + b"\r\n0\r\n\r\n"
    start = client.text("echo").partition(b"Content-Length")[0]
    with client.open(start + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as connection:
        assert read_to_end(connection).split()[1] == b"411"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b"3",
        b'"echo"',
        b"{}",
        b'{"request": null}',
        b'{"request": ["echo"]}',
        b'{"request": {}}',
        b"[" * 400_000,
        b'{"request":' * 80_000,
        b"1" * 5000,
        b"\x00" * 100,
        b'{"request": "echo", "a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_a_body_that_is_no_request_is_refused(client, body):
    assert client.status(body=body) == 400


@pytest.mark.parametrize("name", ["", "page", "__class__", "Echo", "nobody", "../ask"])
def test_an_unknown_request_is_refused(client, name):
    assert client.status(body=json.dumps({"request": name}).encode()) == 404


@settings(max_examples=50)
@given(data=st.binary(max_size=60), is_in_path=st.booleans())
def test_arbitrary_bytes_never_get_more_than_a_refusal(shared_client, data, is_in_path):
    start = b"GET /" if is_in_path else b""
    with shared_client.open(start + data + b"\r\n\r\n") as connection:
        connection.shutdown(socket.SHUT_WR)
        received = read_to_end(connection)
    assert b" 200 " not in received and shared_client.server.token.encode() not in received


@pytest.mark.parametrize("size", [10**5, 10**7])
def test_headers_that_are_too_long_are_refused(client, size):
    with client.open() as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: " + b"x" * size)
            received = read_to_end(connection)
        except ConnectionError:
            received = b""
    assert b" 200 " not in received
    with client.open(b"GET /" + b"x" * 10**5 + b" HTTP/1.1\r\n\r\n") as connection:
        assert b" 200 " not in read_to_end(connection)


@pytest.mark.slow
def test_a_body_that_stays_incomplete_is_given_up(client):
    start = time.monotonic()
    with client.open(client.text("echo", length=1000)) as connection:
        client.assert_works()
        assert read_to_end(connection) == b""
    assert TIMEOUT / 2 < time.monotonic() - start < SECONDS


@pytest.mark.slow
def test_a_request_that_arrives_byte_by_byte_is_given_up(client):
    """Each byte arrives in time, but the whole does not."""
    start = time.monotonic()
    text = client.text("echo").ljust(2000)
    with client.open() as connection, pytest.raises(ConnectionError):
        for n in range(len(text)):
            connection.sendall(text[n : n + 1])
            connection.settimeout(TIMEOUT / 20)
            try:
                if not connection.recv(1):
                    raise ConnectionError
            except TimeoutError:
                pass
    assert time.monotonic() - start < SECONDS


def send_many(client, number, request):
    """Start threads that each send a request; return them and the list to which they add statuses.

    The status is None for a reset connection.
    """
    statuses = []

    def send():
        try:
            statuses.append(client.request(body=request)[0].status)
        except (ConnectionError, http.client.HTTPException):
            statuses.append(None)

    threads = [threading.Thread(target=send) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads, statuses


@pytest.mark.slow
def test_parallel_requests_are_served_or_refused(client):
    """While a job occupies the main thread, the others wait or are refused."""
    with client.open(client.text("spin")):
        assert client.session.started.wait(SECONDS)
        threads, statuses = send_many(client, 100, b'{"request": "count", "to": 1}')
        wait_until_true(lambda: len(statuses) >= 100 - MAX_WAITING_JOBS)
        assert 200 not in statuses
    for thread in threads:
        thread.join(SECONDS)
    assert len(statuses) == 100
    assert statuses.count(200) == MAX_WAITING_JOBS
    assert statuses.count(503) >= MAX_CONNECTIONS - MAX_WAITING_JOBS - 1
    assert set(statuses) <= {200, 503, None}


@pytest.mark.slow
def test_idle_connections_are_closed_and_do_not_keep_others_out(client):
    connections = [client.open() for _ in range(200)]
    start = time.monotonic()
    received = [read_to_end(connection) for connection in connections]
    assert time.monotonic() - start < SECONDS
    refused = [answer for answer in received if answer]
    assert len(refused) <= 200 - MAX_CONNECTIONS
    assert all(answer.split()[1] == b"503" for answer in refused)
    for connection in connections:
        connection.close()


@pytest.mark.slow
def test_a_client_that_stops_reading_does_not_keep_others_out(client):
    with client.open(client.text("large")) as connection:
        assert connection.recv(1000)
        start = time.monotonic()
        client.assert_works()
        assert time.monotonic() - start < SECONDS
        assert client.session.ended.is_set()


@pytest.mark.parametrize("how", ["close", "reset", "shutdown", "after more input"])
def test_a_job_is_canceled_when_its_client_is_gone(client, how):
    connection = client.open(client.text("spin"))
    assert client.session.started.wait(SECONDS)
    if how == "after more input":
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "shutdown":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    assert client.session.ended.wait(SECONDS)
    connection.close()


def test_a_waiting_job_whose_client_is_gone_never_starts(client):
    with client.open(client.text("spin")):
        assert client.session.started.wait(SECONDS)
        client.open(client.text("large")).close()
        wait_until_true(lambda: any(job.is_canceled for job in client.server.jobs._waiting))
    assert client.session.ended.wait(SECONDS)
    client.session.ended.clear()
    client.assert_works()
    assert not client.session.ended.is_set()  # `large` would have set it


def test_a_port_that_is_taken_is_a_mistake_of_the_user(client):
    port = client.server.port
    with pytest.raises(UserError, match=f"port={port}"):
        serve(client.session.page, client.session, client.server.jobs, port)


@pytest.mark.slow
def test_a_port_is_free_again_after_the_server(client):
    with running_server() as other:
        other.assert_works()
        port = other.server.port
    server = serve(client.session.page, client.session, client.server.jobs, port)
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_tokens_differ():
    with running_server() as one, running_server() as other:
        assert one.server.token != other.server.token
        assert len(one.server.token) >= 20
