"""The loop is written for you: `Trainer` with metrics, a schedule, checkpoints and early stopping.

Run it alone, or with `andon run --workers 2 examples/trainer.py` to the same result. With
`--run-dir runs/mine` a second start goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, random_split

from andon_trainer import Callback, Evaluation, Fit, Trainer


def spirals() -> tuple[Dataset[Any], Dataset[Any]]:
    """Points on three spirals, in a training and a validation set."""
    kind, radius = torch.arange(1200) % 3, torch.rand(1200)
    angle = 4 * radius + kind * (2 * torch.pi / 3) + 0.1 * torch.randn(1200)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    training, validation = random_split(TensorDataset(points, kind), [1000, 200])
    return training, validation


def recall_of_first(predictions: Tensor, kinds: Tensor) -> tuple[Tensor, float]:
    """A metric that is a mean over some of the samples, and how many they are."""
    first = kinds == 0
    return (predictions[first] == 0).float().mean(), float(first.sum())


class Print(Callback):
    """Prints each evaluation. Callbacks run on every worker, and the values are the same."""

    def on_evaluate(self, evaluation: Evaluation) -> None:
        print(f"epoch {evaluation.epoch}: loss {evaluation.loss:.4f}, {evaluation.metrics}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--run-dir", type=Path, help="folder of the run's files")
options = parser.parse_args()
trainer = Trainer(
    model=lambda: nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 3)),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.03),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    data=spirals,
    scheduler="cosine",
    predict=lambda model, batch: (model(batch[0]).argmax(1), batch[1]),
    metrics={
        "accuracy": lambda p, kinds: (p == kinds).float().mean(),
        "recall": recall_of_first,
    },
    callbacks=[Print()],
)
fit = Fit(
    batch_size=100,
    epochs=options.epochs,
    warmup_ratio=0.1,
    max_grad_norm=1.0,
    evaluate_every="epoch",
    patience=10,
    checkpoint_every=20 if options.run_dir else 0,
    run_dir=options.run_dir,
    resume="latest" if options.run_dir else None,
    seed=1,
)
report = trainer.fit(fit)
print(f"step {report.steps}: loss {report.losses[-1]:.6f}")
