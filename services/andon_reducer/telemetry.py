"""Telemetry: the reducer's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from andon.host.telemetry import ExchangeDurations, FollowedCounter, RefusalCounter, TableCounter
from andon.protocol.reasons import Reason
from andon_reducer.core.effects import DataPath, Direction, FreeRound, RoundOutcome

__all__ = ["ReducerTelemetry"]


class ReducerTelemetry:
    """Counts what happens, as a `ReducerObserver`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        refusals: RefusalCounter | None = None,
        exchanges: ExchangeDurations | None = None,
    ) -> None:
        """Registers the metrics; every label is there from the start, at 0.

        Args:
            registry: takes them.
            refusals: the counter of another service in this registry; None: this one makes it.
            exchanges: the same for the histogram of durations.
        """
        self._exchanges = exchanges or ExchangeDurations(registry)
        self._moved = TableCounter(
            registry,
            "andon_exchange_bytes_total",
            "Bytes of chunks and state, from workers (up) and to them (down), by the path that "
            "they took.",
            ["direction", "path"],
            {(way, path): (way.value, path.value) for way in Direction for path in DataPath},
        )
        self.paths: frozenset[DataPath] = frozenset()
        """Those that bytes took in the last round."""
        self._taken: set[DataPath] = set()
        self._relayed = Counter(
            "andon_state_transfer_bytes_total",
            "Bytes of the line's state that newcomers received through this reducer, which are in "
            "`andon_exchange_bytes_total` too, or on its word through a file of their host.",
            registry=registry,
        )
        self._inflight = Gauge(
            "andon_inflight_bytes",
            "Bytes of contributions and averages that the reducer holds now.",
            registry=registry,
        )
        self._rounds = TableCounter(
            registry,
            "andon_reducer_rounds_total",
            "Rounds that are over at this reducer, by how they ended.",
            ["outcome"],
            {each: (each.value,) for each in RoundOutcome},
        )
        self._averaging = FollowedCounter(
            registry,
            "andon_reducer_averaging_seconds_total",
            "Time that this reducer's threads spent on arithmetic; the rate is how many of them "
            "are busy.",
        )
        self._refused = (refusals or RefusalCounter(registry)).of("reducer")
        self._streams = Gauge(
            "andon_reducer_streams", "Bulk streams that are open now.", registry=registry
        )
        self._lane_connections = Gauge(
            "andon_reducer_lane_connections",
            "Connections of TCP lanes on which chunks travel now, from workers (up) and to them "
            "(down); a stream's lanes have one or more each way.",
            ["direction"],
            registry=registry,
        )
        for direction in Direction:
            self._lane_connections.labels(direction.value)

    def follow(
        self,
        averaging_s: Callable[[], float],
        inflight_bytes: Callable[[], int],
        lane_connections: Callable[[Direction], int],
    ) -> None:
        """Makes each scrape ask how long the threads have computed, and what is there now.

        It asks on the scraping thread.
        """
        self._averaging.follow(averaging_s)
        self._inflight.set_function(inflight_bytes)
        for direction in Direction:
            counted = self._lane_connections.labels(direction.value)
            counted.set_function(partial(lane_connections, direction))

    def moved(self, direction: Direction, size_bytes: int, path: DataPath = DataPath.WIRE) -> None:
        """Counts bytes."""
        self._moved.totals[direction, path] += size_bytes
        self._taken.add(path)

    def relayed(self, size_bytes: int) -> None:
        """Counts bytes of state that a newcomer received."""
        self._relayed.inc(size_bytes)

    def freed(self, effect: FreeRound) -> None:
        """Counts a round and times its exchanges."""
        self._rounds.totals[effect.outcome] += 1
        self.paths, self._taken = frozenset(self._taken), set()
        for seconds in effect.exchange_seconds:
            self._exchanges.took(seconds, effect.key)

    def refused(self, reason: Reason) -> None:
        """Counts a refusal."""
        self._refused(reason)

    def opened(self) -> None:
        """Counts an open stream."""
        self._streams.inc()

    def closed(self) -> None:
        """Counts a stream that ended."""
        self._streams.dec()
