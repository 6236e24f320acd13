"""A Trainer for tests of equal bits: dropout, a schedule, and a metric that weighs its own terms.

Usage: grain_trainer.py SPEC.json OUT.json. It writes the SHA-256 of the weights, the losses, the
evaluations and the epochs. On a line it trains in the background of its process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from andon_trainer import Callback, Epoch, Fit, Trainer


def make_data() -> tuple[TensorDataset, TensorDataset]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(45, 5, generator=draw)
    y = x.sum(1, keepdim=True)
    return TensorDataset(x[:34], y[:34]), TensorDataset(x[34:], y[34:])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def worst(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """A mean that does not weigh each sample alike."""
    errors = (model(batch[0]) - batch[1]).abs()
    return errors.mean(), float((errors > 1).sum())


class Epochs(Callback):
    """Notes what is the same on all workers."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch(self, epoch: Epoch) -> None:
        self.seen.append([epoch.number, epoch.loss, epoch.samples, epoch.steps])


def main() -> None:
    os.environ["ANDON_SAME_BITS"] = "1"
    trainer = Trainer(
        model=net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        data=make_data,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        ),
        metrics={"worst": worst},
        callbacks=[epochs := Epochs()],
    )
    settings = Fit(
        batch_size=10, micro_batch_size=3, steps=9, evaluate_every=2, max_grad_norm=0.5, seed=1
    )
    alone = "ANDON_ADDRESS" not in os.environ
    report = trainer.fit(settings) if alone else trainer.start(settings).join()
    seen = {
        "digest": report.digest,
        "losses": report.losses,
        "evaluations": [asdict(each) for each in report.evaluations],
        "epochs": epochs.seen,
    }
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
