"""Machine time: it follows from the run's events, over restarts of the service too."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.machine_time import CostMeter, Counted, MachineTime, Price, RunCost
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.transport.journal import Journal
from unit.andon_coordinator.journal_bench import RESULT, STEP, TERM, Writing

_TEXTS = {"again": RunEventKind.JOINED, "joined": RunEventKind.JOINED}


def event(at: float, what: str, worker: int | None = None) -> RunEvent:
    kind = _TEXTS.get(what) or RunEventKind(what)
    text = "again, on alpha" if what == "again" else "on alpha"
    return RunEvent(id=int(at), kind=kind, worker=worker, step=0, text=text, at_unix_s=at)


def timed(*happened: RunEvent) -> MachineTime:
    time = MachineTime()
    for each in happened:
        time.happened(each)
    return time


def test_a_machine_counts_from_its_join_to_its_end_and_again_after_it() -> None:
    time = timed(
        event(100, "joined", 0),
        event(110, "joined", 1),
        event(120, "again", 1),  # Its stream broke, and it never was lost.
        event(130, "lost", 1),
        event(150, "again", 1),
        event(155, "left", 0),
    )

    assert time.seconds(160.0) == {0: 55.0, 1: 20.0 + 10.0}


@pytest.mark.parametrize(
    ("comes", "seconds"),
    [
        ((event(200, "again", 0),), 110.0),
        ((event(200, "joined", 0),), 40.0 + 10.0),
        ((event(200, "lost", 0),), 40.0),
        ((), 40.0),
    ],
    ids=["the same process", "another one", "lost meanwhile", "nobody"],
)
def test_time_without_a_service_counts_for_a_process_that_comes_back(
    comes: tuple[RunEvent, ...], seconds: float
) -> None:
    time = timed(event(100, "joined", 0))
    time.saw(140.0)  # A record was written then.

    for each in (event(190, "started"), *comes):
        time.happened(each)

    assert time.seconds(210.0) == {0: seconds}


def test_the_end_of_a_session_ends_the_stays_of_its_ranks() -> None:
    time = timed(event(100, "joined", 0), event(100, "joined", 1), event(130, "session_over"))

    assert time.seconds(500.0) == {0: 30.0, 1: 30.0}


def test_a_price_makes_a_cost_of_machine_seconds_and_only_durable_samples_count() -> None:
    meter = CostMeter(timed(event(0, "joined", 0)), Counted(1000), Price(2.0, "EUR"))

    meter.receive(events.TimePassed(), [effects.SaveRecord(STEP, RESULT)])
    before = meter.at(1800.0)
    meter.receive(events.RecordSaved(STEP.key), [])

    assert before == RunCost(1800.0, 2.0, "EUR", 1.0, 1000.0)
    assert meter.at(1800.0).samples_per_unit == 1000 + RESULT.samples
    meter.price = None
    assert meter.at(1800.0) == RunCost(1800.0)


def test_tokens_that_scripts_log_count_once_and_a_roll_back_undoes_them() -> None:
    meter = CostMeter(timed(event(0, "joined", 0)), Counted(96), Price(2.0))
    logged = [(0, 3, 512.0), (1, 3, 512.0), (1, 3, 256.0), (0, 5, 100.0), (0, 3, 512.0)]

    for worker, step, value in (*logged, (1, 5, math.nan)):
        scalars = (Scalar("tokens", step, value), Scalar("loss", step, 9.0))
        meter.receive(events.TimePassed(), [effects.SaveScalars(worker, scalars)])
    whole = meter.at(1800.0)
    meter.receive(events.RecordSaved(STEP.key, events.Undone(3, 32, 100.0)), [])
    again = effects.SaveScalars(0, (Scalar("tokens", 4, 50.0),))
    meter.receive(events.TimePassed(), [again])

    assert (whole.samples_per_unit, whole.tokens_per_unit) == (96.0, 868.0)
    assert (meter.at(1800.0).samples_per_unit, meter.at(1800.0).tokens_per_unit) == (64.0, 818.0)


def test_a_coordinator_that_starts_again_goes_on_with_time_and_price(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveRunEvent(event(50, "joined", 0)))
        writing.journal.save(effects.SaveRunEvent(event(60, "joined", 1)))
        writing.journal.save(effects.SaveRunEvent(event(80, "left", 1)))
    for term, price in enumerate((Price(1.0, "USD"), Price(3.0, "EUR")), TERM + 1):
        with closing(Journal.open(path, "7f3a")) as journal:
            journal.begin_term(term)
            journal.price(price)

    with closing(Journal.open(path, "7f3a")) as journal:
        meter = journal.meter
    told = [event(90, "started"), event(95, "again", 0)]
    meter.receive(events.TimePassed(), list(map(effects.SaveRunEvent, told)))

    assert meter.at(100.0) == RunCost(70.0, 3.0, "EUR", 70 * 3 / 3600, 0.0)
