"""Uneven lines: shares and windows by speed, on real processes, and a gradient that stands out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from andon.protocol.shards import Ranges
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, Worker, finish, start_workers, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SPEC: dict[str, Any] = {"samples": 100, "batch": 8, "steps": 9}


ONE_IS_FAST = ({"ANDON_SPEED_HINT": "3"}, {"ANDON_SPEED_HINT": "1"})
"""Worker 0 says that it is three times as fast."""


@contextmanager
def one_fast_worker(folder: Path, *flags: str) -> Iterator[tuple[Service, list[Worker]]]:
    """A line of two, which has trained."""
    with (
        Service(folder / "run", 2, *flags) as service,
        start_workers(folder, service, SPEC, 2, each=ONE_IS_FAST) as workers,
    ):
        finish(workers)
        yield service, workers


def shares_of_first_step(service: Service) -> list[Ranges]:
    """What each rank had of the first step, in a journal whose ledger is whole."""
    with JournalReader(service.journal) as journal:
        first = next(each.result for each in journal.entries() if each.result is not None)
        assert journal.ledger_faults() == []
    return [each.positions for each in first.contributions]


def sizes(shares: list[Ranges]) -> list[int]:
    return [sum(map(len, share)) for share in shares]


def samples_of(workers: list[Worker]) -> dict[int, list[int]]:
    """The indices of the samples that each step took, all workers together."""
    taken: dict[int, list[int]] = {}
    for worker in workers:
        for step, _rank, indices in worker.seen["indices"]:
            taken.setdefault(step, []).extend(indices)
    return taken


def test_a_cadence_gives_the_fast_worker_more_of_a_batch_and_all_end_with_equal_weights(
    tmp_path: Path,
) -> None:
    with one_fast_worker(tmp_path, "--schedule", "cadence") as (service, workers):
        codes = [worker.wait() for worker in workers]

        assert codes == [0, 0], workers[0].output
        assert sizes(shares_of_first_step(service)) == [6, 2]
    assert len({worker.seen["digest"] for worker in workers}) == 1
    # Nobody computes more than half a batch at a time, as without a cadence.
    firsts = [
        [len(indices) for step, _, indices in worker.seen["indices"] if step == 1]
        for worker in workers
    ]
    assert firsts == [[3, 3], [2]]
    assert len(samples_of(workers)[1]) == 8


def test_f_dp_002_balanced_interleaved_shares_take_every_sample_of_an_epoch_once(
    tmp_path: Path,
) -> None:
    flags = ("--schedule", "every-step", "--shares", "balanced-interleaved")
    with one_fast_worker(tmp_path, *flags) as (service, workers):
        codes = [worker.wait() for worker in workers]

        assert codes == [0, 0], workers[0].output
        shares = shares_of_first_step(service)
    assert sizes(shares) == [6, 2]
    assert len(shares[1]) == 2, "its positions lie between those of the other"
    taken = [index for indices in samples_of(workers).values() for index in indices]
    assert len(taken) == len(set(taken)) == 72


def test_a_worker_whose_own_gradient_stands_out_halts_the_line_and_is_named(
    tmp_path: Path,
) -> None:
    poison = {"slot": 1, "step": 4, "parameter": "head.weight", "element": [0, 0], "value": 1e4}
    flags = ("--worker-grad-norm", "10")

    seen = train(tmp_path, {**SPEC, "poison": poison}, 3, *flags, expect_exit=3)

    [halt] = seen[0]["halts"]
    assert (halt["reason"], halt["step"], halt["worker"]) == ("gradient_norm_spike", 4, 1)
    assert float(halt["value"]) == pytest.approx(1e4, rel=0.01)
    assert {each["step"] for each in seen} == {3}
    assert len({each["digest"] for each in seen}) == 1
