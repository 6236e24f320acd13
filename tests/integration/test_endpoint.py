"""The HTTP port on real sockets: it answers, also over TLS, and strangers can't take it."""

from __future__ import annotations

import http.client
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest

from andon.host.endpoint import ENCRYPTED, Endpoint, EndpointLimits
from andon.host.tls import ServerIdentity
from unit.andon.certificates import certify
from unit.andon_server.board.boards import Board, line_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

HOST = "127.0.0.1"
_PATIENCE_S = 20
REQUESTS = int(os.environ.get("ANDON_BOARD_REQUESTS", "300"))
_PATHS = (
    *("/", "/board/board.js", "/board/api/state", "/board/api/runs", "/board/api/runs/7f3a"),
    *("/board/api/runs/7f3a/curves?points=3", "/board/api/answer", "/board/api/halt"),
    *("/board/api/login", "/board/api/logout", "/board/api/drain", "//", "*", "http://x/"),
    *("/%ff%00", "/board/api/runs/\xff", "/?" + "a=b&" * 50),
)
_HEADERS = (
    ("Origin", "http://127.0.0.1:9400"), ("Origin", "http://["), ("Cookie", "andon-7f3a=x"),
    ("Cookie", 'a="\\"; x=\x80'), ("Authorization", "Bearer \xe9"), ("X-Andon-Board", "1"),
    ("Content-Type", "application/json"), ("Content-Length", "10"), ("Content-Length", "-1"),
    ("Transfer-Encoding", "chunked"), ("If-None-Match", "*"), ("Expect", "100-continue"),
    ("Host", "[::1"),
)  # fmt: skip
_BODIES = (b"", b"{}", b'{"halt_id":"1","answer":"retry"}', b'{"token":"\\ud800"}', b"\xff" * 20)


class Application:
    """Says whether a request was encrypted; streams until it is closed at /stream."""

    def __init__(self, piece: bytes = b"data: x\n\n") -> None:
        self.environ: WSGIEnvironment = {}
        self.ended = threading.Event()
        self._piece = piece

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self.environ = environ
        if environ["PATH_INFO"] == "/fail":
            raise KeyError("a secret")
        if environ["PATH_INFO"] == "/stream":
            start_response("200 OK", [("Content-Type", "text/event-stream")])
            return self._stream()
        body = b"encrypted" if environ[ENCRYPTED] else b"plain"
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    def _stream(self) -> Iterator[bytes]:
        try:
            while True:
                yield self._piece
                time.sleep(0.01)
        finally:
            self.ended.set()


@contextmanager
def serving(application: Any, **how: Any) -> Iterator[Endpoint]:
    tls = how.pop("tls", None)
    endpoint = Endpoint(HOST, 0, application, tls=tls, limits=EndpointLimits(**how))
    try:
        yield endpoint
    finally:
        endpoint.close()


def exchange(endpoint: Endpoint, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What the other end says to these bytes until it closes."""
    with socket.create_connection((HOST, endpoint.port), timeout=_PATIENCE_S) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break
            time.sleep(pause_s)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = bytearray()
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return bytes(found)


def get(endpoint: Endpoint, path: str = "/", context: ssl.SSLContext | None = None) -> bytes:
    kind: Callable[..., Any] = http.client.HTTPConnection
    more = {}
    if context is not None:
        kind, more = http.client.HTTPSConnection, {"context": context}
    connection = kind(HOST, endpoint.port, timeout=_PATIENCE_S, **more)
    try:
        connection.request("GET", path)
        body: bytes = connection.getresponse().read()
    finally:
        connection.close()
    return body


def trusting(certs: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certs / "ca.crt"))


def test_an_answer_tells_nothing_of_the_host_or_its_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_X_ANDON_BOARD", "1")
    application = Application()

    with serving(application) as endpoint:
        answer = exchange(endpoint, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nplain")
    assert b"Server:" not in answer
    assert "HTTP_X_ANDON_BOARD" not in application.environ, "variables are no headers"


def test_a_failure_of_the_application_is_an_answer_without_its_insides(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(Application()) as endpoint:
        answer = exchange(endpoint, b"GET /fail HTTP/1.0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.0 500 ")
    assert b"secret" not in answer
    assert "request_failed" in caplog.text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"x" * 20000 + b" HTTP/1.0\r\n\r\n", b"414"),
        (b"GET / HTTP/1.0\r\n" + b"A: " + b"x" * 70000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.0\r\n" + (b"A: " + b"x" * 60000 + b"\r\n") * 4 + b"\r\n", b"431"),
        (b"\x00\x01\x02 nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
    ],
)
def test_a_request_that_is_none_or_too_long_is_told_so(request_: bytes, status: bytes) -> None:
    with serving(Application()) as endpoint:
        answer = exchange(endpoint, request_)

        assert b"Error code: " + status in answer
        assert get(endpoint) == b"plain"


def test_an_answer_arrives_though_nobody_reads_the_requests_body() -> None:
    with serving(Application()) as endpoint:
        head = b"POST / HTTP/1.0\r\nContent-Length: 300000\r\n\r\n"
        answer = exchange(endpoint, head, b"x" * 300000)

    assert answer.endswith(b"plain")


def test_a_request_that_drips_is_given_up_and_its_place_is_free() -> None:
    with serving(Application(), request_s=0.2, connections=1) as endpoint:
        drips = exchange(endpoint, b"GET / HTTP/1.0\r\n", *[b"A: b\r\n"] * 8, pause_s=0.05)

        assert drips == b""
        assert patiently(endpoint) == b"plain"


def test_a_connection_too_many_is_told_to_come_back() -> None:
    with serving(Application(), connections=1) as endpoint:
        with socket.create_connection((HOST, endpoint.port), timeout=_PATIENCE_S) as first:
            first.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
            assert first.recv(9) == b"HTTP/1.0 "
            refused = exchange(endpoint)

        assert refused.startswith(b"HTTP/1.0 503 ")
        assert patiently(endpoint) == b"plain"


def test_a_reader_that_reads_nothing_is_dropped() -> None:
    application = Application(piece=b"x" * (1 << 20))

    with (
        serving(application, write_s=0.2) as endpoint,
        socket.create_connection((HOST, endpoint.port)) as reader,
    ):
        reader.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
        assert application.ended.wait(_PATIENCE_S)


def test_closing_ends_the_streams_that_are_open() -> None:
    application = Application()
    endpoint = Endpoint(HOST, 0, application)
    with socket.create_connection((HOST, endpoint.port), timeout=_PATIENCE_S) as reader:
        reader.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
        assert reader.recv(9) == b"HTTP/1.0 "

        endpoint.close()
        read_all(reader)

        assert application.ended.wait(_PATIENCE_S)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, endpoint.port), timeout=_PATIENCE_S).close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_closing_waits_for_no_child_that_the_process_has_forked() -> None:
    endpoint = Endpoint(HOST, 0, Application())
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # It has copies of all sockets.
        os._exit(0)
    closing = threading.Thread(target=endpoint.close, daemon=True)
    try:
        closing.start()
        closing.join(_PATIENCE_S)
        assert not closing.is_alive()
    finally:
        os.close(tell)
        os.close(told)
        os.waitpid(child, 0)


def test_one_port_answers_with_and_without_tls(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "host", HOST)

    with serving(Application(), tls=ServerIdentity(certs).web_context) as endpoint:
        assert get(endpoint) == b"plain"
        assert get(endpoint, context=trusting(certs)) == b"encrypted"
        # It only looks like a handshake, and the next request is none the worse.
        with socket.create_connection((HOST, endpoint.port), timeout=_PATIENCE_S) as nonsense:
            nonsense.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            nonsense.shutdown(socket.SHUT_WR)
            assert b"plain" not in read_all(nonsense)
        assert get(endpoint, context=trusting(certs)) == b"encrypted"


def test_without_certificates_a_handshake_gets_no_answer_that_anybody_takes_for_one() -> None:
    with serving(Application()) as endpoint, pytest.raises(ssl.SSLError):
        get(endpoint, context=ssl.create_default_context())


def test_new_certificates_are_shown_from_the_next_connection_on(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "host", HOST)
    with serving(Application(), tls=ServerIdentity(certs).web_context) as endpoint:
        assert get(endpoint, context=trusting(certs)) == b"encrypted"

        certify(tmp_path / "other-ca", tmp_path / "other", HOST)
        for name in ("tls.key", "tls.crt", "ca.crt"):
            (tmp_path / "other" / name).replace(certs / name)

        assert get(endpoint, context=trusting(certs)) == b"encrypted"


def test_half_written_certificates_leave_the_previous_ones_in_use(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "host", HOST)
    trusted = trusting(certs)
    with serving(Application(), tls=ServerIdentity(certs).web_context) as endpoint:
        assert get(endpoint, context=trusted) == b"encrypted"

        (certs / "tls.crt").write_text("-----BEGIN")

        assert get(endpoint, context=trusted) == b"encrypted"


def random_request(chance: random.Random) -> bytes:
    """A request for the board of which some part is usually wrong."""
    method = chance.choice(["GET", "POST", "HEAD", "PUT", "OPTIONS", "\x00"])
    version = chance.choice(["1.0", "1.1", "0.9", "2.0"])
    lines = [f"{method} {chance.choice(_PATHS)} HTTP/{version}", "Host: 127.0.0.1:9400"]
    lines += [f"{name}: {value}" for name, value in chance.choices(_HEADERS, k=chance.randrange(8))]
    data = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1") + chance.choice(_BODIES))
    for _ in range(chance.choice([0, 0, 1, 5])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def test_random_requests_make_no_thread_of_a_board_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.randrange(2**32)
    chance, board = random.Random(seed), Board(tmp_path)
    board.feed.tick(line_of(2))

    with serving(board.app, request_s=0.5) as endpoint:
        for _ in range(REQUESTS):
            request = random_request(chance)
            with socket.create_connection((HOST, endpoint.port), _PATIENCE_S) as connection:
                with suppress(OSError):
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                read_all(connection)
        assert b'"run_id": "7f3a"' in get(endpoint, "/board/api/state")

    board.book.close()
    failed = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
    assert failed == [], f"seed {seed}"


def patiently(endpoint: Endpoint) -> bytes:
    """Asks until there is a place: a thread gives its place back shortly after its end."""
    deadline = time.monotonic() + _PATIENCE_S
    while (body := get(endpoint)) == b"" and time.monotonic() < deadline:
        time.sleep(0.02)
    return body
