"""A small model and its data, for tests of a script that is alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.order import Order
from andon_trainer import Line

SAMPLES, BATCH = 22, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def prepared(
    line: Line, *, micro: int | None = None, lr: float = 0.1
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    return line.prepare(net, optimizer, loader, micro_batch_size=micro)  # type: ignore[no-any-return]  # prepare gives back what it takes


def plain_losses(epochs: int) -> tuple[list[float], nn.Module]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y, _ = data().tensors
    losses = []
    for epoch in range(epochs):
        order = Order(3, epoch, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            rows = torch.from_numpy(order.indices(start, min(start + BATCH, SAMPLES)))
            optimizer.zero_grad()
            loss = F.mse_loss(net(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            losses.append(loss.item())
    return losses, net
