"""The log: what people would want to know of later, once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.effects import (
    NoteCaughtUp,
    NoteFewGrains,
    NoteSuspected,
    NoteWentBack,
    SaveRunEvent,
)
from andon_coordinator.core.events import CordPulled, Device
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport.log import DeviceLog, WaitLog, log_effect
from scenarios.line_bench import Bench


def test_what_a_line_waits_for_is_logged_once_it_lasts_and_again_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(LineSettings(run_id="7f3a", expect_workers=3), RunPlan(global_batch=4))
    waits = WaitLog()

    for at in range(12):
        if at == 6:
            bench.join("w0", bench.request(0, 0))
        waits.note(bench.line.status(float(at)), float(at))

    assert [record.getMessage() for record in caplog.records] == [
        "line_waits waits_for='3 workers, 0 of them here'",
        "line_waits waits_for='3 workers, 1 of them here'",
    ]


def test_a_halted_line_logs_no_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(LineSettings(run_id="7f3a"), RunPlan(global_batch=4))
    bench.send(CordPulled("odd"))
    waits = WaitLog()

    for at in (0.0, 100.0):
        waits.note(bench.line.status(at), at)

    assert caplog.records == []


def test_devices_are_logged_once_the_line_has_formed_and_that_they_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(LineSettings(run_id="7f3a", expect_workers=2), RunPlan(global_batch=4))
    devices = DeviceLog()
    slow, fast = Device("cpu", "AMD EPYC", 2**34, 2), Device("cuda", "NVIDIA L4", 2**33, 58)

    bench.join("w0", replace(bench.request(0, 0), node_id="alpha", devices=(slow,)))
    devices.note(bench.line.status(0.0))
    before = len(caplog.records)
    request = replace(bench.request(1, 1), node_id="beta", devices=(fast,), speed_hint=2.5)
    bench.join("w1", request)
    formed = replace(bench.line.status(1.0), state=LineState.RUNNING)
    for _ in range(2):
        devices.note(formed)

    assert before == 0
    assert [record.getMessage() for record in caplog.records] == [
        "worker_device worker=0 host=alpha kind=cpu device='AMD EPYC' memory_gib=16.0 cores=2 "
        "speed_hint=unknown",
        "worker_device worker=1 host=beta kind=cuda device='NVIDIA L4' memory_gib=8.0 cores=58 "
        "speed_hint=2.5",
        "devices_differ devices='AMD EPYC x1, NVIDIA L4 x1'",
    ]


def test_a_line_that_went_back_is_logged_with_both_steps(caplog: pytest.LogCaptureFixture) -> None:
    log_effect(NoteWentBack(100, 150, (0, 1)))

    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage() == (
        "line_went_back step=100 lost=150 message='went on after step 100, which workers 0 and 1 "
        "brought: no worker held step 150'"
    )


def test_a_batch_with_fewer_grains_than_workers_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_effect(NoteFewGrains(2, 3))

    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "2 grains for 3 workers" in said.getMessage()
    assert "micro_batch_size" in said.getMessage()


def test_a_suspicion_is_logged_with_how_long_answers_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    log_effect(NoteSuspected(2, 0.15004, 0.00412))

    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.getMessage() == "worker_suspected worker=2 silent_s=0.15 usual_s=0.0041"


def test_a_worker_that_caught_up_is_logged_with_what_it_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    log_effect(NoteCaughtUp(2, 3.12345, 0.02, learnt=True))

    (said,) = caplog.records
    assert said.getMessage() == (
        "worker_caught_up worker=2 learnt=True seconds=3.123 waited_s=0.02"
    )


def test_a_step_that_is_tried_again_is_logged_with_what_voided_the_try_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for kind in (RunEventKind.ATTEMPT, RunEventKind.JOINED):  # The other has its own entry.
        happened = RunEvent(
            id=1,
            kind=kind,
            worker=None,
            step=4,
            text="attempt 2: worker 1: its TCP lane stood still",
            at_unix_s=0.0,
        )
        log_effect(SaveRunEvent(happened))

    (said,) = caplog.records
    assert said.getMessage() == (
        "step_retried step=4 message='attempt 2: worker 1: its TCP lane stood still'"
    )
