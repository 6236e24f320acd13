"""A worker of the benchmark of convergence: it trains a small model, and tells its loss."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from convergence import EVALUATIONS, WorkerSpec
from extra_work import ExtraWork
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from andon_trainer import Line
from andon_trainer.averaging.feedback import Residuals

Sample = tuple[Tensor, Tensor]

COMMIT = Residuals.commit
"""What a worker does with the loss of an encoding; a process trains with it and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained: a model, and the data to learn and not to learn from."""

    model: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
    train: Dataset[Sample]
    train_size: int
    unseen: Sample


class Tensors(Dataset[Sample]):
    """Samples in memory."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        """Takes the samples, and the answers in the same order."""
        self._x, self._y = x, y

    def __getitem__(self, index: int) -> Sample:
        """A sample and its answer."""
        return self._x[index], self._y[index]


class Drawn(Dataset[tuple[Tensor, Tensor, int]]):
    """A fixed order of a task's samples, epoch after epoch; a number is a position of the run.

    It is the same for all schedules, so each has seen the same samples at the same position.
    """

    def __init__(self, task: Task, samples: int, seed: int) -> None:
        """Draws `samples` of the task's samples."""
        dice = torch.Generator().manual_seed(seed)
        epochs = range(-(-samples // task.train_size))
        orders = [torch.randperm(task.train_size, generator=dice) for _ in epochs]
        self._drawn = torch.cat(orders)[:samples]
        self._task = task

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._drawn)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        """A sample, and its position."""
        x, y = self._task.train[int(self._drawn[index])]
        return x, y, index


def work(spec: WorkerSpec) -> dict[str, Any]:
    """Trains; returns the loss on unseen data after some numbers of samples, if it is rank 0's."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    Residuals.commit = COMMIT if spec.feedback else Residuals.discard  # type: ignore[method-assign]  # an ablation
    task = task_of(spec.task)
    model = task.model()
    extra = ExtraWork(task.model(), task.loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    line = Line(address=spec.address or None, run_id=spec.run_id or None)
    loader = DataLoader(Drawn(task, spec.samples, spec.seed), batch_size=spec.batch)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    curve: list[tuple[int, float]] = []
    marks = iter(range(0, spec.samples, max(1, spec.samples // EVALUATIONS)))
    mark, committed = next(marks), True
    for _ in line.epochs(1):
        for x, y, positions in loader:
            # After a commit, rank 0's first position is the number of samples so far.
            if committed and line.is_main and int(positions[0]) >= mark:
                curve.append((int(positions[0]), _unseen_loss(task, model)))
                mark = next((each for each in marks if each > positions[0]), spec.samples)
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * rate_at(int(positions[0]), spec)
            extra.do(spec.factor, x, y)
            optimizer.zero_grad()
            line.backward(task.loss_of(model, x, y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            committed = line.committed
    curve.append((spec.samples, _unseen_loss(task, model)))
    told = {
        "curve": curve if line.is_main else [],
        "steps": line.step,
        "parameters": sum(part.numel() for part in model.parameters()),
    }
    line.close()
    return told


def rate_at(position: int, spec: WorkerSpec) -> float:
    """The learning rate at a position of the run, as part of its greatest."""
    if not spec.warm_up:
        return 1.0
    done = position / spec.samples
    if done < spec.warm_up:
        return (position + spec.batch) / (spec.warm_up * spec.samples + spec.batch)
    return 0.5 * (1 + math.cos(math.pi * (done - spec.warm_up) / (1 - spec.warm_up)))


@torch.no_grad()
def _unseen_loss(task: Task, model: nn.Module) -> float:
    model.eval()
    loss = task.loss_of(model, *task.unseen).item()
    model.train()
    return loss


# The tasks


@cache
def task_of(name: str) -> Task:
    """A task; its data is read once."""
    return _letters() if name == "letters" else _digits()


def _letters() -> Task:
    """The demo's model, smaller, and its plays."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from examples import shakespeare

    shakespeare.WIDTH, shakespeare.LAYERS = 64, 2
    text = shakespeare.read_text()
    letters = "".join(sorted(set(text)))
    end = int(len(text) * 0.95)
    pieces = shakespeare.Windows(text[:end], letters)
    rest = shakespeare.Windows(text[end:], letters)
    unseen = [rest[i] for i in range(0, len(rest), max(1, len(rest) // 256))]
    return Task(
        model=lambda: shakespeare.GPT(len(letters)),
        loss_of=_next_letters,
        train=pieces,
        train_size=len(pieces),
        unseen=(torch.stack([x for x, _ in unseen]), torch.stack([y for _, y in unseen])),
    )


def _next_letters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _digits() -> Task:
    """A small CNN with BatchNorm, and scikit-learn's 1797 digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, rest = order[:1440], order[1440:]
    return Task(
        model=lambda: nn.Sequential(*_cnn()),
        loss_of=lambda model, x, y: F.cross_entropy(model(x), y),
        train=Tensors(images[train], labels[train]),
        train_size=len(train),
        unseen=(images[rest], labels[rest]),
    )


def _cnn() -> Iterator[nn.Module]:
    for inputs, outputs in ((1, 16), (16, 32)):
        yield nn.Conv2d(inputs, outputs, 3, padding=1)
        yield nn.BatchNorm2d(outputs)
        yield nn.ReLU()
        yield nn.MaxPool2d(2)
    yield nn.Flatten()
    yield nn.Linear(32 * 2 * 2, 10)


if __name__ == "__main__":
    for given in sys.stdin:
        print(json.dumps(work(WorkerSpec(**json.loads(given)))), flush=True)
