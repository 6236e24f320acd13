"""Users' own training loops on real processes: how they end, and the checks before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon_coordinator.transport.reader import JournalReader
from integration.harness import (
    Service,
    Worker,
    await_exit,
    finish,
    on_line,
    start_line,
    start_worker,
    train_alone,
)

pytestmark = pytest.mark.integration

SCRIPT = "plain.py"


@pytest.mark.parametrize("loop", ["epochs", "range"])
def test_weights_that_moved_apart_stop_every_worker_before_it_leaves(
    tmp_path: Path, loop: str
) -> None:
    spec = {"epochs": 2, "range": loop == "range", "drift": [1, 8]}

    with start_line(tmp_path, spec, 2, script=SCRIPT) as (_, workers):
        await_exit(workers, 3)

    for worker in workers:
        assert "the weights of workers 0 and 1 differ after step 8, first in 2.weight" in (
            worker.output
        )
        assert "weights moved apart before this was seen" in worker.output
        assert "No weight moved" not in worker.output
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        (halt,) = journal.halts()
        assert (halt.evidence.parameter, halt.evidence.block) == ("2.weight", 0)
        assert [gone.reason for gone in journal.departures()] == ["HALTED"] * 2


def flat_weights(worker: Worker) -> Any:
    return np.concatenate([np.ravel(part) for part in worker.seen["weights"]])


def test_an_epoch_that_was_left_is_left_on_every_worker(tmp_path: Path) -> None:
    """An evaluation before the first step also covers every sample, whatever the roster is."""
    spec = {"epochs": 3, "break": 2}
    alone = train_alone(tmp_path / "solo", spec, SCRIPT)

    with start_line(tmp_path, spec, 2, script=SCRIPT) as (_, workers):
        finish(workers)

    for worker in (alone, *workers):
        assert worker.seen["epochs"] == [0, 1, 2]
        assert worker.seen["step"] == 3 * 2
        assert worker.seen["evaluated"] == 16
        assert worker.seen["final"] == [4, pytest.approx(alone.seen["final"][1], rel=1e-4)]
        assert "line.mean is of" not in worker.output
    assert workers[0].seen["weights"] == workers[1].seen["weights"]
    assert np.allclose(flat_weights(workers[0]), flat_weights(alone), rtol=1e-4)
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        notes = [entry.note for entry in journal.chain() if entry.note]
    assert notes[1:] == [f"the script left epoch {epoch} at position 8" for epoch in range(3)]


def test_a_second_line_on_a_run_that_the_script_has_trained_is_refused_at_once(
    tmp_path: Path,
) -> None:
    """One worker's configuration names the run, as under `andon run`; the other's its address."""
    with Service(tmp_path / "run", 2) as service:
        workers = []
        for slot in range(2):
            place = on_line(service, slot, 2)
            if slot == 1:
                del place["ANDON_RUN_ID"]
            spec = {"epochs": 2, "runs": 2}
            workers.append(start_worker(tmp_path, spec, slot=slot, script=SCRIPT, **place))
        await_exit(workers, 4)

    for worker in workers:
        assert f"has trained run {service.run_id} to its end" in worker.output
        assert "start the script once for each run" in worker.output
        assert "waiting for a coordinator" not in worker.output
        assert worker.seen["step"] == 8
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert [gone.reason for gone in journal.departures()] == ["COMPLETE"] * 2


def test_an_evaluation_that_loses_a_worker_says_so_and_is_complete_when_made_again(
    tmp_path: Path,
) -> None:
    with start_line(tmp_path, {}, 3, script="evaluating.py") as (_service, workers):
        codes = [worker.wait() for worker in workers]

    assert codes == [0, -9, 0], workers[0].output
    for worker in (workers[0], workers[2]):
        assert "8 of 23 (from 8 on, those of rank 1) are not in the mean" in worker.output
        assert worker.seen["covered"] == [False, True, True]
        assert worker.seen["rows"] == list(range(23))
        assert worker.seen["error"] < 1e-6
        assert worker.seen["step"] == 6
