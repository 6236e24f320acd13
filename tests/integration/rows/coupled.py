"""Rows of losses that couple samples, which lie on several workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from integration.rows.row import CLASSES, WIDTH, Parts, Row, Vectors, loader_of

__all__ = ["COUPLED"]


class Contrastive(nn.Module):
    """Two encoders, the temperature that is learned beside them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = (F.normalize(encoder(x), dim=1) for encoder in self.encoders)
        return one, other


def contrastive_parts() -> Parts:
    model = Contrastive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # The last batch of an epoch has one sample: other workers compute on a borrowed one.
    return Parts(model, optimizer, loader_of(Vectors(57)))


def contrastive_body(parts: Parts, batch: Any, line: Any) -> None:
    """InfoNCE of all samples, with labels, beside a loss that is a mean over samples."""
    x, y = batch
    model: Any = parts.model
    one, other = model(x)
    ones, others, labels = line.gather((one, other, y))
    scores = ones @ others.T * model.scale.exp()
    alike = labels[:, None] == labels[None]
    loss = F.cross_entropy(scores, torch.arange(len(scores)))
    loss = loss - 0.3 * scores.log_softmax(1)[alike].mean()
    parts.optimizer.zero_grad()
    line.backward(loss + 0.5 * F.cross_entropy(model.head(one), y))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    parts.optimizer.step()


COUPLED = {"coupled samples": Row(contrastive_parts, contrastive_body)}
