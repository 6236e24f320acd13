"""`Trainer` on a line of local steps: its scheduler counts what `Fit` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.harness import Service, clean_environment, on_line
from integration.nursery import nursery

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "scripts" / "fit_windows.py"
_PATIENCE_S = 60


def test_a_rate_falls_to_zero_over_the_steps_of_a_fit_and_not_over_the_first_local_steps(
    tmp_path: Path,
) -> None:
    with Service(tmp_path / "run", 1, "--schedule", "local", "--local-steps", "3") as service:
        worker = nursery("trainer").start(
            [str(SCRIPT)], clean_environment(**on_line(service, 0, 1)), tmp_path / "output"
        )
        code = worker.wait(_PATIENCE_S)

    said = worker.output.read_text()
    assert code == 0, said
    # A step of the line is a window here, whose rate is the same in all its local steps.
    rates = [line for line in said.splitlines() if line.startswith("rate")]
    assert rates == ["rate 0.100", "rate 0.075", "rate 0.050", "rate 0.025"]
