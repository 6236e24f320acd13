"""A worker of the benchmark of convergence: it trains a small model, and tells its loss."""

from __future__ import annotations

import json
import sys
from typing import Any

import plain_diloco
import torch
from convergence import EVALUATIONS, PlainSpec, WorkerSpec
from convergence_tasks import Drawn, optimizers_of, schedulers_of, task_of, unseen_loss
from examples.shared_momentum import SharedMomentum
from extra_work import ExtraWork
from torch import nn
from torch.utils.data import DataLoader

from andon_trainer import Line
from andon_trainer.averaging.feedback import Residuals

COMMIT = Residuals.commit
"""What a worker does with the loss of an encoding; a process trains with it and without."""


def work(spec: WorkerSpec) -> dict[str, Any]:
    """Trains; returns the loss on unseen data after some numbers of samples, if it is rank 0's."""
    torch.set_num_threads(1)
    if spec.plain is not None:
        return plain_diloco.train(spec, PlainSpec(**spec.plain))
    torch.manual_seed(spec.seed)
    Residuals.commit = COMMIT if spec.feedback else Residuals.discard  # type: ignore[method-assign]  # an ablation
    task = task_of(spec.task)
    model = task.model()
    extra = ExtraWork(task.model(), task.loss_of)
    optimizers = optimizers_of(model, spec)
    line = Line(address=spec.address or None, run_id=spec.run_id or None)
    loader = DataLoader(Drawn(task, spec.samples, spec.seed), batch_size=spec.batch)
    made = line.prepare(model, *optimizers, *schedulers_of(optimizers, spec), loader)
    model, *prepared, loader = made
    optimizers, schedulers = prepared[: len(optimizers)], prepared[len(optimizers) :]
    momentum = SharedMomentum(optimizers[0]) if spec.shared_momentum else None
    curve: list[tuple[int, float]] = []
    marks = iter(range(0, spec.samples, max(1, spec.samples // EVALUATIONS)))
    mark, committed = next(marks), True
    for _ in line.epochs(1):
        for x, y, positions in loader:
            # After a commit, rank 0's first position is the number of samples so far.
            if committed and line.is_main and int(positions[0]) >= mark:
                curve.append((int(positions[0]), unseen_loss(task, model)))
                mark = next((each for each in marks if each > positions[0]), spec.samples)
            extra.do(spec.factor, x, y)
            model.zero_grad()
            line.backward(task.loss_of(model, x, y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            committed = line.committed
            if momentum is not None and committed:
                with line.common_weights():
                    momentum.share(line.local_steps)
    curve.append((spec.samples, unseen_loss(task, model)))
    told = {
        "curve": curve if line.is_main else [],
        "steps": line.step,
        "parameters": sum(part.numel() for part in model.parameters()),
    }
    line.close()
    return told


if __name__ == "__main__":
    for given in sys.stdin:
        print(json.dumps(work(WorkerSpec(**json.loads(given)))), flush=True)
