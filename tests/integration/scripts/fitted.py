"""A worker whose loop `Trainer` owns, for tests of equal bits.

Usage: fitted.py SPEC.json OUT.json. It writes the report: losses, evaluations, digest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from andon_trainer import Fit, Trainer


def spirals() -> tuple[TensorDataset, TensorDataset]:
    """Points of three kinds: 45 to train with, and 20 to evaluate."""
    points = torch.randn(65, 2)
    kinds = (points.sum(1) > 0).long() + (points[:, 0] > 1)
    return TensorDataset(points[:45], kinds[:45]), TensorDataset(points[45:], kinds[45:])


def recall(predicted: Tensor, kinds: Tensor) -> tuple[Tensor, float]:
    """A mean over some of the samples, and how many they are."""
    first = kinds == 0
    return (predicted[first] == 0).float().mean(), float(first.sum())


def main() -> None:
    trainer = Trainer(
        model=lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.03),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=spirals,
        scheduler="cosine",
        predict=lambda model, batch: (model(batch[0]).argmax(1), batch[1]),
        metrics={"recall": recall},
    )
    settings: dict[str, Any] = {"evaluate_every": "epoch", "max_grad_norm": 1.0, "progress": False}
    report = trainer.fit(Fit(batch_size=20, micro_batch_size=3, epochs=3, seed=1, **settings))
    evaluations = [[each.loss, each.metrics] for each in report.evaluations]
    seen = {"losses": report.losses, "evaluations": evaluations, "digest": report.digest}
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
