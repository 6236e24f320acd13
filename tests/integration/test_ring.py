"""A line with the ring topology, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, on_line, start_line, start_worker, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SPEC: dict[str, Any] = {"samples": 40, "batch": 10, "steps": 6, "optimizer": "adamw"}
RING = ("--topology", "ring")
STEP = 4


def train_on_a_ring(
    folder: Path, spec: dict[str, Any], workers: int, *, expect_exit: int = 0
) -> list[dict[str, Any]]:
    """Trains; returns what each worker saw, by slot."""
    with start_line(folder, spec, workers, *RING) as (_service, started):
        for worker in started:
            code = worker.wait()
            assert code == expect_exit, worker.output
    return [worker.seen for worker in started]


def test_c_ring_001_three_ranks_of_uneven_weights_hold_the_same_bits(tmp_path: Path) -> None:
    seen = train_on_a_ring(tmp_path, SPEC, 3)  # ten samples: 4, 3 and 3

    assert {each["step"] for each in seen} == {6}
    assert len({each["digest"] for each in seen}) == 1
    assert len({tuple(each["gradients"]) for each in seen}) == 1


def test_c_ring_001_two_ranks_get_the_reducers_bits(tmp_path: Path) -> None:
    ring = train_on_a_ring(tmp_path, SPEC, 2)
    star_folder = tmp_path / "star"
    star_folder.mkdir()

    star = train(star_folder, SPEC, 2)

    assert [each["losses"] for each in ring] == [each["losses"] for each in star]
    assert [each["digest"] for each in ring] == [each["digest"] for each in star]


def test_f_dp_006_a_rank_killed_in_mid_round_costs_one_attempt(tmp_path: Path) -> None:
    pause = {"slot": 1, "step": STEP, "until": str(tmp_path / "never")}
    spec = {"samples": 120, "batch": 12, "steps": 8, "pauses": [pause]}
    with start_line(tmp_path, spec, 3, *RING) as (service, started):
        service.await_status(
            lambda line: (
                line.step == STEP - 1
                and {
                    each.worker for each in line.workers if each.activity == pb.ACTIVITY_EXCHANGING
                }
                == {0, 2}
            )
        )
        assert service.metric("andon_allreduce_seconds_count") == STEP - 1
        started[1].kill()
        for slot in (0, 2):
            assert started[slot].wait() == 0, started[slot].output

    seen = [started[slot].seen for slot in (0, 2)]
    assert len({each["digest"] for each in seen}) == 1
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        rosters = {
            entry.record.step: entry.record.roster for entry in journal.chain() if entry.result
        }
    assert rosters[STEP - 1] == (0, 1, 2)
    assert rosters[STEP] == rosters[8] == (0, 2)


def test_f_dp_003_a_value_that_is_not_finite_stops_the_ring_and_is_named(tmp_path: Path) -> None:
    place = {"parameter": "blocks.1.up.weight", "element": [3, 2]}
    spec = {**SPEC, "poison": {"step": STEP, "slot": 1, "value": "nan", **place}}

    seen = train_on_a_ring(tmp_path, spec, 3, expect_exit=3)

    for each in seen:
        (halt,) = each["halts"]
        assert (halt["reason"], halt["worker"]) == ("non_finite_gradient", 1)
        assert (halt["parameter"], halt["element"]) == (place["parameter"], place["element"])
        assert each["step"] == STEP - 1
    assert len({each["digest"] for each in seen}) == 1


def test_a_worker_that_joins_no_ring_is_refused_by_name(tmp_path: Path) -> None:
    with Service(tmp_path / "run", 2, *RING) as service:
        where = {**on_line(service, 0, 2), "ANDON_RING_BIND": "off"}
        worker = start_worker(tmp_path, SPEC, slot=0, **where)

        assert worker.wait() == 4, worker.output

    assert (worker.seen["reason"], worker.seen["component"]) == ("capability", "ring.v1")
    assert "ring.v1" in worker.output


def test_exchanges_by_hand_and_broadcasts_go_around_a_ring(tmp_path: Path) -> None:
    digests = {}
    for flags in ((), RING):
        folder = tmp_path / ("-".join(flags) or "star")
        folder.mkdir()
        with Service(folder / "run", 2, *flags) as service:
            started = [
                start_worker(
                    folder,
                    {"steps": 4, "drift": True},
                    slot=slot,
                    script="gan.py",
                    **on_line(service, slot, 2),
                )
                for slot in range(2)
            ]
            for worker in started:
                assert worker.wait() == 0, worker.output
        digests[flags] = [worker.seen["digests"] for worker in started]

    assert digests[RING][0] == digests[RING][1]
    assert digests[RING] == digests[()]
