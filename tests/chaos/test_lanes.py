"""Faults of a worker's TCP lanes, while its gRPC connections are sound."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from chaos.judge import judge
from chaos.lane_relay import DOWN, UP, LaneRelay
from chaos.link import network_link
from chaos.rig import await_until, chaos_line, free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

HARMED = 2
"""The worker whose lanes go through the relay; the others' do not."""
MOMENT_S = 0.3


def test_a_lane_that_is_cut_either_way_voids_the_round_and_is_opened_anew(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--tcp-port", str(tcp_port))
    with (
        chaos_line(tmp_path, 3, *flags, absent=HARMED, paths=("wire", "tcp")) as line,
        LaneRelay(line.service.address, tcp_port) as relay,
    ):
        worker = line.start_worker(HARMED, address=relay.address)
        steps = []
        for number, direction in enumerate((UP, DOWN)):
            line.await_progress()
            worker.stop_at("mid-blocks")
            steps.append(worker.await_point("mid-blocks"))
            await_until("the lanes", lambda: relay.lanes_opened >= 2 * (number + 1))  # noqa: B023
            assert relay.cut(direction) >= 1
            worker.go()
            line.await_progress()
        assert relay.lanes_opened >= 6, "a stream that is opened anew has lanes again"
        line.finish()

    verdict = judge(line)
    for step in steps:
        assert verdict.attempts[step] >= 1, "the round in which a lane broke was committed"
        assert verdict.roster(step) == (0, 1, HARMED), "its worker was not lost"


def test_lanes_that_are_slow_or_still_for_a_moment_cost_no_attempt(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--tcp-port", str(tcp_port))
    with (
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("tcp",)) as line,
        LaneRelay(line.service.address, tcp_port) as relay,
    ):
        line.start_worker(1, address=relay.address)
        line.await_progress()
        relay.delay_s = 0.01
        line.await_progress()
        relay.delay_s = 0.0
        for directions in ((UP,), (DOWN,), (UP, DOWN)):
            relay.freeze(*directions)
            time.sleep(MOMENT_S)
            relay.thaw()
            line.await_progress()
        line.finish()

    assert set(judge(line).attempts.values()) == {0}


def test_lanes_that_take_bytes_and_pass_none_on_cost_one_attempt_and_are_named(
    tmp_path: Path,
) -> None:
    tcp_port = free_port()
    flags = ("--tcp-port", str(tcp_port), "--max-workers", "3", "--straggler-timeout", "5")
    with (
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("tcp",)) as line,
        LaneRelay(line.service.address, tcp_port) as relay,
    ):
        behind = [line.start_worker(slot, address=relay.address) for slot in (1, 2)]
        line.await_roster(3)
        line.await_arrival()
        line.await_progress()
        stuck = max(worker.step for worker in line.workers.values()) + 2
        for worker in behind:
            worker.stop_at("before-blocks", stuck)
        for worker in behind:
            assert worker.await_point("before-blocks") == stuck
        relay.freeze(UP)
        for worker in behind:
            worker.go()
        line.await_step(stuck + 2)
        line.finish()

    verdict = judge(line)
    # Both were found in one attempt, though only the first word counts.
    assert {step: count for step, count in verdict.attempts.items() if count} == {stuck: 1}
    assert verdict.roster(stuck) == (0, 1, 2)
    log = (line.folder / "run" / "service.log").read_text()
    assert "stood still for 10 s while gRPC answered" in log
    for slot in (1, 2):
        chosen = line.said(slot, "not over TCP")
        assert len(chosen) == 1, chosen
        assert "its TCP lane for what this worker sends stood still" in chosen[0]


def test_ports_that_are_closed_or_filtered_cost_no_step_and_are_said_once(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--tcp-port", str(tcp_port), "--max-workers", "3")
    with (
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("tcp",)) as line,
        LaneRelay(line.service.address, tcp_port, "127.0.0.2", lanes="refused") as closed,
        LaneRelay(line.service.address, tcp_port, "127.0.0.3", lanes="silent") as filtered,
    ):
        line.start_worker(1, address=closed.address)
        line.start_worker(2, address=filtered.address)
        line.await_roster(3)
        line.await_arrival()
        line.await_progress(steps=5)
        assert line.moved_over("wire") > 0
        assert line.moved_over("tcp") > 0
        line.finish()

    judge(line)
    for slot, why in ((1, "Connection refused"), (2, "did not answer within 2 s")):
        chosen = line.said(slot, "not over TCP")
        assert len(chosen) == 1, chosen
        assert why in chosen[0]


@pytest.mark.netns
def test_a_firewall_that_drops_lanes_only_sends_a_worker_to_grpc(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--bind", "0.0.0.0", "--insecure", "--tcp-port", str(tcp_port), "--liveness", "5")
    with (
        network_link() as link,
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("wire", "tcp")) as line,
    ):
        if shutil.which("iptables") is None:
            pytest.skip("there is no `iptables` command: apt-get install iptables")
        worker = line.start_worker(1, *link.prefix, address=link.address_of(line))
        line.await_progress(steps=3)
        assert line.moved_over("tcp") > 0
        worker.kill()
        link.filter(tcp_port)
        line.await_progress(0)
        before = line.moved_over("tcp")
        line.start_worker(1, *link.prefix, address=link.address_of(line))
        line.await_progress()
        assert line.moved_over("tcp") == before
        line.finish()

    judge(line)


@pytest.mark.netns
@pytest.mark.skipif("ANDON_STORMS" not in os.environ, reason="waits for half a minute: make soak")
def test_a_lane_that_a_firewall_forgets_in_a_step_ends_within_a_minute(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--bind", "0.0.0.0", "--insecure", "--tcp-port", str(tcp_port), "--liveness", "5")
    with (
        network_link() as link,
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("wire", "tcp"), patience_s=90.0) as line,
    ):
        worker = line.start_worker(1, *link.prefix, address=link.address_of(line))
        line.await_progress()
        worker.stop_at("mid-blocks")
        step = worker.await_point("mid-blocks")
        link.filter(tcp_port)
        worker.go()
        line.await_progress()
        line.finish()

    assert judge(line).attempts[step] >= 1
