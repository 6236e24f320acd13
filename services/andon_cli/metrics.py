"""The metrics endpoint: one registry over HTTP, on a port of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server

from andon_cli.errors import ConsoleError

__all__ = ["MetricsEndpoint"]


class MetricsEndpoint:
    """Serves a registry's metrics, from a thread, while it is entered."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listens on `host`; port 0 is any free one.

        Raises:
            ConsoleError: the port is taken, or the host is not one of this machine's.
        """
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConsoleError(
                f"metrics can't be served on {host}:{port} ({error.strerror}): end what listens "
                "there, or pass --metrics-port 0 for any free port"
            ) from error
        self._host = host
        self.port: int = self._server.server_port

    def url(self, host: str) -> str:
        """Where the metrics are, from a machine that knows this one as `host`."""
        return f"http://{host}:{self.port}/metrics"

    def __enter__(self) -> Self:
        """Is itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
