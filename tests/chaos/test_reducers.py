"""Reducers that share a model are killed, stopped, restarted and cut off; the workers continue."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from chaos.judge import judge
from chaos.reducers import Reducer, reduced_line

pytestmark = pytest.mark.integration

STEP = 4
"""The step in which the fault occurs."""


def test_a_reducer_killed_in_the_midst_of_a_round_costs_an_attempt_and_is_used_once_it_is_back(
    tmp_path: Path,
) -> None:
    with reduced_line(tmp_path, 2, stops={1: ("mid-blocks", STEP)}) as reduced:
        first, second = reduced.reducers
        assert reduced.line.workers[1].await_point("mid-blocks") == STEP
        first.signal(signal.SIGKILL)
        reduced.line.workers[1].go()
        reduced.line.await_progress()
        reduced.await_reducers(second)
        first.start()
        sharing = reduced.await_reducers(first, second).reducers
        reduced.line.await_progress()
        reduced.line.finish()

    assert sum(each.elements for each in sharing) == 105
    verdict = judge(reduced.line)
    assert (verdict.roster(STEP), verdict.attempts[STEP] > 0) == ((0, 1, 2), True)
    assert verdict.roster() == (0, 1, 2)
    assert reduced.line.departures == {"COMPLETE"}


def test_a_stopped_reducer_is_off_the_map_within_its_lease_and_back_once_it_goes_on(
    tmp_path: Path,
) -> None:
    with reduced_line(tmp_path, 2, stops={1: ("mid-blocks", STEP)}) as reduced:
        first, second = reduced.reducers
        reduced.line.workers[1].await_point("mid-blocks")
        first.signal(signal.SIGSTOP)
        reduced.line.workers[1].go()
        reduced.line.await_progress()
        reduced.await_reducers(second)
        first.signal(signal.SIGCONT)
        reduced.await_reducers(first, second)
        reduced.line.await_progress()
        reduced.line.finish()

    verdict = judge(reduced.line)
    assert verdict.roster(STEP) == (0, 1, 2)
    assert reduced.line.departures == {"COMPLETE"}


def test_a_coordinator_without_a_reducer_waits_while_all_reducers_are_gone(tmp_path: Path) -> None:
    with reduced_line(tmp_path, 1, "--role", "coordinator") as reduced:
        (only,) = reduced.reducers
        reduced.await_reducers(only, own=False)
        reduced.line.await_progress()
        only.signal(signal.SIGKILL)
        waiting = reduced.line.await_status(
            "the line to wait", lambda status: "reducer" in status.waiting_for
        )
        only.start()
        reduced.line.await_progress()
        reduced.line.finish()

    assert (waiting.state, waiting.waiting_for) == (
        pb.LINE_STATE_FORMING,
        "a reducer to come back",
    )
    judge(reduced.line)


def test_state_goes_through_a_reducer_where_the_coordinator_has_none(tmp_path: Path) -> None:
    with reduced_line(tmp_path, 2, "--role", "coordinator", learns=False) as reduced:
        reduced.line.await_progress()
        reduced.line.workers[1].kill()
        reduced.line.await_progress(0, 2)
        reduced.line.start_worker(1)
        reduced.line.await_progress()
        reduced.line.finish()

    assert judge(reduced.line).roster() == (0, 1, 2)


def test_reducers_register_again_with_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    with reduced_line(tmp_path, 2) as reduced:
        first, second = reduced.reducers
        reduced.line.await_progress()
        reduced.line.kill_coordinator()
        reduced.line.restart_coordinator()
        reduced.await_reducers(first, second)
        reduced.line.await_progress()
        reduced.line.finish()

    judge(reduced.line)


def test_a_worker_and_a_reducer_killed_in_one_round_leave_the_step_to_the_others(
    tmp_path: Path,
) -> None:
    with reduced_line(tmp_path, 2, stops={1: ("mid-blocks", STEP)}) as reduced:
        first, second = reduced.reducers
        reduced.line.workers[1].await_point("mid-blocks")
        first.signal(signal.SIGKILL)
        reduced.line.workers[1].kill()
        reduced.line.await_progress(0, 2)
        reduced.await_reducers(second)
        reduced.line.finish()

    assert judge(reduced.line).roster(STEP) == (0, 2)


def test_a_reducer_that_no_worker_reaches_halts_the_line_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # its port does not listen
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        with reduced_line(tmp_path, 0) as reduced:
            reduced.line.await_progress()
            reduced.start_reducer("--advertise", nowhere)
            halted = reduced.line.await_status(
                "the line to halt", lambda status: status.state == pb.LINE_STATE_HALTED
            )

    assert halted.halt.reason == halt_pb2.HALT_REASON_REPEATED_FAILURE
    assert nowhere in halted.halt.message


def test_a_reducer_with_another_secret_is_refused(tmp_path: Path) -> None:
    with reduced_line(tmp_path, 0) as reduced:
        address = reduced.line.service.address
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "secret").write_text("another secret that is long enough")
        stranger = Reducer(address, tmp_path / "other")
        stranger.start()
        assert stranger.process is not None
        try:
            code = stranger.process.wait(20)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stranger.close()
        reducers = [each.address for each in reduced.line.service.status().reducers]
        reduced.line.finish()

    said = (tmp_path / "other" / "reducers.txt").read_text()
    assert (code, reducers) == (4, [""])
    assert "another secret" in said
    assert "long enough" not in said
