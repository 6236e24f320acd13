"""Telemetry: a worker's metrics for Prometheus, and the port where they are scraped.

The thread that trains sets the numbers once a step, when the step's record has arrived. A scrape
only reads them, on a thread of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from andon.host.metrics import MetricsApp, MetricsEndpoint, MetricsGuard
from andon.host.run_token import read_token
from andon.host.telemetry import OptionalGauge, TimeHistogram, new_registry
from andon.host.tls import address_of
from andon.host.web_names import listed_names, own_names
from andon.protocol.records import Key
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import StepReport
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.control.process_looks import retransmitted
from andon_trainer.exchange.path import Traffic
from andon_trainer.timeline import Timeline

__all__ = ["GpuMetrics", "GpuReading", "StepClock", "StepMeasured", "Telemetry", "WorkerMetrics"]

_EVERYWHERE = ("0.0.0.0", "::")


PATHS = ("wire", "tcp", "shared-memory", "ring")
"""The ways that chunks take."""

GPU_MEMORY = ("allocated", "peak", "reserved", "total")
"""What a GPU's memory is counted by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What is known of a worker's GPU at one moment."""

    memory_bytes: Mapping[str, int]
    """By each of `GPU_MEMORY`."""
    utilization: float | None
    """From 0 to 1; None: nothing here can measure it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """The numbers of a committed step: what was reported, and what is known since the commit."""

    report: StepReport
    step: int
    """Its number."""
    seconds: float
    """Time from its assignment to its commit."""
    commit_s: float
    """Time from this worker's report to the commit."""
    traffic: Traffic
    """What went since the worker started, in void rounds too, by each of `PATHS`."""


class GpuMetrics(Collector):
    """A worker's GPU, read at each scrape; without a GPU there are no samples."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], GpuReading] | None) -> None:
        """Registers the metrics; `read` is called on the scraping thread."""
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        memory = GaugeMetricFamily(
            "andon_gpu_memory_bytes",
            "Memory of this worker's GPU, by kind: what tensors of this process use now "
            "(allocated) and at most so far (peak), what PyTorch holds for them (reserved), and "
            "what the GPU has (total). Absent without a GPU.",
            labels=["kind"],
        )
        utilization = GaugeMetricFamily(
            "andon_gpu_utilization_ratio",
            "Part of the last moments in which this worker's GPU was busy, from 0 to 1. Absent "
            "without a GPU, and without `nvidia-ml-py`.",
        )
        if self._read is not None:
            reading = self._read()
            for kind in GPU_MEMORY:
                memory.add_metric([kind], reading.memory_bytes[kind])
            if reading.utilization is not None:
                utilization.add_metric([], reading.utilization)
        return memory, utilization


class LinkMetrics(Collector):
    """What this process's TCP connections sent again, read at each scrape."""

    def __init__(
        self, registry: CollectorRegistry, read: Callable[[], Mapping[int, int] | None]
    ) -> None:
        """Registers the metric; `read` is called on the scraping thread, see `retransmitted`."""
        self._read = read
        self._lock = threading.Lock()
        self._seen: Mapping[int, int] = {}
        self._total = 0
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        family = CounterMetricFamily(
            "andon_worker_retransmitted_segments",
            "TCP segments that this worker sent again, on its lanes and its other connections: "
            "its network loses them. A connection that opens and closes between two scrapes is "
            "left out. Absent where the system does not say.",
        )
        with self._lock:
            now = self._read()
            if now is not None:
                self._total += sum(
                    max(0, again - self._seen.get(at, 0)) for at, again in now.items()
                )
                self._seen = now
                family.add_metric([], self._total)
        return (family,)


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        gpu: Callable[[], GpuReading] | None = None,
        sent_again: Callable[[], Mapping[int, int] | None] = retransmitted,
    ) -> None:
        """Registers them; every label exists from the start, at 0.

        Args:
            registry: where.
            gpu: reads the GPU, if there is one.
            sent_again: reads what was sent again, see `retransmitted`.
        """
        self._registry = registry
        self._step = Gauge(
            "andon_worker_step", "Steps committed at this worker's head.", registry=registry
        )
        self._samples = self._counter(
            "andon_samples_total", "Samples that this worker gave to committed steps."
        )
        self._local_steps = self._counter(
            "andon_local_steps_total",
            "Optimizer steps that this worker made between two exchanges, if the schedule is "
            "local; those of void rounds too.",
        )
        self._whole = self._times(
            "andon_worker_step_seconds",
            "Time from a step's assignment to its commit, on this worker.",
        )
        self._data = self._times(
            "andon_data_wait_seconds", "Time that this worker stood still for data, in one step."
        )
        self._compute = self._times(
            "andon_compute_seconds",
            "Time of forward and backward of a step's micro-batches, on a GPU by the device's "
            "time; 0 in manual steps.",
        )
        self._commit = self._times(
            "andon_commit_wait_seconds", "Time from this worker's report of a step to its commit."
        )
        self._register_exchange()
        self._rejoins = self._counter(
            "andon_worker_rejoins_total",
            "Times that this worker joined again, because its stream to the service broke.",
        )
        self._voided = self._counter(
            "andon_worker_rounds_voided_total",
            "Rounds of this worker that were void: it tried the step again.",
        )
        GpuMetrics(registry, gpu)
        LinkMetrics(registry, sent_again)

    def _register_exchange(self) -> None:
        self._traffic = Traffic()
        moved = Counter(
            "andon_exchange_bytes_total",
            "Bytes of chunks, to the reducer or the next rank (up) and from there (down), by the "
            "path that they took.",
            ["direction", "path"],
            registry=self._registry,
        )
        self._sent = {path: moved.labels("up", path) for path in PATHS}
        self._received = {path: moved.labels("down", path) for path in PATHS}
        paths = Gauge(
            "andon_exchange_path",
            "1 for each path that bytes of the last exchange took, and 0 for the others.",
            ["path"],
            registry=self._registry,
        )
        self._paths = {path: paths.labels(path) for path in PATHS}
        self._fallbacks = self._counter(
            "andon_shared_memory_fallbacks_total",
            "Times that this worker could not share memory with a reducer of its host, so that "
            "gradients went over the wire.",
        )
        self._exchange = self._times(
            "andon_exchange_seconds",
            "Time from a step's first block sent to its last average received.",
        )
        self._exposed = self._times(
            "andon_exchange_wait_seconds",
            "Time that this worker stood still for averages after a step's last backward: the "
            "part of the exchange that nothing hides.",
        )
        self._hidden = OptionalGauge(
            self._registry,
            "andon_exchange_hidden_ratio",
            "Part of the last exchange that took place during backward, from 0 to 1; absent "
            "before the first.",
        )

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, registry=self._registry)

    def _times(self, name: str, documentation: str) -> TimeHistogram:
        return TimeHistogram(self._registry, name, documentation)

    def follow(self, step: Callable[[], int]) -> None:
        """Makes each scrape call `step`, on the scraping thread."""
        self._step.set_function(step)

    def stepped_locally(self) -> None:
        """Counts an optimizer step between two exchanges."""
        self._local_steps.inc()

    def rejoins(self) -> None:
        """Counts that this worker joins again."""
        self._rejoins.inc()

    def voided(self) -> None:
        """Counts a round that is void."""
        self._voided.inc()

    def committed(self, measured: StepMeasured) -> None:
        """Counts a committed step."""
        timings, step = measured.report.timings, measured.step
        self._samples.inc(measured.report.samples)
        self._moved(measured.traffic)
        for histogram, seconds in (
            (self._whole, measured.seconds),
            (self._data, timings.data_s),
            (self._compute, timings.busy_s),
            (self._exchange, timings.exchange_s),
            (self._exposed, timings.wait_s),
            (self._commit, measured.commit_s),
        ):
            histogram.observe(seconds, step)
        if timings.exchange_s > 0:
            self._hidden.set(1.0 - min(1.0, timings.wait_s / timings.exchange_s))

    def _moved(self, traffic: Traffic) -> None:
        before, self._traffic = self._traffic, traffic
        sent = {path: traffic.sent[path] - before.sent[path] for path in PATHS}
        received = {path: traffic.received[path] - before.received[path] for path in PATHS}
        self._fallbacks.inc(traffic.fallbacks - before.fallbacks)
        if not any(sent.values()) and not any(received.values()):
            return  # Nothing was exchanged: the path of the last exchange stays.
        for path in PATHS:
            self._sent[path].inc(sent[path])
            self._received[path].inc(received[path])
            self._paths[path].set(bool(sent[path] or received[path]))


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

    def committed(self, key: Key, step: int, traffic: Traffic) -> None:
        """Counts the step committed under `key`, if this worker reported it."""
        report, now = self._report, time.perf_counter()
        if report is None or report.key != key:
            return  # A record of a step that this worker had no part in.
        self._metrics.committed(
            StepMeasured(
                report=report,
                step=step,
                seconds=now - self._assigned_at,
                commit_s=now - self._reported_at,
                traffic=traffic,
            )
        )


class Telemetry:
    """One worker's metrics, their endpoint if they are served, and its timeline if it has one."""

    def __init__(
        self,
        config: LineConfig,
        timeline: Timeline | None = None,
        gpu: Callable[[], GpuReading] | None = None,
    ) -> None:
        """Listens at `metrics_bind` of the configuration, unless it is off.

        `gpu` reads this worker's GPU, if it has one; it is called on the scraping thread.

        Raises:
            ValueError: this machine can't listen there.
        """
        self.timeline = timeline
        registry = new_registry()
        self.metrics = WorkerMetrics(registry, gpu)
        self.clock = StepClock(self.metrics)
        self.address = ""
        """Where the metrics are scraped, as host:port; empty if they are not served."""
        self._endpoint: MetricsEndpoint | None = None
        bind = config.metrics_endpoint
        if bind is not None:
            host, port = bind
            self._endpoint = _listen(host, port, registry, _guard(host, config))
            self.address = _address(host, self._endpoint.port, config.address)

    def close(self) -> None:
        """Stops listening."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def _guard(host: str, config: LineConfig) -> MetricsGuard:
    """Who may read the metrics on `host`."""
    return MetricsGuard(
        names=own_names(host, *listed_names(config.metrics_hosts)),
        token=read_token(
            config.metrics_token_file,
            file_setting="metrics_token_file (ANDON_METRICS_TOKEN_FILE)",
            text_setting="",
        ),
    )


def _listen(
    host: str, port: int, registry: CollectorRegistry, guard: MetricsGuard
) -> MetricsEndpoint:
    try:
        endpoint = MetricsEndpoint(host, port, MetricsApp(registry, guard))
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
    return address_of(host, port)


def _own_host(coordinator: str) -> str:
    """This machine's address on the way to the coordinator; its host name if there is no way."""
    host, _, port = coordinator.rpartition(":")
    with suppress(OSError, ValueError):
        *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # UDP: it sends nothing, and only picks a route.
            return str(probe.getsockname()[0])
    return socket.gethostname()
