"""The tables of docs/metrics.md are the registries: every metric, its type and its labels."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from andon.host.telemetry import HandshakeCounter, RefusalCounter
from andon.protocol.layout import Layout
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import events
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.telemetry import LineMetrics, Totals
from andon_reducer.telemetry import ReducerTelemetry
from andon_trainer.telemetry import WorkerMetrics
from unit.project.documents import ROOT

Table = dict[str, tuple[str, frozenset[str], str]]
"""Type, labels and unit, by name."""

_ROW = re.compile(r"^\| `(andon_\w+)` \|(.*)\|$", re.MULTILINE)
_UNITS = ("seconds", "bytes")


def service() -> CollectorRegistry:
    """A service's registry, one worker having joined: its labels are then there, too."""
    registry = CollectorRegistry()
    refusals = RefusalCounter(registry)
    ReducerTelemetry(registry, refusals)
    HandshakeCounter(registry)
    metrics = LineMetrics(registry, Totals(), refusals)
    settings = LineSettings(run_id="7f3a", expect_workers=1, min_workers=1, max_workers=1)
    line = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    joined = events.WorkerJoined(
        1,
        events.JoinRequest(
            run_id="7f3a",
            incarnation=1,
            layout=Layout(()),
            plan=RunPlan(global_batch=1, dataset_size=8),
        ),
    )
    metrics.observe(joined, line.receive(joined, 0.0), 0.0)
    metrics.tick(line.status(0.0))
    return registry


def worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    return registry


def families(registry: CollectorRegistry) -> list[Metric]:
    return list(registry.collect())


def registered(registry: CollectorRegistry) -> Table:
    table: Table = {}
    for family in families(registry):
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = frozenset(name for sample in family.samples for name in sample.labels)
        unit = next((each for each in _UNITS if family.name.endswith(f"_{each}")), "")
        table[family.name + ending] = family.type, labels - {"le", "quantile"}, unit
    return table


def written(heading: str) -> Table:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table: Table = {}
    for name, rest in _ROW.findall(section):
        kind, labels, unit, _tells = (cell.strip() for cell in rest.split("|"))
        named = frozenset(re.findall(r"`(\w+)`", labels))
        table[name] = kind, named, unit if unit in _UNITS else ""
    return table


@pytest.mark.parametrize(("heading", "make"), [("The service", service), ("A worker", worker)])
def test_the_table_is_what_is_registered(
    heading: str, make: Callable[[], CollectorRegistry]
) -> None:
    assert written(heading) == registered(make())


def test_no_name_has_two_types_or_two_sets_of_labels() -> None:
    one, other = registered(service()), registered(worker())

    assert one.keys() & other.keys() == {"andon_build_info", "andon_exchange_bytes_total"}
    for name in one.keys() & other.keys():
        assert one[name] == other[name]


def test_exchanges_are_timed_in_the_same_buckets_at_both_ends() -> None:
    def buckets(registry: CollectorRegistry, name: str) -> list[str]:
        return [
            sample.labels["le"]
            for family in families(registry)
            for sample in family.samples
            if sample.name == f"{name}_bucket"
        ]

    assert buckets(service(), "andon_allreduce_seconds") == buckets(
        worker(), "andon_exchange_seconds"
    )
