"""The dashboards are what their code says, and Grafana and Prometheus find what they need.

Grafana's own server is in no package registry, so no test starts it: the SDK of its release reads
every dashboard and must write the same.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from andon_cli.app import read_config
from andon_grafana.__main__ import FOLDER, written
from andon_server.settings import ServeConfig
from unit.project.containers import compose
from unit.project.documents import ROOT

DASHBOARDS = sorted(FOLDER.glob("*.json"))
PROVISIONING = ROOT / "docker/grafana/provisioning"
PROMETHEUS = ROOT / "docker/prometheus/prometheus.yml"
BEYOND_THE_SDK = ("step", "target", "titleFormat")
"""What Grafana's Prometheus source reads of an annotation, and the SDK's model does not have."""

every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.name))


def _read(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return dashboard


def _variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board["templating"]["list"]
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in _read(path)["panels"] if panel["type"] == "row"]


def _panels(path: Path) -> list[dict[str, Any]]:
    """All panels, also those of rows that are closed."""
    found: list[dict[str, Any]] = []
    for panel in _read(path)["panels"]:
        found += panel["panels"] if panel["type"] == "row" else [panel]
    return found


def test_the_dashboards_are_what_their_code_writes() -> None:
    there = {path.name: path.read_text("utf-8") for path in DASHBOARDS}

    assert there == written(), "run `make dashboards`"


@every_dashboard
def test_the_sdk_of_grafanas_release_reads_a_dashboard_and_writes_the_same(path: Path) -> None:
    register_default_plugins()
    dashboard = _read(path)
    for mark in dashboard["annotations"]["list"]:
        assert all(mark.pop(name) for name in BEYOND_THE_SDK)
        mark.pop("textFormat", None)

    again = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))

    assert again == dashboard


def test_the_sdk_is_that_of_the_grafana_that_compose_starts() -> None:
    image = compose("cpu")["services"]["grafana"]["image"]
    pinned = [(ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "constraints.txt")]
    pins = re.findall(r"grafana-foundation-sdk==\d+!([\d.]+)", "".join(pinned))

    assert pins == [image.partition(":")[2]] * 2


def test_the_rows_of_a_run_are_the_questions_of_who_is_on_call() -> None:
    rows = {row["title"]: row["collapsed"] for row in _rows(FOLDER / "line.json")}

    assert rows == {
        "Is the line running?": False,
        "Why did it stop?": False,
        "Who holds it up?": False,
        "What does it cost?": True,
        "What do ranks of a plain script do?": True,
        "Scrape health": True,
    }


def test_a_dashboard_leads_to_each_other_one_with_what_both_select() -> None:
    boards = {board["uid"]: board for board in map(_read, DASHBOARDS)}
    names = {uid: [each["name"] for each in _variables(board)] for uid, board in boards.items()}

    assert set(boards) == {"andon-overview", "andon-line", "andon-worker", "andon-network"}
    for uid, board in boards.items():
        led = dict(link["url"].removeprefix("/d/").split("?") for link in board["links"])
        assert led == {
            other: "&".join(f"${{{name}:queryparam}}" for name in names[uid] if name in theirs)
            for other, theirs in names.items()
            if other != uid
        }
        assert all(link["keepTime"] for link in board["links"])


@every_dashboard
def test_a_series_of_a_worker_or_run_leads_to_its_dashboard(path: Path) -> None:
    for panel in _panels(path):
        legends = " ".join(target["legendFormat"] for target in panel["targets"])
        urls = [link["url"] for link in panel["fieldConfig"]["defaults"].get("links", [])]
        if "{{worker}}" in legends:
            assert [url.partition("&")[0] for url in urls] == [
                "/d/andon-worker?var-worker=${__field.labels.worker}"
            ]
            assert "&${run:queryparam}&" in urls[0]
        elif "{{run}}" in legends:
            assert [url.partition("&")[0] for url in urls] == [
                "/d/andon-line?var-run=${__field.labels.run}"
            ]


def test_the_table_of_runs_is_a_row_each_and_leads_to_the_run() -> None:
    [table] = [each for each in _panels(FOLDER / "overview.json") if each["title"] == "Runs"]
    merge, organize = table["transformations"]
    [link] = table["fieldConfig"]["defaults"]["links"]
    columns = set(organize["options"]["renameByName"].values())

    assert all(each["format"] == "table" and each["instant"] for each in table["targets"])
    assert merge["id"] == "merge"
    assert list(organize["options"]["renameByName"]) == [
        f"Value #{each['refId']}" for each in table["targets"]
    ]
    assert {each["matcher"]["options"] for each in table["fieldConfig"]["overrides"]} <= columns
    assert link["url"].startswith("/d/andon-line?var-run=${__data.fields.run}&")


@every_dashboard
def test_every_panel_has_its_own_number_and_place_and_says_what_it_shows(path: Path) -> None:
    panels = [*_panels(path), *_rows(path)]
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
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in _panels(path))


@every_dashboard
def test_no_line_of_panels_has_a_hole(path: Path) -> None:
    lines: dict[int, int] = {}
    for panel in [*_panels(path), *_rows(path)]:
        place = panel["gridPos"]
        lines[place["y"]] = lines.get(place["y"], 0) + place["w"]

    assert set(lines.values()) == {24}


@every_dashboard
def test_a_dashboard_asks_the_source_that_is_selected_at_first_the_provisioned_one(
    path: Path,
) -> None:
    provisioned = (PROVISIONING / "datasources/prometheus.yml").read_text("utf-8")
    selected = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in _variables(_read(path))}

    assert variables["datasource"]["query"] == "prometheus"
    assert variables["datasource"]["current"]["value"] in re.findall(
        r"^ +uid: (\S+)$", provisioned, re.MULTILINE
    )
    for name in variables.keys() - {"datasource", "docs"}:
        assert variables[name]["datasource"] == selected
    for mark in _read(path)["annotations"]["list"]:
        assert mark["datasource"] == selected
    for panel in _panels(path):
        for asker in (panel, *panel["targets"]):
            assert asker["datasource"] == selected


@every_dashboard
def test_the_page_that_a_panel_names_is_a_link_where_the_documentation_is_published(
    path: Path,
) -> None:
    variables = {each["name"]: each for each in _variables(_read(path))}

    assert variables["docs"]["hide"] == 2
    assert variables["docs"]["query"] == ""
    for panel in _panels(path):
        assert re.search(r"\n\nMore: \$\{docs\}docs/\S+\.md\S*$", panel["description"]), panel[
            "title"
        ]


@every_dashboard
def test_a_halt_by_a_person_is_marked_apart_from_the_lines_own(path: Path) -> None:
    marks = {each["iconColor"]: each["expr"] for each in _read(path)["annotations"]["list"]}

    assert 'reason!="operator"' in marks["red"]
    assert 'reason="operator"' in marks["blue"]


def test_a_mark_of_a_halt_leads_to_the_board_that_compose_publishes() -> None:
    (port,) = (
        each
        for each in compose("cpu")["services"]["andon"]["ports"]
        if each["target"] == ServeConfig().endpoint_port
    )
    board = f"http://{port['host_ip']}:{port['published']}/"
    marks = _read(FOLDER / "line.json")["annotations"]["list"]
    halts = [each for each in marks if each["titleFormat"].startswith("Halted")]

    assert len(halts) == 2
    assert all(f'<a href="{board}"' in each["textFormat"] for each in halts)


def test_grafanas_source_knows_how_often_prometheus_scrapes() -> None:
    source = (PROVISIONING / "datasources/prometheus.yml").read_text("utf-8")
    scraped = re.findall(r"scrape_interval: (\S+)", PROMETHEUS.read_text("utf-8"))

    # Else $__rate_interval could be shorter than two scrapes, and every rate empty.
    assert re.findall(r"timeInterval: (\S+)", source) == scraped


def test_grafana_is_given_what_its_provisioning_names() -> None:
    services = compose("cpu")["services"]
    targets = {volume["target"] for volume in services["grafana"]["volumes"]}
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    provider = (PROVISIONING / "dashboards/andon.yml").read_text("utf-8")
    source = (PROVISIONING / "datasources/prometheus.yml").read_text("utf-8")

    assert "/etc/grafana/provisioning" in targets
    assert re.findall(r"path: (\S+)", provider) == ["/etc/grafana/dashboards"]
    assert "/etc/grafana/dashboards" in targets
    assert home == "/etc/grafana/dashboards/line.json"
    assert "url: http://prometheus:9090" in source


def test_prometheus_asks_whom_the_service_names() -> None:
    asked = PROMETHEUS.read_text("utf-8")
    service = compose("cpu")["services"]["andon"]
    # The service answers under its host's name.
    assert service["hostname"] == "andon"
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
