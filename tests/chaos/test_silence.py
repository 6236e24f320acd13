"""Workers that go silent without dying: stopped processes and links that are down."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from chaos.judge import judge
from chaos.link import network_link
from chaos.rig import await_until, chaos_line
from chaos.schedules import SCHEDULES

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "by-transfer"])
def test_a_worker_stopped_between_ready_and_commit_gets_what_it_missed(
    tmp_path: Path, learns: bool
) -> None:
    stops = {1: ("ready-sent", 4), 2: ("after-blocks", 4)}
    with chaos_line(tmp_path, stops=stops, learns=learns) as line:
        line.workers[1].await_point("ready-sent")
        line.workers[2].await_point("after-blocks")
        line.await_status(
            "the coordinator to have worker 1's report",
            lambda status: status.workers[1].activity == pb.ACTIVITY_COMMITTING,
        )
        line.workers[1].signal(signal.SIGSTOP)
        line.workers[1].go()
        line.workers[2].go()
        line.await_progress(0, 2, steps=3)
        line.workers[1].signal(signal.SIGCONT)
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert verdict.roster(4) == (0, 1, 2)
    assert verdict.roster(5) == (0, 2)
    assert line.installs(1) == 2
    assert bool(line.said(1, "learning the line's state")) is learns


@pytest.mark.parametrize("name", ["every-step", "cadence"])
def test_a_stopped_worker_that_can_learn_is_cut_off_long_before_its_lease_and_learns(
    tmp_path: Path, name: str
) -> None:
    schedule = next(each for each in SCHEDULES if each.name == name)
    patient = ("--liveness", "100")
    stops = {1: ("mid-blocks", 4)}
    with chaos_line(tmp_path, 3, *patient, schedule=schedule, stops=stops, pace_s=0.002) as line:
        line.workers[1].await_point("mid-blocks")
        line.workers[1].signal(signal.SIGSTOP)
        line.workers[1].go()
        # Within the limit of each wait, which is shorter than the lease.
        line.await_progress(0, 2, steps=3)
        line.workers[1].signal(signal.SIGCONT)
        line.await_progress(steps=3)
        line.await_arrival()
        line.finish()

    verdict = judge(line)
    assert (verdict.roster(4), verdict.attempts[4], verdict.roster()) == ((0, 2), 1, (0, 1, 2))
    assert line.said(1, "learning the line's state")
    assert line.departures == {"LOST", "COMPLETE"}
    with JournalReader(line.journal) as journal:
        (lost,) = (each for each in journal.departures() if each.reason == "LOST")
    assert "its process has been stopped" in lost.message


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("every-step", "mid-blocks"),
        ("cadence", "mid-compute"),
        ("local-nesterov", "mid-compute"),
        ("overlapped", "mid-compute"),
    ],
)
def test_a_worker_that_can_t_learn_and_is_stopped_for_less_than_its_lease_costs_no_attempt(
    tmp_path: Path, name: str, point: str
) -> None:
    schedule = next(each for each in SCHEDULES if each.name == name)
    patient = ("--liveness", "10")
    # Nobody learns with local steps, whatever workers can do.
    learns, stops = bool(schedule.local_steps), {1: (point, 4)}
    with chaos_line(tmp_path, 3, *patient, schedule=schedule, stops=stops, learns=learns) as line:
        line.workers[1].await_point(point)
        line.workers[1].signal(signal.SIGSTOP)
        line.workers[1].go()
        time.sleep(0.3)
        line.workers[1].signal(signal.SIGCONT)
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert verdict.attempts[4] == 0
    assert line.departures == {"COMPLETE"}


@pytest.mark.netns
def test_a_link_that_is_down_beyond_the_lease_loses_its_worker_until_it_is_up(
    tmp_path: Path,
) -> None:
    with network_link() as link, chaos_line(tmp_path, 3, *OPEN, absent=2, learns=False) as line:
        line.start_worker(2, *link.prefix, address=link.address_of(line))
        line.await_progress()
        link.set("down")
        line.await_status("two live workers", lambda status: status.live == 2)
        line.await_progress(0, 1)
        link.set("up")
        line.await_progress()
        line.finish()

    judge(line)
    assert line.departures == {"LOST", "COMPLETE"}


@pytest.mark.netns
def test_a_worker_that_can_learn_is_suspected_once_its_link_is_down(tmp_path: Path) -> None:
    flags = (*OPEN, "--liveness", "2")
    with network_link() as link, chaos_line(tmp_path, 3, *flags, absent=2, pace_s=0.002) as line:
        line.start_worker(2, *link.prefix, address=link.address_of(line))

        def patience_s() -> float:
            return line.service.metric("andon_worker_patience_seconds", worker="2")

        await_until("worker 2 to be known", lambda: 0 < patience_s() < 2, poll_s=0.2)
        link.set("down")
        line.await_progress(0, 1, steps=3)
        link.set("up")
        line.await_progress()
        line.await_arrival()
        line.finish()

    judge(line)
    assert line.said(2, "learning the line's state")
    with JournalReader(line.journal) as journal:
        (lost,) = (each for each in journal.departures() if each.reason == "LOST")
    assert lost.worker == 2
    assert "it used to answer in" in lost.message


@pytest.mark.netns
def test_a_link_that_is_down_for_a_moment_costs_no_attempt(tmp_path: Path) -> None:
    flags = (*OPEN, "--liveness", "10")
    with network_link() as link, chaos_line(tmp_path, 3, *flags, absent=2) as line:
        worker = line.start_worker(2, *link.prefix, address=link.address_of(line))
        line.await_progress()
        worker.stop_at("mid-blocks")
        step = worker.await_point("mid-blocks")
        link.set("down")
        worker.go()
        time.sleep(0.5)
        link.set("up")
        line.await_progress()
        line.finish()

    verdict = judge(line)
    result = verdict.result(step)
    assert (result.attempt, len(result.contributions)) == (0, 3)
    assert line.departures == {"COMPLETE"}


OPEN = ("--bind", "0.0.0.0", "--insecure")
"""Flags of a service that workers reach over the link."""
