"""The dashboards' queries: PromQL, of metrics that exist, named and measured as what they are.

The tables of docs/metrics.md are what the registries hold: test_telemetry_table.py sees to that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import promql_parser
import yaml

from andon_coordinator.core.line_state import LineState
from andon_grafana.boards import BOARDS, UNSHOWN
from andon_grafana.exchange import PATHS
from andon_grafana.panels import Column, Curve, Lanes, Panel, Query, Table
from andon_grafana.queries import panel_queries
from andon_grafana.running import STATES
from andon_trainer.telemetry import PATHS as EXCHANGE_PATHS
from unit.project.documents import DOCUMENTS, ROOT

DISCOVERED = {"run", "worker", "reducer"}
"""Labels that the service's discovery gives to whom it names."""
OF_PROMETHEUS = {
    "ALERTS": {"alertname", "alertstate"},
    "scrape_duration_seconds": set(),
    "scrape_samples_scraped": set(),
    "up": set(),
}
"""Series that Prometheus makes of its own."""
ENDINGS = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("",),
    "summary": ("_sum", "_count"),
}
_A_RATE = re.compile(r"(?:sum|max)(?: by \([^)]*\) )?\((?:rate|deriv|label_replace\(.*rate)\(")
_ROW = re.compile(r"^\| `((?:andon|process)_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)

SELECTED = {board.file: "$runs" if "runs" in board.names else "$run" for board in BOARDS}
"""The variable of a dashboard that selects runs."""
PLACED = [
    (panel, board.file)
    for board in BOARDS
    for row in board.rows
    for _, panels in row.panels
    for panel in panels
]
PANELS = [panel for panel, _ in PLACED]
MARKS = [mark for board in BOARDS for mark in board.marks]
ASKED = [(panel, query) for panel in PANELS for query in panel.queries]


@dataclass(frozen=True)
class Documented:
    """A metric as docs/metrics.md has it."""

    series: tuple[str, ...]
    labels: set[str]


@cache
def documented() -> dict[str, Documented]:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    found = {}
    for name, kind, labels in _ROW.findall(text):
        series = tuple(name + ending for ending in ENDINGS[kind])
        found[name] = Documented(series, set(re.findall(r"`(\w+)`", labels)))
    return found


@cache
def known() -> dict[str, set[str]]:
    """Every series that a Prometheus with this project's configuration has, and its labels."""
    series = dict(OF_PROMETHEUS)
    for metric in documented().values():
        for name in metric.series:
            series.setdefault(name, set()).update(metric.labels)
            if name.endswith("_bucket"):
                series[name] = metric.labels | {"le"}
    return series | {rule["record"]: set() for rule in rules() if "record" in rule}


@cache
def rules() -> list[dict[str, Any]]:
    """What Prometheus records, and when it alerts."""
    groups = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_a_curves_dashed_line_is_where_the_alert_of_its_page_looks_up() -> None:
    pages = {f"docs/runbooks/{rule.get('alert')}.md": rule["expr"] for rule in rules()}
    drawn = [panel for panel in PANELS if isinstance(panel, Curve) and panel.thresholds]

    assert drawn
    for panel in drawn:
        looked_up = {float(number) for number in re.findall(r"> ([0-9.]+)", pages[panel.see])}
        assert {value for value, _color in panel.thresholds} <= looked_up, panel.title


def test_a_title_fits_its_panel_and_is_that_of_no_other() -> None:
    titles = [panel.title for panel in PANELS]

    assert [title for title in titles if len(title) > 36] == []
    assert len(set(titles)) == len(titles)


def filled(expr: str) -> str:
    return expr.replace("$__rate_interval", "20s").replace("$__range", "15m")


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def labels_of(node: promql_parser.Expr) -> set[str] | None:
    """The labels that an expression's series have; None: whatever Prometheus gives them."""
    match node:
        case promql_parser.AggregateExpr():
            if str(node.op) in ("topk", "bottomk"):
                return labels_of(node.expr)
            return set(node.modifier.labels) if node.modifier is not None else set()
        case promql_parser.ParenExpr():
            return labels_of(node.expr)
        case promql_parser.NumberLiteral():
            return set()
        case promql_parser.BinaryExpr():
            return _labels_of_two(node)
        case promql_parser.Call():
            if node.func.name in ("scalar", "time", "vector"):
                return set()
            if node.func.name == "histogram_quantile":
                buckets = labels_of(node.args[1])
                return None if buckets is None else buckets - {"le"}
            return labels_of(node.args[0])
    return None


def _labels_of_two(node: promql_parser.BinaryExpr) -> set[str] | None:
    left, right = labels_of(node.lhs), labels_of(node.rhs)
    if left is None or right is None:
        return None
    return left if str(node.op) in ("and", "unless") else left | right


def shown_labels(panel: Panel, query: Query) -> set[str]:
    if isinstance(panel, Table):
        return {panel.key}
    return set(re.findall(r"{{(\w+)}}", query.legend))


def name_of(panel: Panel, query: Query) -> str:
    """What stands at a query's values: in a table, the column's name."""
    return query.legend if isinstance(query, Column) else panel.title


# What is asked


def test_panels_and_annotations_ask_for_series_that_exist_with_labels_that_they_have() -> None:
    series = known()

    for expr in (*(query.expr for _, query in ASKED), *(mark.expr for mark in MARKS)):
        asked = selectors(filled(expr))
        assert asked, expr
        for selector in asked:
            matchers = {matcher.name for matcher in selector.matchers.matchers}
            assert selector.name in series, expr
            assert matchers <= DISCOVERED | series[selector.name], expr


def test_a_panel_asks_for_the_runs_that_its_dashboard_selects() -> None:
    for panel, board in PLACED:
        for query in panel.queries:
            for selector in selectors(filled(query.expr)):
                matchers = {each.name: each.value for each in selector.matchers.matchers}
                assert matchers["run"] == SELECTED[board], f"{panel.title} is of other runs"


def test_every_documented_metric_is_in_a_panel_or_has_a_reason_not_to_be() -> None:
    asked = {
        selector.name
        for panel in PANELS
        for query in panel.queries
        for selector in selectors(filled(query.expr))
    }

    for name, metric in documented().items():
        shown = bool(asked & set(metric.series))
        assert shown != (name in UNSHOWN), f"{name}: a panel, or a line in UNSHOWN, and not both"


def test_a_metric_without_a_panel_is_documented() -> None:
    assert UNSHOWN.keys() <= documented().keys()


def test_every_state_of_the_line_has_a_colour_of_its_number_and_halted_alone_is_red() -> None:
    assert STATES.keys() == {state.name.lower() for state in LineState}
    assert len({number for number, _, _ in STATES.values()}) == len(STATES)
    assert [name for name, (_, _, color) in STATES.items() if color == "red"] == ["halted"]


def test_every_path_of_an_exchange_has_a_number() -> None:
    assert PATHS.keys() == set(EXCHANGE_PATHS)


# How it is named and measured


def test_a_series_is_aggregated_by_what_its_legend_shows() -> None:
    for panel, query in ASKED:
        labels = labels_of(promql_parser.parse(filled(query.expr)))

        assert labels == shown_labels(panel, query), query.expr


def test_no_two_queries_of_a_panel_have_one_legend() -> None:
    for panel in PANELS:
        legends = [query.legend for query in panel.queries]
        assert len(set(legends)) == len(legends), panel.title
        assert all(legends) or len(legends) == 1, panel.title


def _unit(panel: Panel, query: Query) -> str:
    unit: str = query.unit or panel.unit
    return unit


def test_a_rate_is_called_a_rate() -> None:
    for panel, query in ASKED:
        # The buckets of a quantile are rates, too, and the quantile is not.
        if not _A_RATE.match(query.expr):
            continue
        if "_seconds_sum" in query.expr or "andon_rank_exchange_seconds" in query.expr:
            assert "art of the time" in name_of(panel, query), panel.title
            assert _unit(panel, query) == "percentunit", panel.title
        elif "_seconds_total" in query.expr:
            assert _unit(panel, query) in ("suffix:cores", "suffix:threads"), panel.title
        else:
            assert "a second" in name_of(panel, query), panel.title
            unit = _unit(panel, query)
            assert unit == "Bps" or unit.endswith("/s"), panel.title


def test_what_grew_is_called_in_the_time_shown() -> None:
    named: dict[tuple[str, str], bool] = {}
    for panel, query in ASKED:
        name = panel.title, name_of(panel, query)
        named[name] = named.get(name, False) or "$__range" in query.expr

    for name, grew in named.items():
        assert grew == name[1].endswith(", in the time shown"), name


def test_the_unit_is_that_of_the_metric() -> None:
    for panel, query in ASKED:
        names = {each.name or "" for each in selectors(filled(query.expr))}
        unit = _unit(panel, query)
        if all(name.endswith("_ratio") for name in names):
            assert unit == "percentunit", panel.title
        if all(name.endswith("_bytes") for name in names):
            assert unit == "bytes", panel.title
        if all(name.endswith("_bytes_total") for name in names):
            assert unit == ("bytes" if "$__range" in query.expr else "Bps"), panel.title
        if "histogram_quantile" in query.expr or "timestamp_seconds" in query.expr:
            assert unit == "s", panel.title


# What it says


def test_a_panel_says_in_sentences_what_it_shows_and_where_more_is_said() -> None:
    anchors = {document.name: document.anchors for document in DOCUMENTS}

    for panel in PANELS:
        page, _, anchor = panel.see.partition("#")
        assert panel.tells.endswith("."), panel.title
        assert len(panel.tells) > 40, panel.title
        assert page in anchors, panel.see
        assert not anchor or anchor in anchors[page], panel.see


# For those who ask a real Prometheus


def test_the_list_of_queries_has_every_panel_with_all_variables_filled_in() -> None:
    queries = panel_queries("7f3a", worker="0|1", window="20s", span="10m")

    assert {(each.panel, each.board) for each in queries} == {
        (panel.title, board) for panel, board in PLACED
    } | {(mark.name, board.file) for board in BOARDS for mark in board.marks}
    # $1 is what a regular expression of label_replace found.
    assert all("$" not in each.expr.replace(" $1", "") for each in queries)
    assert any('{run="7f3a", worker=~"0|1"}' in each.expr for each in queries)


def test_what_is_drawn_over_time_is_asked_over_time() -> None:
    over_time = {panel.title for panel in PANELS if isinstance(panel, Curve | Lanes)}
    over_time |= {mark.name for mark in MARKS}

    for each in panel_queries("7f3a"):
        assert each.instant != (each.panel in over_time)
