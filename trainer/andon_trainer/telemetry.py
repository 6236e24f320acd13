"""Telemetry: a worker's metrics for Prometheus, and the port where they are scraped.

The thread that trains sets the numbers once a step, when the step's record has arrived. A scrape
only reads them, on a thread of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from andon import __version__
from andon.host.metrics import MetricsEndpoint
from andon.protocol.records import Key
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import StepReport
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.path import Traffic
from andon_trainer.timeline import Timeline

__all__ = ["StepClock", "StepMeasured", "Telemetry", "WorkerMetrics"]

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
_EVERYWHERE = ("0.0.0.0", "::")


PATHS = ("wire", "shared-memory", "ring")
"""The ways that chunks take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """The numbers of a committed step: what was reported, and what is known since the commit."""

    report: StepReport
    seconds: float
    """Time from its assignment to its commit."""
    commit_s: float
    """Time from this worker's report to the commit."""
    traffic: Traffic
    """Bytes since the worker started, in void rounds too, by each of `PATHS`."""


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers them; every label exists from the start, at 0."""
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
        self._compute = seconds(
            "andon_compute_seconds", "Forward and backward of a step's micro-batches"
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
        """Makes each scrape call `step`, on the scraping thread."""
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
        self._compute.observe(timings.busy_s)
        self._exchange.observe(timings.exchange_s)
        self._exposed.observe(timings.wait_s)
        self._commit.observe(measured.commit_s)
        if timings.exchange_s > 0:
            self._hidden.set(1.0 - min(1.0, timings.wait_s / timings.exchange_s))


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
        """This worker has all averages of a round."""
        self._report, self._reported_at = report, time.perf_counter()

    def committed(self, key: Key, traffic: Traffic) -> None:
        """Counts the step committed under `key`, if this worker reported it."""
        report, now = self._report, time.perf_counter()
        if report is None or report.key != key:
            return  # A record of a step that this worker had no part in.
        self._metrics.committed(
            StepMeasured(
                report=report,
                seconds=now - self._assigned_at,
                commit_s=now - self._reported_at,
                traffic=traffic,
            )
        )


class Telemetry:
    """One worker's metrics, their endpoint if they are served, and its timeline if it has one."""

    def __init__(self, config: LineConfig, timeline: Timeline | None = None) -> None:
        """Listens at `metrics_bind` of the configuration, unless it is off.

        Raises:
            ValueError: this machine can't listen there.
        """
        self.timeline = timeline
        registry = CollectorRegistry()
        self.metrics = WorkerMetrics(registry)
        self.clock = StepClock(self.metrics)
        self.address = ""
        """Where the metrics are scraped, as host:port; empty if they are not served."""
        self._endpoint: MetricsEndpoint | None = None
        bind = config.metrics_endpoint
        if bind is not None:
            host, port = bind
            self._endpoint = _listen(host, port, registry)
            self.address = _address(host, self._endpoint.port, config.address)

    def close(self) -> None:
        """Stops listening."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def _listen(host: str, port: int, registry: CollectorRegistry) -> MetricsEndpoint:
    try:
        endpoint = MetricsEndpoint(host, port, registry)
    except OSError as error:
        raise ValueError(
            f"this worker's metrics can't be served on {host}:{port} ({error}): set "
            "ANDON_METRICS_BIND to one of this machine's addresses, with no port for any free "
            "one, or to off"
        ) from error
    # A forked loading process would otherwise keep the port after this worker has gone.
    close_in_children(f"{host}:{endpoint.port}")
    return endpoint


def _address(host: str, port: int, coordinator: str) -> str:
    """Where a Prometheus in the coordinator's network scrapes it, as host:port."""
    if host in _EVERYWHERE:
        host = _own_host(coordinator)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_host(coordinator: str) -> str:
    """This machine's address on the way to the coordinator; its host name if there is no way."""
    host, _, port = coordinator.rpartition(":")
    with suppress(OSError, ValueError):
        *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # UDP: it sends nothing, and only picks a route.
            return str(probe.getsockname()[0])
    return socket.gethostname()
