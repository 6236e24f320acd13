"""An HTTP port of a process: a WSGI application, answered by a bounded number of threads.

Theory of operation
===================

The endpoint has threads of its own, so it answers while the process's event loop, or its training,
is busy. Every connection is one request and one thread. Three bounds keep strangers from taking
more than that:

- there are at most `connections` at once, and `of_one_host` from one address, so that nobody takes
  the places of all others; a further one is told 503 and closed;
- a request has `request_s` for all of its bytes, however slowly they come, and `_MAX_REQUEST` of
  them, so that nobody keeps a thread by sending a header now and then;
- a part of an answer that the other end does not read for `write_s` ends the connection, so that a
  stream of events can't wait for a reader that is gone.

If the process has certificates, the same port answers TLS, too: a TLS connection starts with the
byte 0x16, and no HTTP request does. The handshake takes place in the connection's own thread, under
the same time limit.
"""

from __future__ import annotations

import io
import logging
import selectors
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.handlers import SimpleHandler
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication, WSGIEnvironment

from andon.host.peers import Places

__all__ = ["ENCRYPTED", "Endpoint", "EndpointLimits", "TlsContext"]

ENCRYPTED = "andon.encrypted"
"""In the environment of a request: whether it came over TLS."""

_LINGER_S = 0.5
"""How long to read what nobody wanted, so that the other end can read the answer."""
_MAX_LINE = 16 << 10
_MAX_REQUEST = 128 << 10
"""Bytes of a request, head and body together."""
_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"

log = logging.getLogger(__name__)

TlsContext = Callable[[], ssl.SSLContext]
"""The context for a connection that begins now; called on the connections' threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """How much strangers may take."""

    connections: int = 32
    """How many may be open at once."""
    of_one_host: int = 16
    """How many of them one address may have; loopback is this machine, and may have all."""
    request_s: float = 10.0
    """How long a connection has for its handshake and its whole request."""
    write_s: float = 10.0
    """How long the other end may leave a part of an answer unread."""


_USUAL = EndpointLimits()


class Endpoint:
    """Serves an application over HTTP, from threads, until it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        application: WSGIApplication,
        *,
        tls: TlsContext | None = None,
        limits: EndpointLimits = _USUAL,
    ) -> None:
        """Listens on `host`; port 0 is any free one.

        Args:
            host: a name or an address, an IPv6 address with or without brackets.
            port: the port.
            application: answers the requests, several at once.
            tls: connections may also be encrypted; None: they can't be.
            limits: how much strangers may take.

        Raises:
            OSError: the port is taken, or the host is not one of this machine's.
        """
        bare = host.strip("[]")
        kind = _Server6 if ":" in bare else _MetricsServer
        self._server = kind((bare, port), application, tls, limits)
        self.port: int = self._server.server_port
        self._closing, told = socket.socketpair()
        self._thread = threading.Thread(
            target=self._server.serve_until, args=(told,), name="andon-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening, and cuts the connections that are open."""
        with self._closing, suppress(OSError):
            # Its end alone would not be told: a child that the process forked has a copy of it.
            self._closing.sendall(b"\0")
        self._thread.join()
        self._server.server_close()
        self._server.cut()


class _TooLong(Exception):
    """A request has more bytes than it may have."""


class _Request(io.RawIOBase):
    """The bytes of one request, up to its deadline and its limit."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._left = _MAX_REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        if self._left <= 0:
            raise _TooLong
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _Writer(io.BufferedIOBase):
    """Sends what was written when it is flushed, in one piece with one time limit."""

    def __init__(self, connection: socket.socket, write_s: float) -> None:
        self._connection = connection
        self._write_s = write_s
        self._pending = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pending += data
        return len(data)

    def flush(self) -> None:
        if self.closed or not self._pending:
            return
        data, self._pending = self._pending, bytearray()
        self._connection.settimeout(self._write_s)
        self._connection.sendall(data)


class _Answer(SimpleHandler):
    """Carries out one request; says nothing on standard error, and nothing of this host."""

    http_version = "1.0"
    os_environ: dict[str, str] = {}  # noqa: RUF012 - wsgiref's own name, and nobody changes it
    server_software = None

    def log_exception(self, exc_info: Any) -> None:
        """Logs a failure of the application. It is none if the other end went away."""
        if not isinstance(exc_info[1], OSError):
            log.error("request_failed", exc_info=exc_info)

    def error_output(
        self, environ: WSGIEnvironment, start_response: Callable[..., Any]
    ) -> list[bytes]:
        """The answer to a request that failed: nothing of the traceback."""
        start_response("500 Internal Server Error", [("Content-Length", "0")], sys.exc_info())
        return []


class _Connection(WSGIRequestHandler):
    """One connection: a handshake if it begins with one, then one request and its answer."""

    server: _MetricsServer
    disable_nagle_algorithm = True
    encrypted = False

    def setup(self) -> None:
        limits = self.server.limits
        deadline = time.monotonic() + limits.request_s
        self.request.settimeout(limits.request_s)
        tls = self.server.tls
        if tls is not None and self.request.recv(1, socket.MSG_PEEK) == _HANDSHAKE:
            # From here on the server's own socket is an empty shell: `finish` closes this one.
            self.request = tls().wrap_socket(self.request, server_side=True)
            self.encrypted = True
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection, deadline))
        self.wfile: Any = _Writer(self.connection, limits.write_s)
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()
        if self.encrypted:
            with suppress(OSError):
                self.connection.close()

    def handle(self) -> None:
        try:
            self._answer()
        except _TooLong:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except OSError as error:
            # Too slow, gone, or cut by `close`: there is nobody to tell.
            log.debug("connection_over why=%r", error)

    def get_environ(self) -> WSGIEnvironment:
        environ: WSGIEnvironment = super().get_environ()
        environ["REMOTE_PORT"] = str(self.client_address[1])
        environ[ENCRYPTED] = self.encrypted
        if self.encrypted:
            environ["HTTPS"] = "on"
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: scrapes are many."""

    def _answer(self) -> None:
        self.raw_requestline = self.rfile.readline(_MAX_LINE + 1)
        if len(self.raw_requestline) > _MAX_LINE:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        if not self.raw_requestline or not self.parse_request():
            return
        environ = self.get_environ()
        # Typeshed takes IO[bytes], which no class of `io` is.
        request: Any = self.rfile
        answer = _Answer(request, self.wfile, sys.stderr, environ, multiprocess=False)
        application = self.server.get_app()
        assert application is not None
        answer.run(application)
        if self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"):
            self._linger()

    def _refuse(self, status: HTTPStatus) -> None:
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        with suppress(OSError):
            self.send_error(status)
            self._linger()

    def _linger(self) -> None:
        """Reads the rest of a request. Closing before would reset the connection, and the other
        end might lose the answer.
        """
        self.wfile.flush()
        deadline = time.monotonic() + _LINGER_S
        socket.socket.shutdown(self.connection, socket.SHUT_WR)
        while (left_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if not self.connection.recv(_MAX_REQUEST):
                return


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Listens, and gives each connection a thread while there is room."""

    daemon_threads = True
    request_queue_size = 64
    timeout = 0
    """`handle_request` never waits: `serve_until` has seen that somebody is there."""

    def __init__(
        self,
        address: tuple[str, int],
        application: WSGIApplication,
        tls: TlsContext | None,
        limits: EndpointLimits,
    ) -> None:
        self.tls = tls
        self.limits = limits
        self.connections: set[socket.socket] = set()
        """Those whose requests are being answered."""
        self._places = Places(limits.connections, limits.of_one_host)
        super().__init__(address, _Connection)
        self.set_app(application)

    def server_bind(self) -> None:
        # Not HTTPServer's: that looks the host's own name up, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def serve_until(self, told: socket.socket) -> None:
        """Serves until something comes on `told`.

        In place of `serve_forever`, which wakes up several times a second to look whether it is to
        end.
        """
        with told, selectors.DefaultSelector() as selector:
            for each in (self.socket, told):
                selector.register(each, selectors.EVENT_READ)
            while told not in [key.fileobj for key, _ in selector.select()]:
                self.handle_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.take(client_address[0]):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started
                self._places.leave(client_address[0])
                raise
            return
        # The buffer of a new connection has room for these bytes, so this does not block.
        with suppress(OSError):
            request.settimeout(0)
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.leave(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        # Handshakes fail every day: a scanner, or a browser that does not know the CA.
        if not isinstance(error, OSError):
            log.error("connection_failed", exc_info=error)

    def cut(self) -> None:
        """Wakes every thread that reads or writes."""
        for connection in list(self.connections):
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Server6(_MetricsServer):
    address_family = socket.AF_INET6
