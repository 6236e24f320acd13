"""Alerts: each fires when it should, names whom it concerns, and has a page on what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from unit.project.containers import compose
from unit.project.documents import ROOT

PROMETHEUS, ALERTMANAGER = ROOT / "docker/prometheus", ROOT / "docker/alertmanager"
RUNBOOKS = ROOT / "docs/runbooks"
CASES = sorted((ROOT / "tests/unit/project/alerts").glob("*.yml"))
PARTS = ["What it means.", "How to see it.", "What to do.", "When to silence it."]


def _loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return content


def _rules() -> list[dict[str, Any]]:
    groups = _loaded(PROMETHEUS / "alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def _cases() -> list[list[tuple[str, bool]]]:
    """For each case of each file the alert that it looks at, and whether it fires; in order."""
    return [
        [(each["alertname"], bool(each["exp_alerts"])) for each in case["alert_rule_test"]]
        for path in CASES
        for case in _loaded(path)["tests"]
    ]


RULES = _rules()
ALERTS = [rule for rule in RULES if "alert" in rule]
every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))


def _run(*command: str) -> None:
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"no {command[0]}: apt-get install prometheus prometheus-alertmanager")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# What each alert says


@every_alert
def test_an_alert_says_how_urgent_it_is_and_names_its_run(alert: dict[str, Any]) -> None:
    texts = alert["annotations"]

    assert alert["labels"]["severity"] in ("critical", "warning")
    for name in ("summary", "description"):
        assert "$labels.run" in texts[name], name
        by_worker = re.search(r"\(run, worker|run_worker:", alert["expr"])
        assert ("$labels.worker" in texts[name]) == bool(by_worker), name


@every_alert
def test_an_alert_leads_to_its_page(alert: dict[str, Any]) -> None:
    page = RUNBOOKS / f"{alert['alert']}.md"
    text = page.read_text("utf-8")

    assert alert["annotations"]["runbook_url"].endswith(f"docs/runbooks/{page.name}")
    assert text.startswith(f"# {page.stem}\n")
    assert f"| severity | {alert['labels']['severity']} |" in text
    assert re.findall(r"^\*\*(.*?)\*\* ", text, re.M) == PARTS


def test_every_page_is_of_an_alert_and_the_index_names_them_in_order() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", (RUNBOOKS / "README.md").read_text("utf-8"), re.M
    )

    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == {alert["alert"] for alert in ALERTS}
    assert rows == [
        (alert["alert"], alert["alert"], alert["labels"]["severity"]) for alert in ALERTS
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.get("alert") or rule["record"]))
def test_a_rule_asks_for_series_that_are_documented_or_recorded(rule: dict[str, Any]) -> None:
    recorded = {each["record"] for each in RULES if "record" in each}
    table = (ROOT / "docs/metrics.md").read_text("utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    asked: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            asked.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            asked.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(rule["expr"]), visit)

    assert asked
    for selector in asked:
        name = str(selector.name)
        metric = re.sub(r"_(sum|count)$", "", name)
        assert name in recorded | {"up"} or {name, metric} & documented, name


# When it is said


@pytest.mark.prometheus
@pytest.mark.parametrize("path", CASES, ids=lambda path: str(path.stem))
def test_the_rules_fire_and_are_resolved_as_the_cases_say(path: Path) -> None:
    _run("promtool", "test", "rules", str(path))


@every_alert
def test_an_alert_is_tested_firing_and_not_firing_and_resolved(alert: dict[str, Any]) -> None:
    cases = [[fires for name, fires in case if name == alert["alert"]] for case in _cases()]

    fired = any(any(case) for case in cases)
    quiet = any(case and not any(case) for case in cases)
    resolved = any((True, False) in pairwise(case) for case in cases)
    assert fired
    assert quiet, "there is no case in which it stays quiet"
    assert resolved


# How it reaches somebody


@pytest.mark.prometheus
def test_amtool_accepts_the_configuration() -> None:
    _run("amtool", "check-config", str(ALERTMANAGER / "alertmanager.yml"))


@pytest.mark.prometheus
def test_amtool_accepts_the_receivers_that_the_guide_shows(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide/watching.md").read_text("utf-8")
    shown = re.findall(r"^```yaml\n(  - name: .*?)^```", guide, re.M | re.S)
    assert len(shown) == 2
    config = _loaded(ALERTMANAGER / "alertmanager.yml")

    config["receivers"] += yaml.safe_load("".join(shown))
    config["route"]["routes"] += [{"receiver": each["name"]} for each in config["receivers"]]
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(config))

    _run("amtool", "check-config", str(tmp_path / "alertmanager.yml"))


def test_what_each_part_is_told_of_the_next_is_what_compose_starts() -> None:
    services = compose("cpu")["services"]
    mounted = {
        volume["target"]: Path(volume["source"])
        for name in ("prometheus", "alertmanager", "alerts")
        for volume in services[name]["volumes"]
        if volume["type"] == "bind"
    }
    config = _loaded(mounted["/etc/prometheus/prometheus.yml"])
    (manager,) = config["alerting"]["alertmanagers"]
    (webhook,) = _loaded(mounted["/etc/alertmanager/alertmanager.yml"])["receivers"]

    assert [mounted[f"/etc/prometheus/{name}"] for name in config["rule_files"]] == [
        PROMETHEUS / "alerts.yml"
    ]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    assert webhook["webhook_configs"] == [{"url": "http://alerts:9095/"}]
    assert mounted[services["alerts"]["command"][1]] == ALERTMANAGER / "receiver.py"
