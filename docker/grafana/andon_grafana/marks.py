"""Marks in every curve: when a line halted, who answered, and who went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models

from andon_grafana.panels import BLUE, GREEN, ORANGE, RED, SOURCE
from andon_grafana.promql import latest, rate_of
from andon_grafana.stopped import OWN, PERSON

__all__ = ["OF_ALL_RUNS", "OF_A_RUN", "Annotation"]

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

OF_A_RUN = (
    Annotation(
        name="The line stopped itself",
        expr=f"{latest('andon_halted', 'reason', where=(OWN,))} == 1",
        title="Halted: {{reason}}",
        text=_ANSWER,
        color=RED,
    ),
    Annotation(
        name="Somebody stopped it",
        expr=f"{latest('andon_halted', where=(PERSON,))} == 1",
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

OF_ALL_RUNS = (
    Annotation(
        name="Lines that stopped themselves",
        expr=f"{latest('andon_halted', 'run', 'reason', where=(OWN,))} == 1",
        title="Halted: {{run}}, {{reason}}",
        color=RED,
    ),
    Annotation(
        name="Lines that somebody stopped",
        expr=f"{latest('andon_halted', 'run', where=(PERSON,))} == 1",
        title="Halted by an operator: {{run}}",
        color=BLUE,
    ),
)
