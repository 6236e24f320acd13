"""Each feature of PyTorch that a script may use: parity with one process, though a worker dies.

Two workers train, and one is killed in the middle of backward. The other goes on alone. Then the
journal's records are replayed by plain PyTorch in one process, on the union batches, and must lead
to the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from andon_coordinator.transport.reader import JournalReader
from integration.harness import start_line, start_worker
from integration.rows.register import ROWS

pytestmark = pytest.mark.integration

_KILLED_AT = 5


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in ROWS), ("coupled samples", 3)])
def test_f_dp_005_f_dp_006_a_row_matches_one_process_though_a_worker_is_killed(
    tmp_path: Path, name: str, size: int
) -> None:
    row = ROWS[name]
    spec = {"row": name, "kill": _KILLED_AT}
    with start_line(tmp_path, spec, size, *row.flags, script="row.py") as (_service, workers):
        codes = [worker.wait() for worker in workers]
    assert codes == [0, -9, 0][:size], workers[0].output + workers[1].output

    steps = committed(tmp_path / "run" / "journal.sqlite")
    (tmp_path / "plain").mkdir()
    plain = start_worker(tmp_path / "plain", {"row": name, "steps": steps}, script="row.py")
    assert plain.wait() == 0, plain.output

    assert len(steps) == workers[0].seen["step"] == row.steps
    assert relative_error(workers[0].out, plain.out) <= row.tolerance


def committed(path: Path) -> list[tuple[int, list[list[int]], bool]]:
    """Of each committed step the epoch, the shares, and whether it was tried again.

    The share of a worker that computed a lost one's, too, is divided at the middle: it computed the
    second half later. The ledger is whole.
    """
    with JournalReader(path) as journal:
        assert journal.ledger_faults() == []
        results = [entry.result for entry in journal.chain() if entry.result is not None]
    steps = []
    for result in results:
        shares = [
            [
                place
                for positions in part.positions
                for place in range(positions.start, positions.stop)
            ]
            for part in sorted(result.contributions, key=lambda part: part.rank)
        ]
        if result.attempt and len(shares) == 1:
            middle = -(-len(shares[0]) // 2)
            shares = [shares[0][:middle], shares[0][middle:]]
        steps.append((result.epoch, shares, result.attempt > 0))
    assert [retried for _, _, retried in steps].count(True) == 1
    return steps


def relative_error(ours: Path, theirs: Path) -> float:
    """The greatest difference of a tensor's weights, relative to its norm."""
    mine: dict[str, Any] = load_file(ours.with_suffix(".safetensors"))
    plain: dict[str, Any] = load_file(theirs.with_suffix(".safetensors"))
    assert mine.keys() == plain.keys()
    return max(
        float((mine[name].double() - value.double()).norm() / value.double().norm())
        for name, value in plain.items()
        if torch.is_floating_point(value) and value.norm() > 0
    )
