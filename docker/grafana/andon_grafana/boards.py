"""The dashboards: for each its variables, its marks, its links, and a row for each question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from andon_grafana import (
    costs,
    exchange,
    links,
    machine,
    marks,
    phases,
    reducers,
    running,
    runs,
    scraping,
    sessions,
    stopped,
    transfers,
    variables,
    waiting,
)
from andon_grafana.panels import Row, draw

__all__ = ["BOARDS", "UNSHOWN", "Board", "build"]

UNSHOWN = {
    "process_virtual_memory_bytes": "a reservation: resident memory is what a host runs out of",
    "process_open_fds": "connections are limited by the services, far below the process's limit",
    "process_max_fds": "a limit of the host, which does not change",
}
"""Metrics without a panel, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    file: str
    uid: str
    title: str
    tells: str
    """The question that it answers."""
    variables: tuple[variables.Variable, ...]
    rows: tuple[Row, ...]
    marks: tuple[marks.Annotation, ...] = marks.OF_A_RUN
    since: str = "now-15m"

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its variables."""
        return tuple(each.build().name for each in self.variables)


BOARDS = (
    Board(
        file="overview.json",
        uid=links.OVERVIEW,
        title="Andon: all runs",
        tells="All runs, a row each: which of them train, how fast, and which wait for a person.",
        variables=(variables.source(), variables.runs(), variables.docs()),
        rows=(runs.NOW, runs.HISTORY),
        marks=marks.OF_ALL_RUNS,
        since="now-3h",
    ),
    Board(
        file="line.json",
        uid=links.LINE,
        title="Andon: one run",
        tells="One run: whether it trains, why it stopped, who holds it up, and what it costs.",
        variables=(variables.source(), variables.run(), variables.workers(), variables.docs()),
        rows=(
            running.ROW,
            stopped.ROW,
            waiting.ROW,
            costs.ROW,
            sessions.ROW,
            scraping.ROW,
        ),
    ),
    Board(
        file="worker.json",
        uid=links.WORKER,
        title="Andon: one worker",
        tells="One worker: what it does, where its time goes, and what its machine gives it.",
        variables=(variables.source(), variables.run(), variables.worker(), variables.docs()),
        rows=(phases.NOW, phases.TIME, machine.ROW),
    ),
    Board(
        file="network.json",
        uid=links.NETWORK,
        title="Andon: network and reducers",
        tells="How gradients travel: by which way, how long, through which reducers, and what "
        "newcomers add.",
        variables=(variables.source(), variables.run(), variables.workers(), variables.docs()),
        rows=(exchange.WAYS, exchange.TIME, reducers.ROW, transfers.ROW),
    ),
)


def build(board: Board) -> models.Dashboard:
    """The whole dashboard, as Grafana's model."""
    others = [each for each in BOARDS if each is not board]
    drawn = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.tells)
        .tags(["andon"])
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("5s")
        .time(board.since, "now")
        .variables(list(board.variables))
        .annotations(list(board.marks))
        .links([_link(board, each) for each in others])
    )
    number = 0
    for row in board.rows:
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


def _link(board: Board, other: Board) -> dashboard.DashboardLink:
    """A link that carries what both let somebody choose."""
    shared = tuple(name for name in board.names if name in other.names)
    return links.to_board(other.title.removeprefix("Andon: ").capitalize(), other.uid, shared)
