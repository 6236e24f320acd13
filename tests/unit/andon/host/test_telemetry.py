"""What the metrics of all processes have in common."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import choose_encoder

from andon import __version__
from andon.host.telemetry import (
    ExchangeDurations,
    FollowedCounter,
    OptionalGauge,
    TimeHistogram,
    new_registry,
)
from andon.protocol.records import Key


def openmetrics(registry: CollectorRegistry) -> bytes:
    """What a scraper gets that asks for OpenMetrics, as Prometheus does."""
    encode, _ = choose_encoder("application/openmetrics-text")
    return encode(registry)


def exemplars(registry: CollectorRegistry) -> list[str]:
    """The lines of an OpenMetrics scrape that have an exemplar."""
    text = openmetrics(registry).decode()
    return [
        line.partition(" # ")[2].partition("}")[0] for line in text.splitlines() if " # " in line
    ]


def test_a_process_says_its_version() -> None:
    assert new_registry().get_sample_value("andon_build_info", {"version": __version__}) == 1


def test_no_series_says_when_a_counter_was_made() -> None:
    # A counter that continues from a journal begins at 1000, and would be taken for a jump.
    registry = new_registry()
    Counter("andon_things_total", "Things.", registry=registry).inc(1000)
    TimeHistogram(registry, "andon_thing_seconds", "Time of a thing.")

    for text in (generate_latest(registry), openmetrics(registry)):
        assert b"_created" not in text
        assert b"andon_things_total 1000.0" in text


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    registry = CollectorRegistry()
    gauge = OptionalGauge(registry, "andon_thing", "A thing.")
    assert registry.get_sample_value("andon_thing") is None

    gauge.set(0.0)
    assert registry.get_sample_value("andon_thing") == 0
    gauge.set(None)

    assert registry.get_sample_value("andon_thing") is None


def test_a_name_is_registered_once_even_while_it_has_no_value() -> None:
    registry = CollectorRegistry()
    OptionalGauge(registry, "andon_thing", "A thing.")

    with pytest.raises(ValueError, match="Duplicated"):
        Gauge("andon_thing", "A thing.", registry=registry)


def test_a_counter_that_is_kept_elsewhere_is_asked_for_at_each_scrape() -> None:
    registry, totals = CollectorRegistry(), iter((3.0, 5.0))
    counter = FollowedCounter(registry, "andon_busy_seconds_total", "Time.")
    assert registry.get_sample_value("andon_busy_seconds_total") == 0

    counter.follow(lambda: next(totals))

    assert [registry.get_sample_value("andon_busy_seconds_total") for _ in range(2)] == [3.0, 5.0]


def test_a_time_has_its_step_as_an_exemplar_for_those_who_ask_for_openmetrics() -> None:
    registry = CollectorRegistry()
    histogram = TimeHistogram(registry, "andon_thing_seconds", "Time of a thing.")

    histogram.observe(0.3, 118)
    histogram.observe(7.0, None)

    assert exemplars(registry) == ['{step="118"']
    assert b'step="118"' not in generate_latest(registry)


def test_an_exchange_leads_to_its_step_if_the_coordinator_named_the_round() -> None:
    registry = CollectorRegistry()
    exchanges = ExchangeDurations(registry)
    exchanges.began(Key(1, 7), step=3)

    exchanges.took(0.02, Key(1, 7))
    exchanges.took(40.0, Key(1, 8))  # Of a reducer in a process of its own: it knows no step.

    assert exemplars(registry) == ['{step="3"']
    assert registry.get_sample_value("andon_allreduce_seconds_count") == 2


def test_only_the_last_rounds_are_remembered() -> None:
    registry = CollectorRegistry()
    exchanges = ExchangeDurations(registry)
    for number in range(1000):
        exchanges.began(Key(1, number), step=number)

    exchanges.took(0.02, Key(1, 0))

    assert exemplars(registry) == []
    assert len(exchanges._steps) < 100
