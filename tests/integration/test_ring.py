"""A line with the ring topology, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from integration.harness import await_exit, finish, start_line, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

RING = ("--topology", "ring")
STEP = 4


def test_f_dp_006_a_rank_killed_in_mid_round_costs_one_attempt(tmp_path: Path) -> None:
    pause = {"slot": 1, "step": STEP, "until": str(tmp_path / "never")}
    spec = {"samples": 120, "batch": 12, "steps": 8, "pauses": [pause]}

    def others_wait(line: pb.LineStatus) -> bool:
        waiting = {each.worker for each in line.workers if each.activity == pb.ACTIVITY_EXCHANGING}
        return line.step == STEP - 1 and waiting == {0, 2}

    with start_line(tmp_path, spec, 3, *RING) as (service, started):
        service.await_status(others_wait)
        assert service.metric("andon_allreduce_seconds_count") == STEP - 1
        started[1].kill()
        seen = finish([started[0], started[2]])

    assert len({each["digest"] for each in seen}) == 1
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        rosters = {
            entry.record.step: entry.record.roster for entry in journal.chain() if entry.result
        }
    assert rosters[STEP - 1] == (0, 1, 2)
    assert rosters[STEP] == rosters[8] == (0, 2)


def test_a_worker_that_joins_no_ring_is_refused_by_name(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"samples": 40, "batch": 10, "steps": 6}
    with start_line(tmp_path, spec, 1, *RING, ANDON_RING_BIND="off") as (_, (worker,)):
        await_exit([worker], 4)

    assert (worker.seen["reason"], worker.seen["component"]) == ("capability", "ring.v1")
    assert "ring.v1" in worker.output


def test_exchanges_by_hand_and_broadcasts_go_around_a_ring(tmp_path: Path) -> None:
    spec = {"steps": 4, "drift": True}

    star, ring = (
        train(tmp_path / name, spec, 2, *flags, script="gan.py")
        for name, flags in (("star", ()), ("ring", RING))
    )

    digests = [each["digests"] for each in (*star, *ring)]
    assert digests == [digests[0]] * 4
