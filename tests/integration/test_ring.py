"""A line whose blocks go around a ring, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.harness import start_line, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC = {"samples": 40, "batch": 10, "steps": 6, "optimizer": "adamw"}


def train_on_a_ring(folder: Path, spec: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    with start_line(folder, spec, workers, "--topology", "ring") as (_service, started):
        for worker in started:
            assert worker.wait() == 0, worker.output
    return [worker.seen for worker in started]


@pytest.mark.parametrize("workers", [2, 3])
def test_c_ring_001_all_ranks_hold_the_same_bits(tmp_path: Path, workers: int) -> None:
    # 10 samples over 3 ranks: uneven weights.
    seen = train_on_a_ring(tmp_path, SPEC, workers)

    assert {each["step"] for each in seen} == {6}
    assert len({each["digest"] for each in seen}) == 1
    assert len({tuple(each["gradients"]) for each in seen}) == 1


def test_c_ring_001_two_ranks_get_the_reducers_bits(tmp_path: Path) -> None:
    ring = train_on_a_ring(tmp_path, SPEC, 2)
    star_folder = tmp_path / "star"
    star_folder.mkdir()
    star = train(star_folder, SPEC, 2)

    assert ring[0]["losses"] == star[0]["losses"]
    assert ring[0]["digest"] == star[0]["digest"]
