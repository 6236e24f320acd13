"""Telemetry: a worker's metrics, for Prometheus, and the port where they are read.

Numbers come from the thread that trains, once a step, when its record is here; a scrape only reads
what is there, on a thread of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app

from andon import __version__
from andon.protocol.records import Key
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import StepReport
from andon_trainer.exchange.forks import close_in_children
from andon_trainer.exchange.traffic import Traffic

__all__ = ["MetricsEndpoint", "StepClock", "StepMeasured", "Telemetry", "WorkerMetrics"]

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
_EVERYWHERE = ("0.0.0.0", "::")
_CLOSING_POLL_S = 0.1
_SCRAPE_TIMEOUT_S = 10.0


PATHS = ("wire", "shared-memory", "ring")
"""How chunks go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """A committed step in numbers: what was reported of it, and what is known since its commit."""

    report: StepReport
    seconds: float
    """From its assignment to its commit."""
    commit_s: float
    """From this worker's report to the commit."""
    traffic: Traffic
    """Since the worker started, in void rounds too; over `PATHS`."""


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers them; every label is there from the start, at 0."""
        Info("andon_build", "The worker's version", registry=registry).info(
            {"version": __version__}
        )
        self._step = Gauge(
            "andon_worker_step", "Steps committed at this worker's head", registry=registry
        )
        self._samples = Counter(
            "andon_samples", "Samples that this worker gave to committed steps", registry=registry
        )
        moved = Counter(
            "andon_exchange_bytes",
            "Bytes of chunks, to the reducer (up) and from it (down)",
            ["direction", "path"],
            registry=registry,
        )
        self._sent = {path: moved.labels("up", path) for path in PATHS}
        self._received = {path: moved.labels("down", path) for path in PATHS}
        self._traffic = Traffic()
        self._hidden = Gauge(
            "andon_exchange_hidden_ratio",
            "How much of the last exchange took place during backward, from 0 to 1",
            registry=registry,
        )

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(name, what, buckets=_SECONDS, registry=registry)

        self._whole = seconds(
            "andon_worker_step_seconds", "From a step's assignment to its commit, on this worker"
        )
        self._data = seconds("andon_data_wait_seconds", "Stood still for data, in one step")
        self._backward = seconds(
            "andon_backward_seconds", "A step's last backward, during which its blocks leave"
        )
        self._exchange = seconds(
            "andon_exchange_seconds", "From a step's first block sent to its last average received"
        )
        self._exposed = seconds(
            "andon_exchange_wait_seconds", "Stood still for averages after a step's last backward"
        )
        self._commit = seconds(
            "andon_commit_wait_seconds", "From this worker's report of a step to its commit"
        )

    def follow(self, step: Callable[[], int]) -> None:
        """Shows what `step` says at each scrape; it is called on the scraping thread."""
        self._step.set_function(step)

    def committed(self, measured: StepMeasured) -> None:
        """Counts a committed step."""
        timings = measured.report.timings
        self._samples.inc(measured.report.samples)
        before, self._traffic = self._traffic, measured.traffic
        for path in PATHS:
            self._sent[path].inc(measured.traffic.sent[path] - before.sent[path])
            self._received[path].inc(measured.traffic.received[path] - before.received[path])
        self._whole.observe(measured.seconds)
        self._data.observe(timings.data_s)
        self._backward.observe(timings.compute_s)
        self._exchange.observe(timings.exchange_s)
        self._exposed.observe(timings.wait_s)
        self._commit.observe(measured.commit_s)
        if timings.exchange_s > 0:
            self._hidden.set(1.0 - min(1.0, timings.wait_s / timings.exchange_s))


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Scrape(WSGIRequestHandler):
    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: scrapes are many."""


class MetricsEndpoint:
    """Serves a registry over HTTP, on threads of its own, until it is closed."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listens on `host`; port 0 is any free one.

        Raises:
            ValueError: the port is taken, or the host is not one of this machine's.
        """
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), kind, _Scrape)
        except OSError as error:
            raise ValueError(
                f"this worker's metrics can't be served on {host}:{port} ({error}): set "
                "ANDON_METRICS_BIND to one of this machine's addresses, with no port for any free "
                "one, or to off"
            ) from error
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_CLOSING_POLL_S,),
            name="andon-metrics",
            daemon=True,
        )
        close_in_children(f"{self._host}:{self._port}")
        self._thread.start()

    def address(self, coordinator: str) -> str:
        """Where it is scraped, as host:port, by who can reach what the coordinator can."""
        host = self._host
        if host in _EVERYWHERE:
            host = _own_host(coordinator)
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def _port(self) -> int:
        return self._server.server_port


class StepClock:
    """Measures steps, from assignment to commit."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        """No step is under way."""
        self._metrics = metrics
        self._assigned_at = self._reported_at = 0.0
        self._report: StepReport | None = None

    def assigned(self) -> None:
        """A round begins."""
        self._assigned_at = time.perf_counter()

    def reported(self, report: StepReport) -> None:
        """This worker holds a round's averages."""
        self._report, self._reported_at = report, time.perf_counter()

    def committed(self, key: Key, traffic: Traffic) -> None:
        """Counts the step that was committed under `key`, if this worker reported it."""
        report, now = self._report, time.perf_counter()
        if report is None or report.key != key:
            return
        self._metrics.committed(
            StepMeasured(
                report=report,
                seconds=now - self._assigned_at,
                commit_s=now - self._reported_at,
                traffic=traffic,
            )
        )


class Telemetry:
    """One worker's metrics and their endpoint, if it has one."""

    def __init__(self, config: LineConfig) -> None:
        """Listens where the configuration says.

        Raises:
            ValueError: it can't listen there.
        """
        registry = CollectorRegistry()
        self.metrics = WorkerMetrics(registry)
        self.clock = StepClock(self.metrics)
        self.address = ""
        """Where it is scraped, as host:port; empty if nowhere."""
        self._endpoint: MetricsEndpoint | None = None
        bind = config.metrics_endpoint
        if bind is not None:
            self._endpoint = MetricsEndpoint(*bind, registry)
            self.address = self._endpoint.address(config.address)

    def close(self) -> None:
        """Stops listening."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def _own_host(coordinator: str) -> str:
    """The address from which this machine reaches the coordinator; its name if there is no way."""
    host, _, port = coordinator.rpartition(":")
    with suppress(OSError, ValueError):
        *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # Sends nothing: it only picks a route.
            return str(probe.getsockname()[0])
    return socket.gethostname()
