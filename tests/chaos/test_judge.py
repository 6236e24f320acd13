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
from chaos.mutants import MUTANTS
from chaos.rig import chaos_line, events_of
from chaos.schedules import SCHEDULES

pytestmark = pytest.mark.integration

TASK = Task(steps=6)
BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}
NESTEROV = BY_NAME["local-nesterov"]
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


# ----------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_worker_that_does_one_thing_of_a_window_wrong_is_seen(
    tmp_path: Path, mutant: str
) -> None:
    # The line does not compare digests: it is the judge who must see it. So the mutant is killed
    # before the end, where the line would compare them all the same.
    schedule = BY_NAME[MUTANTS[mutant].schedule]
    with chaos_line(tmp_path, 2, "--digest-every", "0", schedule=schedule) as line:
        line.await_progress()
        line.workers[1].kill()
        line.start_worker(1, mutant=mutant)
        line.await_progress()
        line.await_arrival(1)
        line.await_step(line.workers[1].step + 3, 1)
        line.workers[1].kill()
        line.finish()

    with pytest.raises(AssertionError, match=MUTANTS[mutant].says):
        judge(line)


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logs]:
    """An undisturbed run with local steps."""
    folder = tmp_path_factory.mktemp("local")
    with chaos_line(folder, task=TASK, schedule=NESTEROV) as line:
        line.await_end()
    judge(line)
    return line.journal, {slot: events_of(worker.log) for slot, worker in line.workers.items()}


def _reverse(event: dict[str, Any]) -> None:
    event["parts"].reverse()


def _leave_out(event: dict[str, Any]) -> None:
    event["parts"][0].pop()


def _take_twice(event: dict[str, Any]) -> None:
    event["parts"][0].append(event["parts"][1][0])


@pytest.mark.parametrize(
    ("change", "says"),
    [(_reverse, "F-DP-001"), (_leave_out, "C-COMMIT-001"), (_take_twice, "F-DP-002")],
)
def test_local_steps_that_are_not_those_of_the_record_are_seen(
    local_run: tuple[Path, Logs], change: Any, says: str
) -> None:
    journal, logs = local_run[0], copy.deepcopy(local_run[1])
    # The first window is dealt evenly: it has several local steps whatever this machine's pace.
    change(next(event for event in logs[1] if event["event"] == "computed"))

    with pytest.raises(AssertionError, match=says):
        judge_journal(journal, TASK, 3, logs, NESTEROV)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("window", 36, "window differs"),
        ("targets", [2, 1, 1], "targets differs"),
        ("rate_scale", 2.0, "rate_scale differs"),
        ("batch", [48, 95], "batch differs"),
        ("positions", [[48, 49]], "had other positions"),
        ("micro_batches", 99, "makes 99"),
    ],
)
def test_a_window_that_one_worker_was_told_otherwise_is_seen(
    local_run: tuple[Path, Logs], field: str, value: object, says: str
) -> None:
    journal, logs = local_run[0], copy.deepcopy(local_run[1])
    [event for event in logs[1] if event["event"] == "assigned"][1][field] = value

    with pytest.raises(AssertionError, match=says):
        judge_journal(journal, TASK, 3, logs, NESTEROV)


def test_positions_that_a_worker_computed_and_then_lost_are_seen(
    local_run: tuple[Path, Logs],
) -> None:
    journal, logs = local_run[0], copy.deepcopy(local_run[1])
    at = [index for index, event in enumerate(logs[1]) if event["event"] == "assigned"][1]
    event = logs[1][at]
    term, round_ = event["key"]
    void = {**event, "key": [term, round_ + 1000], "attempt": -1, "positions": [event["batch"]]}
    logs[1].insert(at, void)

    with pytest.raises(AssertionError, match="for nothing"):
        judge_journal(journal, TASK, 3, logs, NESTEROV)
