"""What a watcher keeps in mind: the journal's past, and when the service was away."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from andon_cli.client import LineStatus
from andon_cli.drawing.picture import Lost
from andon_cli.drawing.watching import Watcher, can_draw, flags_of, service_here
from andon_cli.questions import StatusConfig
from andon_coordinator.core.run_events import RunEventKind
from andon_server.runs import JOURNAL, ServiceAddress
from unit.andon_cli.books import Book

STATUS = LineStatus(
    run_id="7f3a", state="RUNNING", step=3, loss=1.0, metrics_url="http://127.0.0.1:9400/metrics"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of two steps, whose service lives."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "7f3a"
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL)
    book.found()
    book.step(1, 3.0)
    book.step(2, 2.0)
    book.note(1, RunEventKind.JOINED, 1, "on beta")
    book.close()
    service = ServiceAddress(
        address="127.0.0.1:1", metrics_url=STATUS.metrics_url, run_id="7f3a", journal="",
        pid=os.getpid(), board_url="http://127.0.0.1:9400/",
    )  # fmt: skip
    service.write(folder)
    return folder


@pytest.mark.usefixtures("run")
def test_a_watcher_on_the_services_host_begins_with_what_the_journal_knows() -> None:
    watcher = Watcher(StatusConfig())

    watcher.take(STATUS)

    assert list(watcher.seen.losses) == [3.0, 2.0, 1.0]
    assert [each.text for each in watcher.seen.events] == ["worker 1 joined on beta"]
    assert watcher.board_url == "http://127.0.0.1:9400/"


@pytest.mark.usefixtures("run")
def test_a_run_of_another_host_that_has_the_same_id_is_not_taken_for_the_one_here() -> None:
    elsewhere = replace(STATUS, metrics_url="http://10.0.0.7:9400/metrics")

    assert service_here(STATUS) is not None
    assert service_here(elsewhere) is None
    assert service_here(replace(STATUS, run_id="0000")) is None


def test_a_service_that_is_away_is_told_once_and_so_is_its_return(tmp_path: Path) -> None:
    watcher = Watcher(StatusConfig())
    watcher.take(STATUS)

    for _ in range(3):
        watcher.lose(Lost("gone", 0.0, 300.0))
    watcher.take(replace(STATUS, step=4))
    watcher.take(replace(STATUS, step=5))

    assert [(each.kind, each.text) for each in watcher.seen.events] == [
        ("lost", "the service does not answer any more"),
        ("back", "the service answers again"),
    ]
    assert watcher.lost is None


@pytest.mark.parametrize(
    ("terminal", "kind", "draws"),
    [(True, "xterm-256color", True), (True, "dumb", False), (False, "xterm-256color", False)],
)
def test_only_a_terminal_that_can_move_its_cursor_gets_a_picture(
    terminal: bool, kind: str, draws: bool
) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": kind})

    assert can_draw(console) == draws


def test_the_flags_of_a_watch_are_those_of_the_answers_that_it_shows() -> None:
    assert flags_of(StatusConfig()) == ""
    assert flags_of(StatusConfig(address="alpha:7070", run="7f3a")) == (
        "--address alpha:7070 --run 7f3a"
    )
