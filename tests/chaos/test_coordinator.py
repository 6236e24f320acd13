"""The coordinator is killed in every part of a step, and restarts on its journal."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from chaos.barrier import POINTS
from chaos.judge import judge
from chaos.rig import PATIENCE_S, ChaosLine, await_until, chaos_line
from integration.harness import Service, clean_environment
from integration.nursery import nursery

pytestmark = pytest.mark.integration


def test_the_line_goes_on_after_its_coordinator_was_killed_at_any_point_of_a_step(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path) as line:
        for turn, point in enumerate(POINTS):
            stands, other = line.workers[turn % 3], line.workers[(turn + 1) % 3]
            step = line.await_progress() + 1
            stands.stop_at(point, step)
            stands.await_point(point)
            line.kill_coordinator()
            line.restart_coordinator()
            stands.go()
            line.await_step(max(stands.step, other.step) + 2)
        line.finish()

    verdict = judge(line)
    assert verdict.resplit == frozenset()
    assert len(_terms(line)) == len(POINTS) + 1


def test_a_step_that_was_ready_and_not_recorded_is_done_again_after_a_restart(
    tmp_path: Path,
) -> None:
    stops = dict.fromkeys(range(3), ("after-blocks", 4))
    with chaos_line(tmp_path, stops=stops) as line:
        for worker in line.workers.values():
            worker.await_point("after-blocks")
        with closing(sqlite3.connect(line.journal, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the record waits for this worker
            for worker in line.workers.values():
                worker.go()
            line.await_status("the coordinator to have every report", _all_reported)
            line.kill_coordinator()
            other.execute("ROLLBACK")
        line.restart_coordinator()
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert verdict.entry(3).record.key.term == _terms(line)[0]
    assert verdict.entry(4).record.key.term == _terms(line)[1]


def test_a_record_that_was_durable_and_perhaps_not_announced_is_kept(tmp_path: Path) -> None:
    delays = random.Random(4)
    with chaos_line(tmp_path) as line:
        for _ in range(4):
            worker = line.workers[delays.randrange(3)]
            worker.stop_at("after-blocks", line.await_progress() + 1)
            step = worker.await_point("after-blocks")
            delay_s = delays.choice([0.0, 0.0, 0.0005, 0.002])
            _kill_once_durable(line, worker.slot, step, delay_s)
            line.restart_coordinator()
            line.await_progress()
            assert len(_terms(line)) > 1
        line.finish()

    verdict = judge(line)
    assert verdict.resplit == frozenset()


def test_a_second_coordinator_on_the_journal_is_refused_while_the_first_lives(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path) as line:
        line.await_progress()
        for stop in (signal.SIGCONT, signal.SIGSTOP):
            line.service.process.send_signal(stop)
            errors = tmp_path / f"second-{stop.name}"
            refused = nursery("service").start(
                [
                    *("-m", "andon_cli", "serve", "--port", "0", "--metrics-port", "0"),
                    *("--run-dir", str(tmp_path / "run"), "--run-id", line.service.run_id),
                ],
                clean_environment(),
                errors,
            )
            assert refused.wait(PATIENCE_S) == 1
            assert "another coordinator" in errors.read_text()
        line.service.process.send_signal(signal.SIGCONT)
        line.await_progress()
        line.finish()

    judge(line)
    assert len(_terms(line)) == 1


def test_a_coordinator_that_was_deposed_while_it_slept_commits_nothing_more(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path, stops={1: ("after-blocks", 4)}) as line:
        line.workers[1].await_point("after-blocks")
        old = line.service
        # Simulates a file system without working locks: the second coordinator sees no lock.
        next(path for path in (tmp_path / "run").iterdir() if "lock" in path.name).unlink()
        with Service(tmp_path / "run", 3, *line.flags, "--run-id", old.run_id):
            line.workers[1].go()
            code = old.process.wait(PATIENCE_S)
        line.restart_coordinator()
        line.await_progress()
        line.finish()

    assert code != 0
    verdict = judge(line)
    terms = _terms(line)
    assert len(terms) == 3
    assert verdict.entry(3).record.key.term == terms[0]
    assert verdict.entry(4).record.key.term == terms[2]


def _terms(line: ChaosLine) -> list[int]:
    with JournalReader(line.journal) as journal:
        return journal.terms()


def _all_reported(status: pb.LineStatus) -> bool:
    """Whether all reported: a heartbeat with this phase follows the report on the same stream."""
    return all(each.activity == pb.ACTIVITY_COMMITTING for each in status.workers)


def _kill_once_durable(line: ChaosLine, slot: int, step: int, delay_s: float) -> None:
    """Lets a worker continue, and kills the coordinator once the step's record can be read."""
    uri = f"{line.journal.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as reader:

        def durable() -> bool:
            (last,) = reader.execute("SELECT max(step) FROM records").fetchone()
            return bool(last >= step)

        line.workers[slot].go()
        await_until(f"the record of step {step}", durable, poll_s=0.0)
    time.sleep(delay_s)
    line.kill_coordinator()
