"""While local steps go on, a newcomer gets the state, and a late worker what it has missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, on_line, start_worker, start_workers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"steps": 3000, "slow": [0, 1], "pace_s": 0.05, "stay": 8}
NEWCOMER = 2
SCRIPT = "windows.py"


@pytest.mark.parametrize(
    "more", [(), ("--overlap", "--fragments", "4")], ids=["windows", "fragments"]
)
def test_c_learn_001_a_learner_on_local_steps_has_the_lines_weights_after_each_epoch(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    flags = ["--min-workers", "1", "--max-workers", "4", "--schedule", "local"]
    flags += ["--local-steps", "4", "--outer", "nesterov", *more]
    with (
        Service(tmp_path / "run", 2, *flags) as service,
        start_workers(tmp_path, service, SPEC, 2, script=SCRIPT) as members,
    ):
        service.await_status(lambda line: line.step >= 3)
        where = on_line(service, NEWCOMER, 4)
        newcomer = start_worker(tmp_path, SPEC, slot=NEWCOMER, script=SCRIPT, **where)
        codes = [each.wait() for each in (*members, newcomer)]

    assert codes == [0, 0, 0], newcomer.output
    mine, theirs = newcomer.seen, members[0].seen
    attended = [step for step, rank, workers in mine["places"] if rank == workers]
    assert len(attended) >= 1
    assert mine["step"] == theirs["step"]
    assert mine["states"]
    assert mine["states"].items() <= theirs["states"].items()
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        came = [each for each in journal.run_events() if each.kind is RunEventKind.CAUGHT_UP]
    assert ["learnt" in each.text for each in came if each.worker == NEWCOMER] == [True]


def test_f_dp_006_a_late_worker_makes_windows_up_in_its_own_bodies_and_has_the_same_weights(
    tmp_path: Path,
) -> None:
    # Worker 1 takes three times as long for a local step.
    spec = {**SPEC, "steps": 65, "slow": [0, 1, 1, 1], "pace_s": 0.01, "stay": 10**6}
    flags = ["--schedule", "async", "--local-steps", "4"]
    with (
        Service(tmp_path / "run", 2, *flags) as service,
        start_workers(tmp_path, service, spec, 2, script=SCRIPT) as members,
    ):
        codes = [each.wait() for each in members]

    assert codes == [0, 0], members[1].output
    fast, slow = (each.seen for each in members)
    assert slow["made_up"] >= 2
    assert fast["step"] == slow["step"] == 65
    # Running statistics, too: these are in the digest.
    assert len(slow["states"]) >= 2
    assert slow["states"] == fast["states"]
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
