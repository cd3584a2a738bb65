"""The server answers its own page only, whatever else reaches its port, and never hangs."""

import http.client
import os
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from glass.live.server import HEADERS, Handler, Server

TIMEOUT = 0.5  # seconds, of the server
SECONDS = 60  # that no answer of a passing test takes, on a busy machine
PAGE = "<!doctype html><title>né 日本</title>"
OWN_PORT = 20_000 + os.getpid() % 10_000  # below those that systems give to connections
LARGE_FRAME_BYTES = 4_000_000  # more than what the system buffers of a connection


class Client:
    """A server whose answers are made up, and what talks to it as the page does."""

    def __init__(self, port):
        self.server = Server(port)
        self.host = self.server.hosts[0]
        self.port = self.server.server_address[1]
        self.ask_path = f"/{self.server.token}/ask"
        self.headers = {"Host": self.host, "Origin": f"http://{self.host}"}
        self.started = threading.Event()
        self.ended = threading.Event()  # that an answer has ended, in whatever way

    def answer(self, body, is_canceled):
        """Return the body; "large" sends more than a client reads, "spin" waits for a cancel."""
        try:
            yield body
            for _ in range(100 if body == b"large" else 0):
                yield bytes(LARGE_FRAME_BYTES)
            self.started.set()
            while body == b"spin" and not is_canceled():
                time.sleep(0.001)
        finally:
            self.ended.set()

    def request(self, method="POST", path=None, body=b"", **headers):
        """Return the response and its body; a header that is None is not sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with closing(connection):
            connection.putrequest(
                method, path or self.ask_path, skip_host=True, skip_accept_encoding=True
            )
            defaults = {**self.headers, "Content_Length": str(len(body))}
            for name, value in (defaults | headers).items():
                if value is not None:
                    connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response, response.read()

    def status(self, *args, **more):
        """Return the status of a request that may be refused; a refusal does not tell the token."""
        response, answer = self.request(*args, **more)
        assert response.status == 200 or self.server.token.encode() not in answer
        return response.status

    def open(self, data=b""):
        """Return a connection on which some bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.sendall(data)
        return connection

    def bytes_of(self, body, length=None):
        """Return the bytes of a request, which may state another length."""
        lines = [f"POST {self.ask_path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
        return "\r\n".join(lines).encode() + body

    def assert_works(self):
        assert self.request(body=b"hello")[1] == b"hello"


@contextmanager
def running_server(port=0):
    client = Client(port)
    thread = threading.Thread(target=client.server.serve, args=(lambda: PAGE, client.answer))
    thread.start()
    try:
        yield client
    finally:
        client.server.shutdown()
        thread.join()  # which has closed the port


@pytest.fixture(scope="module")
def shared_client():
    with pytest.MonkeyPatch.context() as patch, running_server() as client:
        patch.setattr(Handler, "timeout", TIMEOUT)
        yield client


@pytest.fixture
def client(shared_client):
    """A client of the server that all tests share: each leaves it working."""
    shared_client.started.clear()
    shared_client.ended.clear()
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


def test_the_page_is_served_to_this_machine_and_to_its_own_origin(client):
    response, answer = client.request("GET", f"/{client.server.token}/", Origin=None)
    assert (response.status, answer.decode()) == (200, PAGE)
    assert response.getheader("Content-Type") == "text/html; charset=utf-8"
    assert HEADERS.items() <= dict(response.getheaders()).items()
    assert response.getheader("Access-Control-Allow-Origin") is None
    assert client.server.address == f"http://{client.host}/{client.server.token}/"
    assert client.server.socket.getsockname()[0] == "127.0.0.1"


def test_localhost_is_the_same_host(client):
    host = f"localhost:{client.port}"
    assert client.status(body=b"x", Host=host, Origin=f"http://{host}") == 200


HOSTS = ["attacker.example:{port}", "127.0.0.1", "0.0.0.0:{port}", "[::1]:{port}", "", None]
HOSTS += ["127.0.0.1:{port}.attacker.example", "LOCALHOST@attacker.example:{port}"]
ORIGINS = ["http://attacker.example", "null", None, "", "http://localhost:{port}"]
ORIGINS += ["https://127.0.0.1:{port}", "http://127.0.0.1:{port}/", "http://127.0.0.1:1"]
TOKENS = ["", "/", "/{token}x/", "/{token}%00/", "/x{token}/", "/" + "A" * 22 + "/"]
PATHS = ["../../etc/passwd", "%2e%2e/etc/passwd", "explore.py", "/etc/passwd", "?", "ask/"]


CASES = [("/{token}/", {"Host": host}) for host in HOSTS]
CASES += [("/{token}/ask", {"Host": host, "Origin": f"http://{host}"}) for host in HOSTS]
CASES += [("/{token}/ask", {"Origin": origin}) for origin in ORIGINS]
CASES += [(token + end, {}) for token in TOKENS for end in ("", "ask")]
CASES += [("/{token}/" + path, {}) for path in PATHS]


def test_another_host_origin_token_or_path_is_refused(client):
    names = {"port": client.port, "token": client.server.token}
    for path, headers in CASES:
        typed = {name: value and value.format(**names) for name, value in headers.items()}
        for method in ("POST",) if path.endswith("/ask") else ("GET", "POST"):
            status = client.status(method, path.format(**names) or "/", b"x", **typed)
            assert status == 403, (method, path, headers)


def test_a_refusal_says_which_addresses_work(client):
    _, answer = client.request("GET", "/", Host="hub.example")
    for address in (*client.server.hosts, f"ssh -L {client.port}:localhost:{client.port}"):
        assert address in answer.decode()


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "HEAD", "get", "A" * 60_000])
def test_another_method_is_refused(client, method):
    response, answer = client.request(method, f"/{client.server.token}/")
    assert response.status == 501 and len(response.reason) + len(answer) < 500


@pytest.mark.parametrize("length", ["-1", "1e3", "²", "1 1", "", None])
def test_a_length_that_is_no_number_is_refused(client, length):
    assert client.status(Content_Length=length and length.encode()) == 411


@settings(max_examples=50)
@given(data=st.binary(max_size=60), is_in_path=st.booleans())
def test_arbitrary_bytes_never_get_more_than_a_refusal(shared_client, data, is_in_path):
    start = b"GET /" if is_in_path else b""
    with shared_client.open(start + data + b"\r\n\r\n") as connection:
        connection.shutdown(socket.SHUT_WR)
        received = read_to_end(connection)
    assert b" 200 " not in received and shared_client.server.token.encode() not in received


@pytest.mark.slow
def test_an_answer_ends_if_its_client_stops_reading(client):
    with client.open(client.bytes_of(b"large")) as connection:
        assert connection.recv(1000)
        assert client.ended.wait(SECONDS)


@pytest.mark.parametrize("how", ["close", "reset", "shutdown", "after more input"])
def test_an_answer_is_canceled_when_its_client_is_gone(client, how):
    connection = client.open(client.bytes_of(b"spin"))
    assert client.started.wait(SECONDS)
    if how == "after more input":
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "shutdown":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    assert client.ended.wait(SECONDS)
    connection.close()


def test_a_port_is_refused_while_it_is_taken_and_free_again_afterwards():
    with running_server(OWN_PORT) as client:
        client.assert_works()
        with pytest.raises(UserError, match=f"port={OWN_PORT}"):
            Server(OWN_PORT)
    with Server(OWN_PORT) as server:
        assert server.token != client.server.token and len(server.token) >= 20
