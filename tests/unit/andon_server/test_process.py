"""Logs of the service, as text and as JSON, also on a disk that is full; and its signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from andon.host.logs import LogEvent
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.settings import LineSettings
from andon_server.process import Interrupts, LinePlace, greet, logging_to
from scenarios.line_bench import Bench


def test_a_log_that_can_not_be_written_is_told_of_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.log"
    path.symlink_to("/dev/full")

    with logging_to(path, quiet=True):
        for _ in range(3):
            logging.getLogger("andon").info("an event")

    assert capsys.readouterr().err == (
        f"{path} can't be written (No space left on device): it lacks records\n"
    )


def test_a_log_in_json_has_the_run_and_the_lines_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, place = tmp_path / "service.log", LinePlace("7f3a")
    bench = Bench(LineSettings(run_id="7f3a"), RunPlan(global_batch=4))

    with logging_to(path, quiet=False, form="json", facts=place.facts):
        logging.getLogger("andon").info("before")
        place.tick(replace(bench.line.status(0.0), step=12))
        logging.getLogger("andon").info(LogEvent("worker_joined", worker=1))

    before, joined = (json.loads(line) for line in path.read_text().splitlines())
    assert (before["run"], before["message"], "step" in before) == ("7f3a", "before", False)
    assert (joined["run"], joined["event"], joined["step"]) == ("7f3a", "worker_joined", 12)
    assert capsys.readouterr().err == path.read_text()


def test_what_andon_run_shows_of_its_service_is_text_without_the_halt_that_it_shows_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.log"

    with logging_to(path, quiet=True, form="json"):
        logging.getLogger("andon").error(LogEvent("line_halted", step=3))
        logging.getLogger("andon").warning(LogEvent("checkpoint_missing", step=3))

    assert capsys.readouterr().err.endswith("WARNING andon checkpoint_missing step=3\n")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "line_halted",
        "checkpoint_missing",
    ]


def test_a_service_whose_greeting_nobody_can_read_goes_on_unless_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        greet("run 7f3a", needed=False)
        full.flush()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(OSError, match="No space left"):
            greet("run 7f3a", needed=True)
        # Its buffer would fail again when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())

    assert [record.getMessage() for record in caplog.records] == [
        "greeting_not_written why='No space left on device'"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_from_the_start_stays_ignored(number: signal.Signals) -> None:
    async def enter() -> list[bool]:
        with Interrupts():
            return [signal.getsignal(each) is signal.SIG_IGN for each in (number, signal.SIGTERM)]

    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert asyncio.run(enter()) == [True, False]
    finally:
        signal.signal(number, before)
