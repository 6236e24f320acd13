"""A script that leaves its loop to `Trainer`, and tells each step's learning rate."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from andon_trainer import Callback, Fit, Trainer
from andon_trainer.fit.callbacks import Step


class _Told(Callback):
    """Writes rates."""

    def on_step(self, step: Step) -> None:
        sys.stdout.write(f"rate {step.learning_rate:.3f}\n")


if __name__ == "__main__":
    torch.manual_seed(1)
    x = torch.randn(96, 4)
    Trainer(
        model=lambda: nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        data=lambda: (TensorDataset(x, x.sum(1, keepdim=True)), None),
        scheduler="linear",
        callbacks=[_Told()],
    ).fit(Fit(steps=4, batch_size=8, progress=False))
