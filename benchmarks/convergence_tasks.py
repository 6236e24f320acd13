"""What the benchmark of convergence trains: models, data, their order, and their optimizers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from convergence import WorkerSpec
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples import muon, shakespeare

__all__ = [
    "Drawn",
    "Task",
    "optimizers_of",
    "part_of_rate",
    "schedulers_of",
    "set_rate",
    "task_of",
    "unseen_loss",
]

Sample = tuple[Tensor, Tensor]


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

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._y)

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


def optimizers_of(model: nn.Module, spec: WorkerSpec) -> list[Optimizer]:
    """AdamW; or Muon for the matrices of a GPT's blocks, and AdamW for the rest."""
    if spec.optimizer == "muon":
        assert isinstance(model, shakespeare.GPT)
        return muon.optimizers_of(model, model.blocks, spec.learning_rate)
    return [AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)]


def set_rate(optimizers: Sequence[Optimizer], samples: int, spec: WorkerSpec) -> None:
    """Sets the learning rate for what comes after so many samples of the run."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * part_of_rate(samples, spec)


def schedulers_of(optimizers: Sequence[Optimizer], spec: WorkerSpec) -> list[LambdaLR]:
    """The same rates by a worker's own steps; a line takes these back where it repeats a step."""

    def part(steps: int) -> float:
        return part_of_rate(steps * spec.batch, spec)

    return [LambdaLR(optimizer, part) for optimizer in optimizers]


def part_of_rate(samples: int, spec: WorkerSpec) -> float:
    """The learning rate after so many samples, of the greatest."""
    if not spec.warm_up:
        return 1.0
    done, warm = samples / spec.samples, spec.warm_up
    if done < warm:
        return min((samples + spec.batch) / (warm * spec.samples), 1.0)
    return 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))


@torch.no_grad()
def unseen_loss(task: Task, model: nn.Module) -> float:
    """The loss on samples that nobody trains on."""
    model.eval()
    loss = task.loss_of(model, *task.unseen).item()
    model.train()
    return loss


@cache
def task_of(name: str) -> Task:
    """A task; its data is read once."""
    made = {"digits": _digits, "noisy-digits": _noisy_digits}
    return made[name]() if name in made else _letters(width=int(name.removeprefix("letters-")))


def _letters(width: int) -> Task:
    """The demo's model, smaller, and its plays."""
    text = shakespeare.read_text()
    letters = "".join(sorted(set(text)))
    end = int(len(text) * 0.95)
    pieces = shakespeare.Windows(text[:end], letters)
    rest = shakespeare.Windows(text[end:], letters)
    unseen = [rest[i] for i in range(0, len(rest), max(1, len(rest) // 256))]
    return Task(
        model=lambda: _gpt(len(letters), width),
        loss_of=_next_letters,
        train=pieces,
        train_size=len(pieces),
        unseen=(torch.stack([x for x, _ in unseen]), torch.stack([y for _, y in unseen])),
    )


def _gpt(letters: int, width: int) -> nn.Module:
    """Two blocks, with heads of 16 features. One width at a time in a process."""
    shakespeare.WIDTH, shakespeare.HEADS, shakespeare.LAYERS = width, width // 16, 2
    return shakespeare.GPT(letters)


def _next_letters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Noisy(Dataset[Sample]):
    """Images under noise that is drawn once for each sample, so that none is seen twice."""

    COPIES = 256

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Takes the images without noise."""
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        """The number of samples."""
        return self.COPIES * len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        """An image under its noise, and its label."""
        dice = torch.Generator().manual_seed(index)
        image = self._images[index % len(self._labels)]
        noise = torch.randn(image.shape, generator=dice)
        return image + 0.5 * noise, self._labels[index % len(self._labels)]


def _digits() -> Task:
    """A small CNN with BatchNorm, and scikit-learn's 1797 digits of 8 x 8 pixels."""
    images, labels = _images()
    train = Tensors(images[:_DIGITS], labels[:_DIGITS])
    return _recognition(train, (images[_DIGITS:], labels[_DIGITS:]), nn.BatchNorm2d)


def _noisy_digits() -> Task:
    """The same under noise, so that none is learnt by heart; with GroupNorm.

    Running statistics would travel in float32: in a model as small as this they are most bytes.
    """
    images, labels = _images()
    unseen = Noisy(images[_DIGITS:], labels[_DIGITS:])
    x, y = zip(*(unseen[index] for index in range(24 * len(labels[_DIGITS:]))), strict=True)
    noisy = Noisy(images[:_DIGITS], labels[:_DIGITS])
    return _recognition(noisy, (torch.stack(x), torch.stack(y)), partial(nn.GroupNorm, 4))


_DIGITS = 1440
"""Those to train on."""


def _images() -> Sample:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def _recognition(train: Tensors | Noisy, unseen: Sample, norm: Callable[[int], nn.Module]) -> Task:
    return Task(
        model=lambda: nn.Sequential(*_cnn(norm)),
        loss_of=lambda model, x, y: F.cross_entropy(model(x), y),
        train=train,
        train_size=len(train),
        unseen=unseen,
    )


def _cnn(norm: Callable[[int], nn.Module]) -> Iterator[nn.Module]:
    for inputs, outputs in ((1, 16), (16, 32)):
        yield nn.Conv2d(inputs, outputs, 3, padding=1)
        yield norm(outputs)
        yield nn.ReLU()
        yield nn.MaxPool2d(2)
    yield nn.Flatten()
    yield nn.Linear(32 * 2 * 2, 10)
