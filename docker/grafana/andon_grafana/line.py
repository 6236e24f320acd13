"""The dashboard of a line: its variables, its annotations, and a row for each question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models

from andon_grafana import costs, running, scraping, sessions, stopped, waiting
from andon_grafana.panels import BLUE, GREEN, ORANGE, RED, SOURCE, Row, draw
from andon_grafana.promql import latest, rate_of

__all__ = ["ANNOTATIONS", "ROWS", "UNSHOWN", "Annotation", "build"]

ROWS: tuple[Row, ...] = (
    running.ROW,
    stopped.ROW,
    waiting.ROW,
    costs.ROW,
    sessions.ROW,
    scraping.ROW,
)

UNSHOWN = {
    "process_virtual_memory_bytes": "a reservation: resident memory is what a host runs out of",
    "process_start_time_seconds": "a restart shows as a lane that ends",
    "process_open_fds": "connections are limited by the services, far below the process's limit",
    "process_max_fds": "a limit of the host, which does not change",
}
"""Metrics without a panel, and why."""

_DOCS = ""
"""Where Andon's sources or documentation can be read, up to and with the slash before `docs/`: then
the page that a panel names is a link. Empty: it is a path in the sources."""

_BOARD = "http://127.0.0.1:9400/"
"""Where a halt is answered: the board as Docker Compose publishes it."""

_ANNOTATION_STEP = "15s"
"""Grafana joins points of an annotation that are no further apart into one region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation(Builder[models.AnnotationQuery]):
    """Marks the times at which a query of Prometheus is above 0, in every curve."""

    name: str
    expr: str
    title: str
    """What a mark says; a pattern, as a legend is."""
    color: str
    text: str = ""
    """What stands below the title; Grafana shows links."""

    def build(self) -> models.AnnotationQuery:
        """Grafana's model of it."""
        return _PrometheusAnnotation(
            self.title,
            self.text,
            name=self.name,
            datasource=SOURCE,
            icon_color=self.color,
            expr=self.expr,
        )


class _PrometheusAnnotation(models.AnnotationQuery):
    """With the fields that Grafana's Prometheus source reads, and the SDK's model does not have.

    Releases before its annotations became queries like any other read `expr` and `step`; later
    ones read `target`.
    """

    def __init__(self, title: str, text: str, **known: Any) -> None:
        super().__init__(**known)
        self.title = title
        self.text = text

    def to_json(self) -> dict[str, object]:
        text = {"textFormat": self.text} if self.text else {}
        return super().to_json() | {
            **text,
            "step": _ANNOTATION_STEP,
            "titleFormat": self.title,
            "target": {"expr": self.expr, "interval": _ANNOTATION_STEP, "refId": "Anno"},
        }


def _lately(metric: str, label: str) -> str:
    return f"sum by ({label}) ({rate_of(metric)}) > 0"


_ANSWER = f'<a href="{_BOARD}" target="_blank">Answer it on the board</a>'

ANNOTATIONS = (
    Annotation(
        name="The line stopped itself",
        expr=f"{latest('andon_halted', 'reason', where=(stopped.OWN,))} == 1",
        title="Halted: {{reason}}",
        text=_ANSWER,
        color=RED,
    ),
    Annotation(
        name="Somebody stopped it",
        expr=f"{latest('andon_halted', where=(stopped.PERSON,))} == 1",
        title="Halted by an operator",
        text=_ANSWER,
        color=BLUE,
    ),
    Annotation(
        name="Answers",
        expr=_lately("andon_halt_answers_total", "answer"),
        title="Answered: {{answer}}",
        color=GREEN,
    ),
    Annotation(
        name="Workers that went",
        expr=_lately("andon_departures_total", "reason"),
        title="A worker went: {{reason}}",
        color=ORANGE,
    ),
)


def build() -> models.Dashboard:
    """The whole dashboard, as Grafana's model."""
    drawn = (
        dashboard.Dashboard("Andon: the line")
        .uid("andon-line")
        .description(
            "One line: whether it runs, why it stopped, who holds it up, and what it costs."
        )
        .tags(["andon"])
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("5s")
        .time("now-15m", "now")
        .variables([_source(), _run(), _worker(), _docs()])
        .annotations(list(ANNOTATIONS))
    )
    number = 0
    for row in ROWS:
        header = dashboard.Row(row.title).collapsed(row.collapsed)
        number += 1
        header = header.id(number)
        panels: list[Any] = []
        for height, line in row.panels:
            for panel in line:
                number += 1
                panels.append(draw(panel, number, height))
        if row.collapsed:
            for each in panels:
                header = header.with_panel(each)
        drawn = drawn.with_row(header)
        if not row.collapsed:
            for each in panels:
                drawn = drawn.with_panel(each)
    return drawn.build()


def _source() -> dashboard.DatasourceVariable:
    """Which Prometheus; the one that docker/grafana/provisioning names, unless somebody chooses."""
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Prometheus")
        .type("prometheus")
        .current(models.VariableOption(text="Prometheus", value="prometheus"))
    )


def _run() -> dashboard.QueryVariable:
    """Which run: the label that the service's discovery gives to all processes of the run."""
    return (
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(andon_line_state, run)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC)
    )


def _worker() -> dashboard.QueryVariable:
    """Which workers; all of them unless somebody chooses."""
    return (
        dashboard.QueryVariable("worker")
        .label("Workers")
        .datasource(SOURCE)
        .query('label_values(andon_heartbeat_age_seconds{run="$run"}, worker)')
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        # Not .*: that would take the service's own series, which have no worker.
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _docs() -> dashboard.TextBoxVariable:
    """What stands before the pages that the panels name."""
    return (
        dashboard.TextBoxVariable("docs")
        .hide(models.VariableHide.HIDE_VARIABLE)
        .default_value(_DOCS)
        .current(models.VariableOption(text=_DOCS, value=_DOCS))
    )
