"""The metrics endpoint of a service or a worker: one registry over HTTP.

`/metrics` is the registry. `/sd` is Prometheus' HTTP service discovery: a line's service lists
itself, every live worker and every reducer in a process of its own; anybody else lists only itself.
A process may mount something else below all other paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from andon.host.endpoint import Endpoint, EndpointLimits, TlsContext
from andon.host.run_token import BEARER_PREFIX, is_same_token
from andon.host.web_names import is_allowed, own_names

__all__ = ["MetricsApp", "MetricsEndpoint", "MetricsGuard"]

_TARGET = re.compile(r"(?:[\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):\d{1,5}", re.ASCII)
"""What may be scraped: host:port. Anything else would spoil the whole list for Prometheus."""

_USUAL = EndpointLimits()

Workers = Callable[[], Mapping[int, str]]
"""Where each live worker's metrics are, by worker; called on the endpoint's threads."""

Reducers = Callable[[], Mapping[str, str]]
"""Where each registered reducer's metrics are, by the reducer's address; likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsGuard:
    """Who may read the metrics: nobody's page in a browser, and only who shows the token."""

    names: frozenset[str] = field(default_factory=own_names)
    """The names under which they may be asked for, besides addresses."""
    token: bytes = field(default=b"", repr=False)
    """What one has to show; empty: nothing."""

    def refusal(self, environment: WSGIEnvironment) -> tuple[HTTPStatus, str] | None:
        """Why a request is refused, with the remedy; None: it is not."""
        host = environment.get("HTTP_HOST", "")
        if not is_allowed(host, self.names):
            return (
                HTTPStatus.FORBIDDEN,
                f"these metrics are not at {host[:100]!r}: ask for them by this host's name or "
                "address, or name it in --metrics-hosts (ANDON_METRICS_HOSTS)\n",
            )
        shown = environment.get("HTTP_AUTHORIZATION", "")
        token = shown.removeprefix(BEARER_PREFIX).strip().encode() if shown else b""
        if self.token and not is_same_token(token, self.token):
            return (
                HTTPStatus.UNAUTHORIZED,
                "these metrics ask for a token: let Prometheus show the one in the file of "
                "--metrics-token-file (ANDON_METRICS_TOKEN_FILE)\n",
            )
        return None


class MetricsApp:
    """What is served: `/metrics`, `/sd`, and what is mounted beside them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        guard: MetricsGuard | None = None,
        others: WSGIApplication | None = None,
    ) -> None:
        """Serves the registry to those whom `guard` admits, under this host's names by default.

        `/sd` lists this service alone until there is a `source`. `others` answers every other path,
        until something is mounted.
        """
        self._guard = guard or MetricsGuard()
        self._metrics = make_wsgi_app(registry)
        self._source: tuple[str, Workers, Reducers] = "", dict, dict
        self._others = others

    def mount(self, application: WSGIApplication) -> None:
        """From now on `application` answers every other path."""
        self._others = application

    def discover(self, run_id: str, workers: Workers, reducers: Reducers = dict) -> None:
        """From now on `/sd` lists what `workers` and `reducers` say."""
        self._source = run_id, workers, reducers

    def __call__(
        self, environment: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answers one request."""
        path, status, kind = environment.get("PATH_INFO", ""), HTTPStatus.OK, "text/plain"
        headers = []
        refusal = self._guard.refusal(environment) if path in ("/metrics", "/sd") else None
        if path == "/metrics" and refusal is None:
            metrics: Iterable[bytes] = self._metrics(environment, start_response)
            return metrics
        if path not in ("/metrics", "/sd") and self._others is not None:
            return self._others(environment, start_response)
        if refusal is not None:
            status, text = refusal
            if status is HTTPStatus.UNAUTHORIZED:
                headers.append(("WWW-Authenticate", "Bearer"))
        elif path != "/sd":
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


class MetricsEndpoint:
    """Serves a registry's metrics, from threads, while it is entered."""

    def __init__(
        self,
        host: str,
        port: int,
        app: MetricsApp,
        *,
        tls: TlsContext | None = None,
        limits: EndpointLimits = _USUAL,
    ) -> None:
        """Listens on `host`; port 0 is any free one. `tls` and `limits` are `Endpoint`'s.

        Raises:
            OSError: the port is taken, or the host is not one of this machine's.
        """
        self._app = app
        self._endpoint = Endpoint(host, port, app, tls=tls, limits=limits)
        self.port = self._endpoint.port

    def mount(self, application: WSGIApplication) -> None:
        """From now on `application` answers every path but `/metrics` and `/sd`."""
        self._app.mount(application)

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
        """Stops listening, and cuts the connections that are open."""
        self._endpoint.close()
