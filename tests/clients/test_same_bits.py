"""Clients on lines of grains: the same bits on any number of workers, whoever is killed.

Every step is verified: each client computes grains of others, and none of its hashes may differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.languages import every_language
from clients.rig import mixed_line

# The first test of a language builds its client; on a slow machine that takes minutes.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GRAIN = 3
"""A batch of 32 has 11 grains; the last one is short, and so is each epoch's last batch."""
ENDLESS = 10**6
VERIFY = ("--verify", "1")


@every_language
def test_three_workers_of_whom_one_is_killed_end_with_the_bits_of_a_worker_alone(
    tmp_path: Path, name: str
) -> None:
    with mixed_line(tmp_path / "three", 3, ENDLESS, *VERIFY, grain=GRAIN) as line:
        for slot in range(3):
            line.start(slot, name)
        line.await_step(3)
        line.processes.pop(1).kill()
        line.await_step(line.await_live(2).step + 3)
        line.drain()
        together = line.ended_alike()
        verified = line.service.status().verification
        rosters = [entry.record.roster for entry in line.chain()]
    with mixed_line(tmp_path / "one", 1, together["step"], grain=GRAIN) as line:
        line.start(0, name)
        alone = line.ended_alike()

    assert together == alone
    assert verified.steps == together["step"]
    assert verified.grains > 0
    assert verified.differences == 0
    assert rosters[3] == (0, 1, 2)
    assert rosters[-1] == (0, 2)
