"""Trainer: a training loop that the framework owns, written with `Line` and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from andon_trainer.errors import LineHalted
from andon_trainer.line.line import Line
from andon_trainer.state.weights import weights_digest

__all__ = ["Callback", "Evaluation", "Fit", "Report", "Step", "Trainer", "samples_in"]

Loss = torch.Tensor | tuple[torch.Tensor, float]

_PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one run of `Trainer.fit` does."""

    batch_size: int
    """Samples in one step of the whole line."""
    steps: int
    """Steps after which training ends."""
    micro_batch_size: int | None = None
    """The most samples that one forward holds; None: a worker's whole share."""
    evaluate_every: int = 0
    """Evaluate every so many steps, and at the end; 0 is never."""
    checkpoint_every: int = 0
    """Write a checkpoint every so many steps; 0 is never."""
    max_grad_norm: float | None = None
    """Clip the averaged gradient to this norm; None: don't."""
    precision: str = "float32"
    """`float32`, or `bfloat16` by autocast."""
    seed: int = 0
    """Seeds the weights and the order of the samples."""
    loader_processes: int = 0
    """Processes that load samples, a worker."""

    def __post_init__(self) -> None:
        """Refuses numbers that make no sense."""
        if self.batch_size < 1 or self.steps < 1:
            raise ValueError("batch_size and steps must be at least 1")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(_PRECISIONS)}, not {self.precision}")


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step, as a callback sees it."""

    number: int
    """Steps committed, this one included."""
    loss: float
    """Weighted mean over all workers."""
    samples_per_second: float
    """Of the whole line."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation, the same on all workers."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a fit came to."""

    steps: int
    losses: list[float]
    """Of the steps that this worker saw committed."""
    evaluations: list[Evaluation]
    digest: str
    """SHA-256 of the final weights, in hex: the same on all workers."""
    run_dir: Path | None


class Callback:
    """Told of what happens; override what you need."""

    def on_start(self, line: Line, model: nn.Module) -> None:
        """Training begins."""

    def on_step(self, step: Step) -> None:
        """A step was committed."""

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """The validation set was evaluated."""

    def on_checkpoint(self, folder: Path) -> None:
        """This worker wrote a checkpoint."""

    def on_halt(self, halt: LineHalted) -> None:
        """The line stopped; `fit` raises after this."""

    def on_end(self, report: Report) -> None:
        """Training is over."""


@dataclass(slots=True)
class _Progress:
    """What the report will say."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    seen: float = field(default_factory=time.perf_counter)
    checkpoint: Path | None = None


class Trainer:
    """Trains one model on one dataset with one optimizer."""

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer],
        loss: Callable[[nn.Module, Any], Loss],
        data: Callable[[], tuple[Dataset[Any], Dataset[Any] | None]],
        **extras: Any,
    ) -> None:
        """Takes factories, each called once a process, after seeding.

        Args:
            model: makes the model.
            optimizer: makes the optimizer of a model's parameters.
            loss: from a model and a batch, the mean loss; or the mean and its weight.
            data: the training and the validation set, map-style; the latter may be None.
            extras: `scheduler`, from an optimizer makes a scheduler that steps once a step;
                `callbacks`, a sequence of `Callback`.
        """
        unknown = set(extras) - {"scheduler", "callbacks"}
        if unknown:
            raise TypeError(f"Trainer does not take {', '.join(sorted(unknown))}")
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._data = data
        self._scheduler: Callable[[Optimizer], LRScheduler] | None = extras.get("scheduler")
        self._callbacks: Sequence[Callback] = extras.get("callbacks", ())

    def fit(self, fit: Fit) -> Report:
        """Trains for `fit.steps` steps in all, alone or on the line that the environment names.

        A run that is resumed (`andon run --resume`) goes on after its checkpoint.

        Raises:
            CheckpointRefused: the checkpoint to go on from is damaged, or does not fit.
            LineHalted: the line stopped and `on_halt` is `raise`; callbacks were told.
            JoinRefused, LineLost: as from `Line.prepare`.
        """
        line = Line(
            seed=fit.seed,
            checkpoint_every=fit.checkpoint_every or None,
            total_steps=fit.steps,
        )
        torch.manual_seed(fit.seed)
        train_set, val_set = self._data()
        model = self._model()
        optimizer = self._optimizer(model)
        scheduler = self._scheduler(optimizer) if self._scheduler else None
        loader: Any = DataLoader(
            train_set, fit.batch_size, shuffle=True, num_workers=fit.loader_processes
        )
        prepared = [model, optimizer, loader, *([scheduler] if scheduler else [])]
        model, optimizer, loader, *_ = line.prepare(
            *prepared, micro_batch_size=fit.micro_batch_size
        )
        evaluation_loader = (
            DataLoader(val_set, fit.micro_batch_size or fit.batch_size) if val_set else None
        )
        progress = _Progress()
        self._tell("on_start", line, model)
        try:
            for _epoch in line.epochs(fit.steps):
                for batch in loader:
                    optimizer.zero_grad()
                    loss, weight = self._forward(line, model, batch, fit)
                    line.backward(loss, weight)
                    if fit.max_grad_norm is not None:
                        clip_grad_norm_(model.parameters(), fit.max_grad_norm)
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    if line.committed:
                        self._after_step(line, fit, progress)
                        if evaluation_loader is not None and self._is_due(line, fit):
                            self._evaluate(line, model, evaluation_loader, fit, progress)
        except LineHalted as halt:
            self._tell("on_halt", halt)
            raise
        self._tell_checkpoint(line, progress)
        report = Report(
            steps=line.step,
            losses=progress.losses,
            evaluations=progress.evaluations,
            digest=weights_digest([model]).hex(),
            run_dir=line.run_dir,
        )
        self._tell("on_end", report)
        line.close()
        return report

    def _forward(
        self, line: Line, model: nn.Module, batch: Any, fit: Fit
    ) -> tuple[torch.Tensor, float | None]:
        dtype = _PRECISIONS[fit.precision]
        with torch.autocast(line.device.type, dtype=dtype, enabled=dtype is not None):
            result = self._loss(model, batch)
        return result if isinstance(result, tuple) else (result, None)

    def _after_step(self, line: Line, fit: Fit, progress: _Progress) -> None:
        assert line.loss is not None
        now = time.perf_counter()
        rate = fit.batch_size / max(now - progress.seen, 1e-9)
        progress.seen = now
        progress.losses.append(line.loss)
        self._tell("on_step", Step(line.step, line.loss, rate))
        self._tell_checkpoint(line, progress)

    def _tell_checkpoint(self, line: Line, progress: _Progress) -> None:
        """A checkpoint is written once its step's callbacks are through."""
        if line.last_checkpoint != progress.checkpoint:
            progress.checkpoint = line.last_checkpoint
            self._tell("on_checkpoint", line.last_checkpoint)

    @staticmethod
    def _is_due(line: Line, fit: Fit) -> bool:
        every = fit.evaluate_every
        return bool(every) and (line.step % every == 0 or bool(line.stopped))

    def _evaluate(
        self, line: Line, model: nn.Module, loader: Any, fit: Fit, progress: _Progress
    ) -> None:
        total, mass = 0.0, 0.0
        model.eval()
        with torch.no_grad():
            for batch in line.split(loader):
                loss, weight = self._forward(line, model, batch, fit)
                size = samples_in(batch) if weight is None else weight
                total += float(loss) * size
                mass += size
        model.train()
        mean = line.mean(total / mass if mass else 0.0, weight=mass)
        evaluation = Evaluation(line.step, mean)
        progress.evaluations.append(evaluation)
        self._tell("on_evaluate", evaluation)

    def _tell(self, what: str, *facts: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(*facts)


def samples_in(batch: Any) -> int:
    """How many samples a collated batch holds: the length of its first tensor.

    Raises:
        TypeError: it holds no tensor that has a length.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        raise TypeError(
            f"a {type(batch).__name__} holds no tensor whose length is the number of samples: let "
            "`loss` return (mean, weight)"
        )
    return len(tensor)


def _first_tensor(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return part if part.dim() else None
    inner: Iterable[Any] = ()
    if isinstance(part, Mapping):  # a BatchEncoding is one, and no dict
        inner = part.values()
    elif isinstance(part, list | tuple):
        inner = part
    return next((found for each in inner if (found := _first_tensor(each)) is not None), None)
