"""The log: what people would want to know of later, once."""

from __future__ import annotations

import logging

import pytest

from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.events import CordPulled
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport.log import WaitLog
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
        "line_waits for='3 workers, 0 of them here'",
        "line_waits for='3 workers, 1 of them here'",
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
