"""Runs examples/logistic.py, but holds at each step in HOLD_AT until FOLDER/go-STEP exists.

Each backward takes SLOWED_S seconds more, if that is set.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from andon_trainer import Line

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

HOLD_AT = {int(step) for step in os.environ.get("HOLD_AT", "").split(",") if step}
SLOWED_S = float(os.environ.get("SLOWED_S", "0"))


class HeldLine(Line):
    """A line whose worker sends nothing of a held step until the test lets it."""

    def backward(self, loss: Any, weight: float | None = None, **more: Any) -> None:
        step = self.step + 1
        go = Path(os.environ["FOLDER"]) / f"go-{step}"
        while step in HOLD_AT and not go.exists():
            time.sleep(0.002)
        time.sleep(SLOWED_S)
        super().backward(loss, weight, **more)


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    logistic: Any = importlib.import_module("logistic")
    logistic.Line = HeldLine
    logistic.main()
