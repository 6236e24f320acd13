"""DiLoCo in plain PyTorch and one process: what Andon's local steps are compared with.

Nothing of Andon is in it. Workers are replicas of the model that train one after another: the same
data in the same order, the same division of a window among them, the same inner optimizer and rate.
convergence.py runs it as rows of its own.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from convergence import EVALUATIONS, PlainSpec, WorkerSpec
from convergence_tasks import Drawn, optimizers_of, part_of_rate, set_rate, task_of, unseen_loss
from examples.shared_momentum import SharedMomentum
from torch import nn
from torch.utils.data import default_collate

__all__ = ["train"]


def train(spec: WorkerSpec, plain: PlainSpec) -> dict[str, Any]:
    """Trains all workers; returns what a worker of convergence.py does."""
    task = task_of(spec.task)
    data = Drawn(task, spec.samples, spec.seed)
    torch.manual_seed(spec.seed)
    model = task.model()
    replicas = [copy.deepcopy(model) for _ in range(plain.workers)]
    inner = [optimizers_of(replica, spec) for replica in replicas]
    outer = torch.optim.SGD(
        model.parameters(), lr=plain.rate, momentum=plain.momentum, nesterov=plain.momentum > 0
    )
    part = spec.batch // plain.workers
    curve: list[tuple[int, float]] = []
    momenta = [SharedMomentum(each[0]) for each in inner] if spec.shared_momentum else []
    windows = list(_windows(spec, plain))
    for number, (start, end) in enumerate(windows):
        if number % max(1, len(windows) // EVALUATIONS) == 0:
            curve.append((start, unseen_loss(task, model)))
        share = (end - start) // plain.workers
        for rank, (replica, optimizers) in enumerate(zip(replicas, inner, strict=True)):
            replica.load_state_dict(model.state_dict())
            for step in range(share // part):
                first = start + rank * share + step * part
                x, y, _ = default_collate([data[each] for each in range(first, first + part)])
                set_rate(optimizers, start + step * spec.batch, spec)
                replica.zero_grad()
                torch.autograd.backward(task.loss_of(replica, x, y))
                nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
        _apply(model, replicas, outer)
        for replica, momentum in zip(replicas, momenta, strict=False):
            replica.load_state_dict(model.state_dict())
            momentum.share(share // part)
    curve.append((spec.samples, unseen_loss(task, model)))
    parameters = sum(each.numel() for each in model.parameters())
    return {"curve": curve, "steps": len(windows), "parameters": parameters}


def _windows(spec: WorkerSpec, plain: PlainSpec) -> Iterator[tuple[int, int]]:
    """The first sample of each window, and the one after its last."""
    end = 0
    while end < spec.samples:
        steps = plain.local_steps
        if plain.phases:
            steps = next(steps for until, steps in plain.phases if end < until * spec.samples)
        elif plain.longest is not None:
            steps = round(min(plain.longest, steps / max(part_of_rate(end, spec), 1e-3)))
        start, end = end, min(end + steps * spec.batch, spec.samples)
        yield start, end


@torch.no_grad()
def _apply(model: nn.Module, replicas: list[nn.Module], outer: torch.optim.Optimizer) -> None:
    """Moves the model by the mean change of the replicas; running statistics are averaged."""
    for mine, *others in zip(
        model.parameters(), *(each.parameters() for each in replicas), strict=True
    ):
        mine.grad = mine - torch.stack(others).mean(0)
    outer.step()
    for mine, *others in zip(model.buffers(), *(each.buffers() for each in replicas), strict=True):
        mine.copy_(torch.stack(others).mean(0) if mine.is_floating_point() else others[0])
