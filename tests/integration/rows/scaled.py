"""A row of a script with a GradScaler, whose gradients overflow in some steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from integration.rows.features import network, plain_parts
from integration.rows.row import Parts, Row

__all__ = ["SCALED"]

_FAR = 1.9
"""Samples whose first number is above this one have infinite gradients: a few of them."""


class Overflowing(nn.Module):
    """Gradients of some samples are not finite. It notes the scale after each step."""

    scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("scales", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        if (x[:, 0] > _FAR).any():
            out.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]  # torch's own
        return out


def overflowing_parts() -> Parts:
    parts = plain_parts(Overflowing())
    parts.others = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)]
    return parts


def scaled_body(parts: Parts, batch: Any, line: Any) -> None:
    (scaler,) = parts.others
    x, y = batch
    parts.optimizer.zero_grad()
    line.backward(scaler.scale(F.cross_entropy(parts.model(x), y)))
    scaler.unscale_(parts.optimizer)
    nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
    scaler.step(parts.optimizer)
    scaler.update()
    if line.committed:
        scales: Any = parts.model.scales
        scales.copy_(torch.cat([scales[1:], torch.tensor([scaler.get_scale()])]))


SCALED = {"scaler": Row(overflowing_parts, scaled_body, micro_batch_size=3)}
