"""Every query of the dashboards as Prometheus gets it, for tests that ask a real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from andon_grafana.boards import BOARDS
from andon_grafana.panels import Curve, Lanes, Panel

__all__ = ["PanelQuery", "panel_queries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """One query of one panel, its variables filled in."""

    board: str
    """The dashboard's file."""
    row: str
    """The row's title; `annotations` for the marks in the curves."""
    panel: str
    """The panel's title."""
    legend: str
    expr: str
    instant: bool
    """Asked at one moment; else over the time that is shown."""
    may_be_empty: str
    """Why a run that works may have nothing here; empty: it always has something."""


def panel_queries(
    run: str, *, worker: str = ".+", window: str = "20s", span: str = "15m"
) -> list[PanelQuery]:
    """The queries of all panels and annotations, as Grafana sends them.

    Args:
        run: the value of the variables `run` and `runs`.
        worker: a regular expression for the variable `worker`.
        window: in place of `$__rate_interval`.
        span: in place of `$__range`.
    """
    values = {
        "$__rate_interval": window,
        "$__range": span,
        "$worker": worker,
        "$runs": run,
        "$run": run,
    }

    def filled(expr: str) -> str:
        for name, value in values.items():
            expr = expr.replace(name, value)
        return expr

    return [replace(each, expr=filled(each.expr)) for each in _written()]


def _written() -> Iterator[PanelQuery]:
    for board in BOARDS:
        for row in board.rows:
            for _, panels in row.panels:
                for panel in panels:
                    yield from _of_panel(board.file, row.title, panel)
        for mark in board.marks:
            yield PanelQuery(
                board=board.file,
                row="annotations",
                panel=mark.name,
                legend=mark.title,
                expr=mark.expr,
                instant=False,
                may_be_empty="nothing of the kind happened",
            )


def _of_panel(board: str, row: str, panel: Panel) -> Iterator[PanelQuery]:
    for query in panel.queries:
        yield PanelQuery(
            board=board,
            row=row,
            panel=panel.title,
            legend=query.legend,
            expr=query.expr,
            instant=not isinstance(panel, Curve | Lanes),
            may_be_empty=panel.may_be_empty,
        )
