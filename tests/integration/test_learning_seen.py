"""What people see of a worker that got the line's state while the line trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from integration.harness import on_line, start_line, start_worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"steps": 3000, "slow": [0, 1], "pace_s": 0.04, "stay": 6, "tarries": 4}
SCRIPT = "following.py"


def test_a_worker_that_learnt_is_counted_and_its_history_says_what_the_line_waited(
    tmp_path: Path,
) -> None:
    flags = ("--min-workers", "1", "--max-workers", "4")
    with start_line(tmp_path, SPEC, 1, *flags, script=SCRIPT) as (service, workers):
        service.await_status(lambda line: line.step >= 4)
        workers.append(
            start_worker(tmp_path, SPEC, slot=3, script=SCRIPT, **on_line(service, 3, 4))
        )
        service.await_status(lambda line: line.participating == 2)
        learnt = service.metric("andon_learning_seconds_count")
        took_s = service.metric("andon_learning_seconds_sum")
        pauses = service.metric("andon_join_pause_seconds_count")
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0]
    assert (learnt, pauses) == (1, 0)
    with JournalReader(service.journal) as reader:
        told = [each for each in reader.run_events() if each.kind is RunEventKind.CAUGHT_UP]
    assert [each.worker for each in told] == [3]
    assert told[0].text.startswith(f"learnt the line's state in {took_s:.2f} s; the line ")
