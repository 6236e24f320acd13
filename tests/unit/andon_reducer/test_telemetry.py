"""Metrics of a reducer: every label from the start, and what is counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.effects import DataPath, Direction, FreeRound, RoundOutcome
from andon_reducer.telemetry import ReducerTelemetry


def test_every_label_is_there_before_anything_happened() -> None:
    registry = CollectorRegistry()

    ReducerTelemetry(registry)

    for outcome in RoundOutcome:
        labels = {"outcome": outcome.value}
        assert registry.get_sample_value("andon_reducer_rounds_total", labels) == 0
    for reason in Reason:
        labels = {"service": "reducer", "reason": reason.lower()}
        assert registry.get_sample_value("andon_refusals_total", labels) == 0
    for direction in Direction:
        labels = {"direction": direction.value, "path": "wire"}
        assert registry.get_sample_value("andon_exchange_bytes_total", labels) == 0


def test_a_round_is_counted_and_each_of_its_exchanges_timed() -> None:
    registry = CollectorRegistry()
    telemetry = ReducerTelemetry(registry)

    telemetry.freed(FreeRound("7f3a", Key(1, 1), RoundOutcome.FINISHED, (0.015, 40.0)))

    labels = {"outcome": "finished"}
    assert registry.get_sample_value("andon_reducer_rounds_total", labels) == 1
    assert registry.get_sample_value("andon_allreduce_seconds_count") == 2
    assert registry.get_sample_value("andon_allreduce_seconds_bucket", {"le": "0.025"}) == 1
    assert registry.get_sample_value("andon_allreduce_seconds_bucket", {"le": "30.0"}) == 1
    assert registry.get_sample_value("andon_allreduce_seconds_bucket", {"le": "60.0"}) == 2


def test_the_paths_are_those_that_bytes_took_in_the_last_round() -> None:
    telemetry = ReducerTelemetry(CollectorRegistry())
    over = FreeRound("7f3a", Key(1, 1), RoundOutcome.FINISHED, ())
    telemetry.moved(Direction.UP, 8, DataPath.WIRE)
    telemetry.freed(over)

    telemetry.moved(Direction.UP, 8, DataPath.TCP)
    during = telemetry.paths
    telemetry.freed(over)

    assert during == {DataPath.WIRE}
    assert telemetry.paths == {DataPath.TCP}


def test_state_that_newcomers_received_is_counted_and_the_reducer_itself_is_asked() -> None:
    registry = CollectorRegistry()
    telemetry = ReducerTelemetry(registry)
    assert registry.get_sample_value("andon_state_transfer_bytes_total") == 0
    assert registry.get_sample_value("andon_reducer_averaging_seconds_total") == 0

    telemetry.relayed(4096)
    telemetry.follow(lambda: 1.5, lambda: 512, {Direction.UP: 3, Direction.DOWN: 1}.__getitem__)

    assert registry.get_sample_value("andon_state_transfer_bytes_total") == 4096
    assert registry.get_sample_value("andon_reducer_averaging_seconds_total") == 1.5
    assert registry.get_sample_value("andon_inflight_bytes") == 512
    up = {"direction": "up"}
    assert registry.get_sample_value("andon_reducer_lane_connections", up) == 3
