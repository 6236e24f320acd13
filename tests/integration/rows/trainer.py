"""The row of a script that leaves its loop to `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from andon_trainer import Callback, Fit, Line, Trainer
from integration.rows.features import plain_body, plain_parts
from integration.rows.row import Parts, Row, Vectors

__all__ = ["TRAINER"]


class _Joined(Callback):
    """Calls a function once the worker has joined."""

    def __init__(self, joined: Callable[[nn.Module, Any], None]) -> None:
        self._joined = joined

    def on_start(self, line: Line, model: nn.Module) -> None:
        self._joined(model, line)


def by_trainer(parts: Parts, steps: int, joined: Callable[[nn.Module, Any], None]) -> int:
    """It evaluates every other step, also beside a worker that has just been lost."""
    trainer = Trainer(
        model=lambda: parts.model,
        optimizer=lambda model: parts.optimizer,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=lambda: (parts.loader, Vectors(9)),
        metrics={
            "right": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean()
        },
        callbacks=[_Joined(joined)],
    )
    report = trainer.fit(Fit(steps=steps, evaluate_every=2, max_grad_norm=1.0))
    assert [each.step for each in report.evaluations] == list(range(2, steps + 1, 2))
    return report.steps


TRAINER = {"trainer": Row(plain_parts, plain_body, fit=by_trainer)}
