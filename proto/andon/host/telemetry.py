"""Telemetry: what the metrics of all processes have in common.

Every process has one registry (`new_registry`), which begins with what is known of any process: its
version, its processor time and its memory. Services and workers add their own.

Times are histograms over the same buckets everywhere, so that they can be compared and added up. A
time that belongs to a step carries the step as an exemplar, which a scraper gets if it asks for
OpenMetrics. The step is never a label: there would be as many series as steps.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from andon import __version__
from andon.protocol.reasons import Reason
from andon.protocol.records import Key

__all__ = [
    "BUCKETS_S",
    "ExchangeDurations",
    "FollowedCounter",
    "HandshakeCounter",
    "OptionalGauge",
    "RefusalCounter",
    "TableCounter",
    "TimeHistogram",
    "new_registry",
]

BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""The upper bounds of every histogram of times, from an exchange in memory to a long recovery."""

_BOUNDS = (*map(repr, BUCKETS_S), "+Inf")
"""The buckets' labels."""

_ROUNDS_KEPT = 16
"""A reducer reports a round when the next one begins, so its step is needed only for that long."""


class _Registry(CollectorRegistry):
    """A registry that leaves out when each counter was made.

    The client adds a series `..._created` to every counter and histogram: a third of all series.
    Those of a service would also be wrong. Its counters continue from the journal, so a counter
    that is made now may stand at 1000. A scraper that takes the time for the counter's beginning
    sees a jump by 1000.
    """

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [each for each in family.samples if not _is_created(each.name)]
            yield family


def _is_created(name: str) -> bool:
    return name.endswith("_created")


def new_registry() -> CollectorRegistry:
    """The registry of a process, with its version, processor time, memory and open files."""
    registry = _Registry()
    Info("andon_build", "The version of Andon that runs.", registry=registry).info(
        {"version": __version__}
    )
    ProcessCollector(registry=registry)
    return registry


class TimeHistogram(Collector):
    """A histogram of times. What a scrape shows is made at the scrape: a step counts several."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str) -> None:
        """Registers the metric, without any time yet."""
        self._name, self._documentation = name, documentation
        self._counts = [0] * (len(BUCKETS_S) + 1)
        """Of each bucket by itself."""
        self._sum_s = 0.0
        self._exemplars: list[tuple[float, int, float] | None] = [None] * len(self._counts)
        """The last time that had a step in each bucket: it, the step, and when that was."""
        self._lock = threading.Lock()
        """Guards all three."""
        registry.register(self)

    def observe(self, duration_s: float, step: int | None = None) -> None:
        """Counts a time; the step, if there is one, becomes the exemplar of its bucket."""
        bucket = bisect_left(BUCKETS_S, duration_s)
        with self._lock:
            self._counts[bucket] += 1
            self._sum_s += duration_s
            if step is not None:
                self._exemplars[bucket] = duration_s, step, time.time()

    def describe(self) -> Iterable[Metric]:
        """The metric without samples, so that its name can't be registered twice."""
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        with self._lock:
            counts, sum_s, exemplars = list(self._counts), self._sum_s, list(self._exemplars)
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
            (bound, count) if known is None else (bound, count, _exemplar(*known))
            for bound, count, known in zip(_BOUNDS, accumulate(counts), exemplars, strict=True)
        ]
        yield HistogramMetricFamily(
            self._name, self._documentation, buckets=buckets, sum_value=sum_s
        )


def _exemplar(duration_s: float, step: int, at_unix_s: float) -> Exemplar:
    return Exemplar({"step": str(step)}, duration_s, at_unix_s)


class OptionalGauge(Collector):
    """A gauge that has no sample while nothing is known: it is absent then, not 0 and not NaN."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str) -> None:
        """Registers the metric, without a value."""
        self._name, self._documentation = name, documentation
        self._value: float | None = None
        registry.register(self)

    def set(self, value: float | None) -> None:
        """Shows a value; None: shows nothing."""
        self._value = value

    def describe(self) -> Iterable[Metric]:
        """The metric without samples, so that its name can't be registered twice."""
        yield GaugeMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        # Read once: the thread that trains may set it meanwhile.
        yield GaugeMetricFamily(self._name, self._documentation, value=self._value)


class FollowedCounter(Collector):
    """A counter that is kept elsewhere, and asked for at each scrape."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str) -> None:
        """Registers the metric, at 0 until there is somebody to ask."""
        self._name, self._documentation = name, documentation
        self._total: Callable[[], float | None] = lambda: 0.0
        registry.register(self)

    def follow(self, total: Callable[[], float | None]) -> None:
        """From now on `total` says how much it is; it is called on the scraping thread.

        While it returns None the counter has no sample.
        """
        self._total = total

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        yield CounterMetricFamily(self._name, self._documentation, value=self._total())


class TableCounter(Collector):
    """A counter with labels that one thread adds to, as to a table of numbers.

    It is for what counts in each message: a scrape makes of it what a scraper reads.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        labels: Sequence[str],
        series: Mapping[Any, tuple[str, ...]],
    ) -> None:
        """Registers the metric: all series are there, at 0; each by its key, with its labels."""
        self._name, self._documentation = name, documentation
        self._labels, self._series = labels, series
        self.totals: dict[Any, float] = dict.fromkeys(series, 0.0)
        """By key. Its owner adds to it; no key may be new."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for key, values in self._series.items():
            family.add_metric(values, self.totals[key])
        yield family


class ExchangeDurations:
    """Times exchanges; one for each registry.

    A reducer times those that it averages. On a ring only the workers see them, and report their
    times to the coordinator.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric."""
        self._seconds = TimeHistogram(
            registry,
            "andon_allreduce_seconds",
            "Time from an exchange's first contribution to its last average, at the reducer; "
            "on a ring from the slowest rank's first chunk sent to its last average.",
        )
        self._steps: dict[Key, int] = {}

    def began(self, key: Key, step: int) -> None:
        """Notes to which step a round belongs: the coordinator knows, and the reducer does not."""
        self._steps[key] = step
        if len(self._steps) > _ROUNDS_KEPT:
            del self._steps[next(iter(self._steps))]

    def took(self, duration_s: float, key: Key) -> None:
        """Counts an exchange of round `key`."""
        self._seconds.observe(duration_s, self._steps.get(key))


class RefusalCounter:
    """Counts calls that were ended with a reason; one for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric, without any service yet."""
        self._counter = Counter(
            "andon_refusals_total",
            "Calls that were ended with an error, by the service that ended them and its reason.",
            ["service", "reason"],
            registry=registry,
        )

    def of(self, service: Literal["coordinator", "reducer", "server"]) -> Callable[[Reason], None]:
        """A function that counts a refused call of `service`.

        `server` is for calls that were refused before a service saw them. From now on every reason
        has a count, at first 0, so that a rate can be computed from its first refusal on.
        """
        counts = {reason: self._counter.labels(service, reason.lower()) for reason in Reason}

        def count(reason: Reason) -> None:
            counts[reason].inc()

        return count


class HandshakeCounter:
    """Counts the TLS handshakes that clients begin. gRPC does not report those that fail."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the counter, at 0."""
        self._begun = Counter(
            "andon_tls_handshakes_total",
            "TLS handshakes that clients began, whether they succeeded or not.",
            registry=registry,
        )

    def begun(self) -> None:
        """A client began one."""
        self._begun.inc()
