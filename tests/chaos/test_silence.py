"""Workers that go silent without dying: stopped processes and links that are down."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from chaos.judge import judge
from chaos.rig import ChaosLine, chaos_line, events_of
from chaos.schedules import SCHEDULES

pytestmark = pytest.mark.integration


def test_a_worker_stopped_beyond_its_lease_comes_back_behind_and_is_brought_in_sync(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path, stops={1: ("mid-blocks", 4)}) as line:
        line.workers[1].await_point("mid-blocks")
        line.workers[1].signal(signal.SIGSTOP)
        line.workers[1].go()
        line.await_progress(0, 2)
        line.workers[1].signal(signal.SIGCONT)
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert verdict.entry(4).record.roster == (0, 2)
    assert verdict.chain[-1].record.roster == (0, 1, 2)
    assert _installs(line, 1) == 2


def test_a_worker_stopped_between_ready_and_commit_gets_what_it_missed_by_transfer(
    tmp_path: Path,
) -> None:
    stops = {1: ("ready-sent", 4), 2: ("after-blocks", 4)}
    with chaos_line(tmp_path, stops=stops) as line:
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
    assert verdict.entry(4).record.roster == (0, 1, 2)
    assert verdict.entry(5).record.roster == (0, 2)
    assert _installs(line, 1) == 2


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("every-step", "mid-blocks"),
        ("cadence", "mid-compute"),
        ("local-nesterov", "mid-compute"),
        ("overlapped", "mid-compute"),
    ],
)
def test_a_worker_stopped_for_less_than_its_lease_costs_no_attempt(
    tmp_path: Path, name: str, point: str
) -> None:
    schedule = next(each for each in SCHEDULES if each.name == name)
    patient = ("--liveness", "10")
    with chaos_line(tmp_path, 3, *patient, schedule=schedule, stops={1: (point, 4)}) as line:
        line.workers[1].await_point(point)
        line.workers[1].signal(signal.SIGSTOP)
        line.workers[1].go()
        time.sleep(0.3)
        line.workers[1].signal(signal.SIGCONT)
        line.await_progress()
        line.finish()

    verdict = judge(line)
    result = verdict.entry(4).result
    assert result is not None
    assert result.attempt == 0
    assert _departures(line) == {"COMPLETE"}


@pytest.mark.netns
def test_a_link_that_is_down_beyond_the_lease_loses_its_worker_until_it_is_up(
    tmp_path: Path,
) -> None:
    with _link() as link, chaos_line(tmp_path, 3, *OPEN, absent=2) as line:
        line.start_worker(2, *link.prefix, address=link.address_of(line))
        line.await_progress()
        link.set("down")
        line.await_status("two live workers", lambda status: status.live == 2)
        line.await_progress(0, 1)
        link.set("up")
        line.await_progress()
        line.finish()

    judge(line)
    assert _departures(line) == {"LOST", "COMPLETE"}


@pytest.mark.netns
def test_a_link_that_is_down_for_a_moment_costs_no_attempt(tmp_path: Path) -> None:
    flags = (*OPEN, "--liveness", "10")
    with _link() as link, chaos_line(tmp_path, 3, *flags, absent=2) as line:
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
    result = verdict.entry(step).result
    assert result is not None
    assert (result.attempt, len(result.contributions)) == (0, 3)
    assert _departures(line) == {"COMPLETE"}


def _departures(line: ChaosLine) -> set[str]:
    with JournalReader(line.journal) as journal:
        return {gone.reason for gone in journal.departures()}


def _installs(line: ChaosLine, slot: int) -> int:
    """How often a worker was brought in sync, by a bootstrap or by a transfer."""
    return [event["event"] for event in events_of(line.workers[slot].log)].count("installed")


OPEN = ("--bind", "0.0.0.0", "--insecure")
"""Flags of a service that workers reach over the link."""


class Link:
    """A network namespace with one link to this host's namespace."""

    def __init__(self) -> None:
        """Makes it.

        Raises:
            subprocess.CalledProcessError: this process lacks the permission.
        """
        number = os.getpid() % 250
        self.name, self._here, there = f"andon-{number}", f"andon{number}h", f"andon{number}w"
        self._host, worker = f"10.213.{number}.1", f"10.213.{number}.2"
        self.prefix = ("ip", "netns", "exec", self.name)
        _ip("netns", "add", self.name)
        _ip("link", "add", self._here, "type", "veth", "peer", "name", there, "netns", self.name)
        _ip("address", "add", f"{self._host}/30", "dev", self._here)
        _ip("link", "set", self._here, "up")
        _ip("-n", self.name, "address", "add", f"{worker}/30", "dev", there)
        _ip("-n", self.name, "link", "set", there, "up")

    def address_of(self, line: ChaosLine) -> str:
        """The address of a service, as seen from the other end of the link."""
        return f"{self._host}:{line.service.address.rpartition(':')[2]}"

    def set(self, state: str) -> None:
        """Takes the link `up` or `down`."""
        _ip("link", "set", self._here, state)


@contextmanager
def _link() -> Iterator[Link]:
    """A link; skips the test if this process can't make one."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        link = Link()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system allows no network namespaces: {error.stderr.strip()}")
    try:
        yield link
    finally:
        _ip("netns", "delete", link.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
