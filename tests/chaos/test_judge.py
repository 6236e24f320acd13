"""The judge detects each kind of tampering with a run."""

from __future__ import annotations

import copy
import sqlite3
from contextlib import closing
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from chaos.judge import judge, judge_journal
from chaos.model import Task
from chaos.rig import chaos_line, events_of

pytestmark = pytest.mark.integration

TASK = Task(steps=6)
Logs = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logs]:
    """An undisturbed run of three workers: its journal and its workers' logs."""
    folder = tmp_path_factory.mktemp("run")
    with chaos_line(folder, task=TASK) as line:
        line.await_end()
    verdict = judge(line)
    undisturbed = TASK.undisturbed(verdict.bootstrap_worker, 6, 3)
    assert verdict.weights.tobytes() == undisturbed.tobytes()
    return line.journal, {slot: events_of(worker.log) for slot, worker in line.workers.items()}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("digest", "00" * 32, "F-DP-001"),
        ("key", [1, 1], "a record that the journal does not"),
        ("roster", [0, 1], "worker 1"),
    ],
)
def test_what_a_worker_applied_must_be_what_the_journal_holds(
    run: tuple[Path, Logs], field: str, value: object, says: str
) -> None:
    journal, logs = run[0], copy.deepcopy(run[1])
    applied = [event for event in logs[1] if event["event"] == "applied"]
    applied[3][field] = value

    with pytest.raises(AssertionError, match=says):
        judge_journal(journal, TASK, 3, logs)


def test_a_record_that_was_passed_over_is_seen(run: tuple[Path, Logs]) -> None:
    journal, logs = run[0], copy.deepcopy(run[1])
    logs[2].remove([event for event in logs[2] if event["event"] == "applied"][2])

    with pytest.raises(AssertionError, match="to another head"):
        judge_journal(journal, TASK, 3, logs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE contributions SET weight = weight + 1 WHERE rank = 1", "C-COMMIT-001"),
        ("UPDATE contributions SET ranges = '[]' WHERE rank = 2", "F-DP-002"),
        ("DELETE FROM contributions WHERE rank = 0", "F-DP-002"),
        ("UPDATE contributions SET worker = worker + 10 WHERE rank = 0", "C-COMMIT-001"),
    ],
)
def test_a_contribution_that_is_not_whole_is_seen(
    run: tuple[Path, Logs], tmp_path: Path, change: str, says: str
) -> None:
    journal = tmp_path / "journal.sqlite"
    copyfile(run[0], journal)
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute(change)

    with pytest.raises(AssertionError, match=says):
        judge_journal(journal, TASK, 3, run[1])


def test_weights_that_follow_from_other_positions_are_seen(
    run: tuple[Path, Logs], tmp_path: Path
) -> None:
    other = Task(steps=6, seed=TASK.seed + 1)

    with pytest.raises(AssertionError, match="F-DP-001"):
        judge_journal(run[0], other, 3, run[1])
