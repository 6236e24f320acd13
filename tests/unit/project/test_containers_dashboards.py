"""What watches the line asks for metrics that exist, where they are served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from andon.host.telemetry import HandshakeCounter, RefusalCounter
from andon_cli.app import read_config
from andon_coordinator.telemetry import LineMetrics, Totals
from andon_reducer.telemetry import ReducerTelemetry
from andon_server.settings import ServeConfig
from andon_trainer.telemetry import WorkerMetrics
from unit.project.containers import compose
from unit.project.documents import ROOT

DASHBOARDS = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
PROVISIONING = ROOT / "docker/grafana/provisioning"
PROMETHEUS = ROOT / "docker/prometheus/prometheus.yml"
DISCOVERED = {"run", "worker"}
"""Labels that the service's discovery gives to whom it names."""
SAMPLES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
    "summary": ("_sum", "_count"),
}

every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.name))


def _panels(path: Path) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["panels"]
    return panels


def _expressions(path: Path) -> list[str]:
    """What the panels ask, with Grafana's variable filled in."""
    return [
        target["expr"].replace("$__rate_interval", "1m")
        for panel in _panels(path)
        for target in panel["targets"]
    ]


def _series() -> dict[str, set[str]]:
    """The names of all series that service and workers can have, and the labels they have now."""
    service, worker = CollectorRegistry(), CollectorRegistry()
    refusals = RefusalCounter(service)
    LineMetrics(service, Totals(), refusals)
    ReducerTelemetry(service, refusals)
    HandshakeCounter(service)
    WorkerMetrics(worker)
    series: dict[str, set[str]] = {}
    for family in (*service.collect(), *worker.collect()):
        for ending in SAMPLES[family.type]:
            series.setdefault(family.name + ending, set())
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def _selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_there_is_a_dashboard() -> None:
    assert [path.name for path in DASHBOARDS] == ["line.json"]


@every_dashboard
def test_every_metric_that_a_dashboard_asks_for_is_registered(path: Path) -> None:
    series = _series()

    for expression in _expressions(path):
        selectors = _selectors(expression)
        assert selectors, expression
        for selector in selectors:
            assert selector.name in series, f"{path.name} asks for {selector.name}: {expression}"
            for matcher in selector.matchers.matchers:
                assert matcher.name in DISCOVERED | series[selector.name], expression


@every_dashboard
def test_a_dashboard_shows_what_the_line_is_judged_by(path: Path) -> None:
    asked = " ".join(_expressions(path))

    for name in (
        "andon_line_state",
        "andon_step_loss",
        "andon_steps_committed_total",
        "andon_allreduce_seconds_bucket",
        "andon_jidoka_halts_total",
        "andon_workers",
        "andon_worker_wait_seconds_sum",
        "andon_exchange_bytes_total",
    ):
        assert name in asked
    for quantile in ("0.5", "0.99"):
        assert f"histogram_quantile({quantile}, sum by (le) (rate(andon_allreduce_" in asked


@every_dashboard
def test_every_panel_has_its_own_number_and_place_and_says_what_it_shows(path: Path) -> None:
    panels = _panels(path)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert all(x < 24 for x, _ in cells), "a panel is wider than Grafana's 24 columns"
    assert all(panel["title"] and panel["description"] for panel in panels)


@every_dashboard
def test_a_dashboard_asks_the_source_that_is_provisioned(path: Path) -> None:
    source = (PROVISIONING / "datasources/prometheus.yml").read_text("utf-8")
    provisioned = re.findall(r"^ +uid: (\S+)$", source, re.MULTILINE)

    for panel in _panels(path):
        for asker in (panel, *panel["targets"]):
            assert [asker["datasource"]["uid"]] == provisioned


def test_grafana_is_given_what_its_provisioning_names() -> None:
    services = compose("cpu")["services"]
    targets = {volume["target"] for volume in services["grafana"]["volumes"]}
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    provider = (PROVISIONING / "dashboards/andon.yml").read_text("utf-8")
    source = (PROVISIONING / "datasources/prometheus.yml").read_text("utf-8")

    assert "/etc/grafana/provisioning" in targets
    assert re.findall(r"path: (\S+)", provider) == ["/etc/grafana/dashboards"]
    assert "/etc/grafana/dashboards" in targets
    assert home == f"/etc/grafana/dashboards/{DASHBOARDS[0].name}"
    assert "url: http://prometheus:9090" in source


def test_prometheus_asks_whom_the_service_names() -> None:
    asked = PROMETHEUS.read_text("utf-8")
    service = compose("cpu")["services"]["andon"]
    config = read_config(service["command"][1:], service["environment"])

    assert isinstance(config, ServeConfig)
    assert re.findall(r"- url: (\S+)", asked) == [f"http://andon:{config.endpoint_port}/sd"]


@pytest.mark.prometheus
def test_promtool_accepts_prometheus_configuration() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")

    done = subprocess.run(
        [tool, "check", "config", str(PROMETHEUS)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
