"""Rows of the features that belong to a loop and its model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from integration.rows.row import CLASSES, WIDTH, Parts, PlainLine, Row, Vectors, loader_of

__all__ = ["FEATURES"]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, **options)


def plain_parts(model: nn.Module | None = None) -> Parts:
    model = model or network()
    return Parts(model, sgd(model), loader_of(Vectors()))


def plain_body(parts: Parts, batch: Any, line: Any) -> None:
    x, y = batch
    parts.optimizer.zero_grad()
    line.backward(F.cross_entropy(parts.model(x), y))
    nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
    parts.optimizer.step()


def weighted_body(parts: Parts, batch: Any, line: Any) -> None:
    """A mean over some of the targets, as over tokens that are no padding."""
    x, y = batch
    counted = y != 0
    loss = F.cross_entropy(parts.model(x)[counted], y[counted]) if counted.any() else x.sum() * 0
    if not loss.requires_grad:
        loss = sum((part.sum() * 0 for part in parts.model.parameters()), loss)
    parts.optimizer.zero_grad()
    line.backward(loss, weight=int(counted.sum()))
    parts.optimizer.step()


def freezing_body(parts: Parts, batch: Any, line: Any) -> None:
    """The first layer is frozen at first, and thawed after some steps."""
    frozen = line.step < 4
    for part in parts.model[0].parameters():  # type: ignore[index]  # a Sequential
        part.requires_grad_(not frozen)
    plain_body(parts, batch, line)


class Checkpointed(nn.Module):
    """Computes its activations again in backward, one layer in each of the two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.inner)  # type: ignore[call-overload]  # a Sequential
        x = layers[1](layers[0](x))
        x = checkpoint(layers[2], x, use_reentrant=False)
        x = checkpoint(layers[3], x, use_reentrant=True)
        out: torch.Tensor = layers[4](x)
        return out


class Queue(nn.Module):
    """Subtracts what it remembers of the last batches, as MoCo's queue and VQ's codes do."""

    last: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 16))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x - 0.1 * self.last.mean(0)
        self.last.data[int(self.at) % 3] = x.detach().mean(0)
        self.at += 1
        return out


def normalized() -> nn.Module:
    """A model with running statistics, and with buffers of other kinds."""
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 16)),
        Queue(),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, CLASSES),
    )


def normalized_plainly(parts: Parts, batches: list[Any], _retried: bool) -> None:
    """Each share's forward begins with the same buffers; after the step they are rank 0's."""
    samples = sum(len(y) for _, y in batches)
    parts.optimizer.zero_grad()
    buffers = list(parts.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    of_rank_0: list[torch.Tensor] = []
    for x, y in batches:
        torch._foreach_copy_(buffers, before)
        (F.cross_entropy(parts.model(x), y) * len(y) / samples).backward()  # type: ignore[no-untyped-call]
        of_rank_0 = of_rank_0 or [buffer.clone() for buffer in buffers]
    torch._foreach_copy_(buffers, of_rank_0)
    nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
    parts.optimizer.step()


def accumulated_plainly(parts: Parts, batches: list[Any], retried: bool) -> None:
    """Three batches, or the rest of an epoch, are one step on their union."""
    union, waiting = zip(*batches, strict=True), parts.others
    waiting.append(tuple(torch.cat(each) for each in union))
    if len(waiting) == 3 or len(waiting[-1][1]) < 8:
        x, y = (torch.cat(each) for each in zip(*waiting, strict=True))
        plain_body(parts, (x, y), PlainLine())
        waiting.clear()


def adapter_body(parts: Parts, batch: Any, line: Any) -> None:
    """Without a norm: torch has none of a sparse gradient, which the plain run has."""
    x, y = batch
    parts.optimizer.zero_grad()
    line.backward(F.cross_entropy(parts.model(x), y))
    parts.optimizer.step()


class Compiled(nn.Module):
    """A part of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.inner.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Adapted(nn.Module):
    """An adapter on a frozen layer, a sparse embedding, and a layer that is checkpointed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2**WIDTH, 16, sparse=True)
        self.frozen = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.shared = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        word = ((x > 0) * 2 ** torch.arange(WIDTH)).sum(1)
        x = self.frozen(x) + self.up(self.down(x)) + self.embedding(word)
        for _ in range(2):
            x = checkpoint(self.shared, torch.tanh(x), use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


FEATURES = {
    "accumulation": Row(
        plain_parts,
        plain_body,
        around=lambda line: line.accumulate(3),
        plain=accumulated_plainly,
    ),
    "micro-batches": Row(plain_parts, plain_body, micro_batch_size=3),
    "token weights": Row(plain_parts, weighted_body, micro_batch_size=2),
    "frozen parameters": Row(plain_parts, freezing_body),
    "checkpointed activations": Row(lambda: plain_parts(Checkpointed()), plain_body),
    "batch norm": Row(lambda: plain_parts(normalized()), plain_body, plain=normalized_plainly),
    "adapter": Row(lambda: plain_parts(Adapted()), adapter_body),
    "compiled": Row(lambda: plain_parts(Compiled()), plain_body),
}
