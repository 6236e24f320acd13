"""What real workers log is in the journal once, whoever is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, await_exit, on_line, start_line, start_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS = 14
PAUSED = 6
"""The step in which worker 0 waits, while the coordinator is killed."""


def logged(journal: Path, worker: int) -> list[tuple[int, float]]:
    """Step and value of everything that the journal has of a worker, in the order of steps."""
    with JournalReader(journal) as reader:
        return [(each.step, each.value) for each in reader.scalars("val") if each.worker == worker]


def values(worker: int, *steps: int) -> list[tuple[int, float]]:
    return [(step, step + worker / 10) for step in steps]


def test_what_workers_log_survives_a_killed_worker_and_a_killed_coordinator(
    tmp_path: Path,
) -> None:
    pauses = [
        {"slot": 1, "step": 4, "until": str(tmp_path / "go-1")},
        {"slot": 0, "step": PAUSED, "until": str(tmp_path / "go-0")},
    ]
    spec: dict[str, Any] = {
        **{"samples": 120, "batch": 12, "steps": STEPS, "logs": True, "pauses": pauses},
        # What it logs of steps that it makes up is dropped.
        "transfers": True,
    }
    with start_line(tmp_path, spec, 2) as (service, workers):
        journal = service.journal
        # It computes nothing and asks for nothing meanwhile: scalars come without a step.
        wait_until(lambda: logged(journal, 1) == values(1, 1, 2, 3), "the third value")
        workers[1].kill()
        workers[1] = start_worker(tmp_path, spec, slot=1, **on_line(service, 1, 2))

        # Its fifth value is perhaps under way, or not yet sent.
        wait_until((tmp_path / "go-0.here").exists, "the pause")
        before = {worker: logged(journal, worker) for worker in (0, 1)}
        service.process.kill()
        service.process.wait()
        port = int(service.address.rpartition(":")[2])
        with Service(tmp_path / "run", 2, "--run-id", service.run_id, port=port):
            (tmp_path / "go-0").touch()
            (tmp_path / "go-1").touch()
            await_exit(workers)

    # One row of each step: nothing is lost, and what was sent twice is there once.
    assert logged(journal, 0) == values(0, *range(1, STEPS + 1))
    of_both_lives = {*values(1, 1, 2, 3), *map(tuple, workers[1].seen.get("logged", []))}
    assert logged(journal, 1) == sorted(of_both_lives)
    for worker, kept in before.items():
        assert set(kept) <= set(logged(journal, worker))
    with JournalReader(journal) as reader:
        assert reader.scalar_names() == ["val"]
        means = dict(reader.scalar_curve("val"))
    assert means[3] == pytest.approx(3.05)
