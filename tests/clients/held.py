"""Runs examples/logistic.py, but holds at each step in HOLD_AT until FOLDER/go-STEP exists.

Each backward takes SLOWED_S seconds more, if that is set. With OVERFLOWS_AT it trains with a
GradScaler, and in those steps its gradients are infinite.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from andon_trainer import Line

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

HOLD_AT = {int(step) for step in os.environ.get("HOLD_AT", "").split(",") if step}
SLOWED_S = float(os.environ.get("SLOWED_S", "0"))
OVERFLOWS_AT = {int(step) for step in os.environ.get("OVERFLOWS_AT", "").split(",") if step}


class ScaledSteps:
    """Makes an optimizer's steps a scaler's, for a script that knows no scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._optimizer, self._scaler, self._step = optimizer, scaler, optimizer.step
        self._inside = False

    def __call__(self) -> None:
        if self._inside:
            self._step()
            return
        self._inside = True
        self._scaler.step(self._optimizer)
        self._inside = False
        self._scaler.update()


class HeldLine(Line):
    """A line whose worker sends nothing of a held step until the test lets it."""

    def prepare(self, *objects: Any, **more: Any) -> Any:
        if not OVERFLOWS_AT:
            return super().prepare(*objects, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        *given, _ = super().prepare(*objects, scaler, **more)
        for each in given:
            if isinstance(each, torch.optim.Optimizer):
                vars(each)["step"] = ScaledSteps(each, scaler)
            elif isinstance(each, torch.nn.Module):
                for part in each.parameters():
                    part.register_hook(self._spoil)  # type: ignore[no-untyped-call]  # torch's own
        return given

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf if self.step + 1 in OVERFLOWS_AT else gradient

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
