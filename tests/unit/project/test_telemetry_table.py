"""The tables of docs/metrics.md are the registries; names, units and help texts are in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
from metrics_tables import page, process, service, table_of, worker
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from andon.host.telemetry import BUCKETS_S
from unit.project.documents import ROOT

METRICS = {
    "process": table_of(process()),
    "service": table_of(service()),
    "worker": table_of(worker()),
}
EVERY = [each for table in METRICS.values() for each in table.values()]
OF_THE_CLIENT = "process_"
"""These come from the client library: what they are called is not our choice."""


def test_the_tables_are_what_is_registered() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")

    assert page(text) == text, "make metrics"


def test_a_table_that_is_out_of_date_is_noticed() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    without = re.sub(r"^\| `andon_halted` .*\n", "", text, flags=re.MULTILINE)

    assert without != text
    assert page(without) == text


def test_a_page_without_a_place_for_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="no marker for calls"):
        page("<!-- metrics run -->\n<!-- end -->")


def test_no_name_has_two_types_or_two_sets_of_labels() -> None:
    one, other = METRICS["service"], METRICS["worker"]

    assert one.keys() & other.keys() == {"andon_exchange_bytes_total"}
    for name in one.keys() & other.keys():
        assert (one[name].kind, one[name].labels) == (other[name].kind, other[name].labels)
    assert not METRICS["process"].keys() & (one.keys() | other.keys())


def test_a_metric_is_named_by_the_rules_of_prometheus() -> None:
    for metric in EVERY:
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric
        assert (metric.kind == "info") == metric.name.endswith("_info"), metric
        assert re.fullmatch(r"(?:andon|process)_[a-z_]+", metric.name), metric
        assert not re.search(r"milliseconds|_ms|_mib|percent|minutes", metric.name), metric
        assert metric.kind not in ("histogram", "summary") or metric.unit == "seconds", metric


def test_a_help_text_is_a_sentence_that_people_can_read_alone() -> None:
    for metric in EVERY:
        if not metric.name.startswith(OF_THE_CLIENT):
            assert re.fullmatch(r"[A-Z1].{19,}\.", metric.meaning), metric


def test_labels_are_of_a_closed_set() -> None:
    free = {"version", "run", "schedule", "topology", "encoding", "answers"}
    closed = {
        *("state", "reason", "answer", "cause", "kind", "status", "worker", "rank"),
        *("direction", "path", "outcome", "service", "name", "action", "phase"),
    }

    for metric in EVERY:
        assert metric.labels <= (free if metric.kind == "info" else closed), metric


@pytest.mark.parametrize("make", [service, worker])
def test_all_times_have_the_same_buckets_from_microseconds_to_minutes(
    make: Callable[[], CollectorRegistry],
) -> None:
    found = {
        family.name: [
            float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels
        ]
        for family in make().collect()
        if family.type == "histogram"
    }

    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (1e-4, 300.0)
    assert found
    for name, bounds in found.items():
        assert bounds == [*BUCKETS_S, float("inf")], name


def test_a_process_tells_its_processor_time_and_memory() -> None:
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= METRICS[
        "process"
    ].keys()


@pytest.mark.parametrize("make", [process, service, worker])
def test_what_is_sent_to_those_who_ask_for_openmetrics_is_openmetrics(
    make: Callable[[], CollectorRegistry],
) -> None:
    encode, _ = choose_encoder("application/openmetrics-text")

    # This parser refuses whatever the standard does; Prometheus lets some of it pass.
    parse: Callable[[str], Iterable[Metric]] = text_string_to_metric_families
    families = list(parse(encode(make()).decode()))

    assert {each.name for each in families} == {each.name for each in make().collect()}
