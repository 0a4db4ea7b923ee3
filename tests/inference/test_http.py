"""The limits of the HTTP server: who is refused, and who does not hold a connection for long."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from runner.core.errors import EnvironmentProblem
from runner.inference.http import HttpLimits, TokenCheck, listen, serve_in_thread

LIMITS = HttpLimits(max_body_bytes=1000, connections_per_client=4)
HEAD = b"POST /size HTTP/1.1\r\nHost: a\r\n"
KEY = b"Authorization: Bearer secret\r\n"
CLOSE = b"Connection: close\r\n"


async def size(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@contextmanager
def serving(limits: HttpLimits) -> Iterator[int]:
    """The port of a server."""
    app = Starlette(routes=[Route("/size", size, methods=["POST"]), Route("/health", size)])
    listener = listen("127.0.0.1", 0)
    number = listener.getsockname()[1]
    with serve_in_thread(TokenCheck(app, "secret", frozenset({"/health"})), listener, limits):
        yield number


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(LIMITS) as number:
        yield number


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Authorization": "Bearer secret"} | headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(port: int, content: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(content)
        received = b""
        while block := connection.recv(1 << 16):
            received += block
        return received


def test_the_token_is_checked_but_for_open_paths(port: int) -> None:
    assert ask(port, "POST", "/size", b"abc") == (200, b"3")
    for given in ("", "secret", "Bearer wrong", "Bearer gruß".encode().decode("latin-1")):
        status, text = ask(port, "POST", "/size", b"abc", Authorization=given)
        assert status == 401 and b"token" in text
        assert ask(port, "GET", "/health", Authorization=given)[0] == 200


def test_a_body_above_the_limit_is_refused_whether_its_length_is_declared_or_not(port: int) -> None:
    assert ask(port, "POST", "/size", b"x" * 1000) == (200, b"1000")
    assert ask(port, "POST", "/size", b"x" * 1001)[0] == 413
    head = HEAD + CLOSE + KEY
    declared = head + b"Content-Length: 400000000\r\n\r\n"
    assert raw(port, declared).startswith(b"HTTP/1.1 413")
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n" + b"x" * 1000 + b"\r\n" + b"1\r\nx\r\n0\r\n\r\n"
    assert raw(port, chunked).startswith(b"HTTP/1.1 413")


def test_a_slow_client_is_disconnected_and_others_are_answered() -> None:
    with serving(HttpLimits(header_timeout_s=2.0)) as port:
        assert raw(port, HEAD) == b"", "headers that never end"
        assert ask(port, "POST", "/size", b"abc") == (200, b"3")
    with serving(HttpLimits(idle_timeout_s=2.0)) as port:
        body = HEAD + CLOSE + KEY + b"Content-Length: 9\r\n\r\nabc"
        assert raw(port, body).startswith(b"HTTP/1.1 408"), "a body that never ends"
        assert ask(port, "POST", "/size", b"abc") == (200, b"3")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY + b"Content-Length: -3\r\n", b"400 "),
        (KEY + CLOSE + b"Content-Length: 400000000\r\n", b"413 "),
        (CLOSE + b"Content-Length: 5000000\r\n", b"401 "),
        (b"Content-Length: 5000000\r\n", b"401 "),
    ],
)
def test_an_answer_that_is_sent_before_the_body_was_read_arrives_whole(headers: bytes, status: bytes) -> None:
    """At a client that sends all it has before it reads."""
    with (
        serving(HttpLimits(drain_s=200.0)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        connection.sendall(HEAD + headers + b"\r\n")
        connection.recv(1, socket.MSG_PEEK)  # the server has answered
        for _ in range(50):
            connection.sendall(bytes(100_000))
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while block := connection.recv(1 << 16):
            received += block
    assert received.startswith(b"HTTP/1.1 " + status) and received.endswith((b"}}", b"Invalid HTTP request received."))


@pytest.mark.parametrize("more", [CLOSE, b""], ids=["closed", "kept"])
def test_a_body_that_is_not_read_does_not_hold_a_connection(more: bytes) -> None:
    with (
        serving(HttpLimits(drain_s=0.3)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        connection.sendall(HEAD + more + b"Content-Length: 1000000\r\n\r\n")
        end = time.monotonic() + 30
        with pytest.raises(ConnectionError):  # the server has dropped it
            while time.monotonic() < end:
                connection.sendall(b"x")
                time.sleep(0.02)


def test_one_client_has_a_bounded_number_of_connections() -> None:
    with serving(LIMITS) as port, ExitStack() as held:
        for _ in range(LIMITS.connections_per_client):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        with pytest.raises(OSError):
            ask(port, "POST", "/size", b"abc")


def test_an_address_that_cannot_be_had_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"http://127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(EnvironmentProblem, match="an address of this machine"):
        listen("192.0.2.1", 0)


def test_a_body_does_not_wait_for_the_clients_ack() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
