"""The metrics endpoint of a service or a worker: one registry over HTTP.

It has a port and threads of its own, so that it answers while an event loop is busy. `/metrics` is
the registry. `/sd` is Prometheus' HTTP service discovery: a line's service lists itself, every live
worker and every reducer in a process of its own; anybody else lists only itself.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

__all__ = ["MetricsApp", "MetricsEndpoint"]

_TARGET = re.compile(r"(?:[\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):\d{1,5}", re.ASCII)
"""What may be scraped: host:port. Anything else would spoil the whole list for Prometheus."""
_CLOSING_POLL_S = 0.1
_SCRAPE_TIMEOUT_S = 10.0

Workers = Callable[[], Mapping[int, str]]
"""Where each live worker's metrics are, by worker; called on the endpoint's threads."""

Reducers = Callable[[], Mapping[str, str]]
"""Where each registered reducer's metrics are, by the reducer's address; likewise."""


class MetricsApp:
    """What is served: `/metrics`, `/sd`, and nothing else."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Serves the registry; `/sd` lists this service alone until there is a `source`."""
        self._metrics = make_wsgi_app(registry)
        self._source: tuple[str, Workers, Reducers] = "", dict, dict

    def discover(self, run_id: str, workers: Workers, reducers: Reducers = dict) -> None:
        """From now on `/sd` lists what `workers` and `reducers` say."""
        self._source = run_id, workers, reducers

    def __call__(
        self, environment: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answers one request."""
        path, status, kind = environment.get("PATH_INFO", ""), HTTPStatus.OK, "text/plain"
        if path == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environment, start_response)
            return metrics
        headers = []
        if path != "/sd":
            status, text = HTTPStatus.NOT_FOUND, "there are /metrics and /sd here\n"
        elif environment["REQUEST_METHOD"] != "GET":
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, "/sd is read with GET\n"
            headers.append(("Allow", "GET"))
        else:
            kind, text = "application/json", json.dumps(self._targets(environment))
        body = text.encode()
        headers += [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [body]

    def _targets(self, environment: WSGIEnvironment) -> list[dict[str, Any]]:
        """Groups of targets. The service is where the asker found it: only the asker knows."""
        run_id, workers, reducers = self._source
        here = environment.get("HTTP_HOST", "")
        groups = [(here, {"run": run_id})]
        for worker, address in sorted(workers().items()):
            groups.append((address, {"run": run_id, "worker": str(worker)}))
        for reducer, address in sorted(reducers().items()):
            groups.append((address, {"run": run_id, "reducer": reducer}))
        return [
            {"targets": [address], "labels": labels}
            for address, labels in groups
            if _TARGET.fullmatch(address)
        ]


class _MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _Request(WSGIRequestHandler):
    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: scrapes are many."""


class MetricsEndpoint:
    """Serves a registry's metrics, from threads, while it is entered."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listens on `host`; port 0 is any free one.

        Raises:
            OSError: the port is taken, or the host is not one of this machine's.
        """
        self._app = MetricsApp(registry)
        bare = host.strip("[]")
        kind = _MetricsServer6 if ":" in bare else _MetricsServer
        self._server = make_server(bare, port, self._app, kind, _Request)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_CLOSING_POLL_S,),
            name="andon-metrics",
            daemon=True,
        )
        self._thread.start()

    def url(self, host: str) -> str:
        """Where the metrics are, from a machine that knows this one as `host`."""
        return f"http://{host}:{self.port}/metrics"

    def discover(self, run_id: str, workers: Workers, reducers: Reducers = dict) -> None:
        """From now on `/sd` lists what both say, too; they are called on other threads."""
        self._app.discover(run_id, workers, reducers)

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
        self.close()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
