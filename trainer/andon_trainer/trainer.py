"""Trainer: a complete training loop, written with `Line` and nothing else.

Reading `Trainer.fit` shows how a loop of one's own is written.
"""

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
    """Settings of one run of `Trainer.fit`.

    ```python
    Fit(batch_size=64, steps=1000, evaluate_every=100, max_grad_norm=1.0)
    ```

    Raises:
        ValueError: `batch_size` or `steps` is below 1, or `precision` is unknown.
    """

    batch_size: int
    """Samples in one step, over all workers."""
    steps: int
    """Steps after which training ends."""
    micro_batch_size: int | None = None
    """The most samples in one forward; None: all of a worker's share."""
    evaluate_every: int = 0
    """Steps between evaluations; there is one at the end, too. 0: none."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0: the environment decides (`ANDON_CHECKPOINT_EVERY`)."""
    max_grad_norm: float | None = None
    """The norm to which averaged gradients are clipped; None: they are not."""
    precision: str = "float32"
    """`float32`, or `bfloat16` by autocast."""
    seed: int = 0
    """Seed of the weights and of the sample order."""
    loader_processes: int = 0
    """Number of processes in which each worker loads samples."""

    def __post_init__(self) -> None:
        """Refuses invalid values."""
        if self.batch_size < 1 or self.steps < 1:
            raise ValueError("batch_size and steps must be at least 1")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(_PRECISIONS)}, not {self.precision}")


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step, for `Callback.on_step`."""

    number: int
    """Number of committed steps, including this one."""
    loss: float
    """Mean loss over all workers, each counted by its weight."""
    samples_per_second: float
    """Of all workers together."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the validation set, the same on all workers."""

    step: int
    """Number of committed steps."""
    loss: float
    """Mean loss over the validation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `Trainer.fit`."""

    steps: int
    """Number of committed steps in the whole run."""
    losses: list[float]
    """Loss of each step that was committed while this worker trained."""
    evaluations: list[Evaluation]
    """Evaluations that this worker took part in."""
    digest: str
    """SHA-256 of the final weights, hexadecimal; the same on all workers."""
    run_dir: Path | None
    """Folder of the run's files; None if the run keeps none."""


class Callback:
    """Base class of what `Trainer` calls as it trains; override what you need.

    ```python
    class Print(Callback):
        def on_step(self, step: Step) -> None:
            print(step.number, step.loss)
    ```

    Every worker calls its own callbacks. An exception ends the worker.
    """

    def on_start(self, line: Line, model: nn.Module) -> None:
        """Training begins: the worker has joined, and `model` has the line's weights."""

    def on_step(self, step: Step) -> None:
        """A step was committed."""

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """The validation set was evaluated."""

    def on_checkpoint(self, folder: Path) -> None:
        """This worker wrote a checkpoint; one worker of the line writes them."""

    def on_halt(self, halt: LineHalted) -> None:
        """The line stopped; `fit` raises `halt` after this."""

    def on_end(self, report: Report) -> None:
        """Training is over, and `fit` returns `report` after this."""


@dataclass(slots=True)
class _Progress:
    """What the report is made of."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    seen: float = field(default_factory=time.perf_counter)
    checkpoint: Path | None = None


class Trainer:
    """Trains one model on one dataset with one optimizer, alone or with other workers.

    ```python
    trainer = Trainer(
        model=lambda: Net(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=lambda: (train_set, val_set),
    )
    report = trainer.fit(Fit(batch_size=64, steps=1000))
    ```
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer],
        loss: Callable[[nn.Module, Any], Loss],
        data: Callable[[], tuple[Dataset[Any], Dataset[Any] | None]],
        **extras: Any,
    ) -> None:
        """Takes functions, each called once in `fit`, after the generators were seeded.

        Args:
            model: returns the model.
            optimizer: gets the model and returns its optimizer.
            loss: gets the model and a batch, called for each micro-batch; returns the mean loss, a
                scalar, or the mean and its weight (the number of terms, such as tokens).
            data: returns the training and the validation set, map-style; the latter may be None.
            extras: `scheduler`, a function that gets the optimizer and returns a scheduler, which
                steps after each committed step; `callbacks`, a sequence of `Callback`.

        Raises:
            TypeError: `extras` has anything else.
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
        """Trains until `fit.steps` steps are committed, alone or on the environment's line.

        A resumed run (`andon run --resume`) goes on after its checkpoint.

        Args:
            fit: the settings of this run.

        Returns:
            Losses, evaluations and the digest of the final weights.

        Raises:
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineHalted: the line stopped and `on_halt` is `raise`; callbacks were called before.
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
        self._call("on_start", line, model)
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
            self._call("on_halt", halt)
            raise
        self._note_checkpoint(line, progress)
        report = Report(
            steps=line.step,
            losses=progress.losses,
            evaluations=progress.evaluations,
            digest=weights_digest([model]).hex(),
            run_dir=line.run_dir,
        )
        self._call("on_end", report)
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
        self._call("on_step", Step(line.step, line.loss, rate))
        self._note_checkpoint(line, progress)

    def _note_checkpoint(self, line: Line, progress: _Progress) -> None:
        # A checkpoint is written between two steps: it is noticed one step later, or at the end.
        if line.last_checkpoint != progress.checkpoint:
            progress.checkpoint = line.last_checkpoint
            self._call("on_checkpoint", line.last_checkpoint)

    @staticmethod
    def _is_due(line: Line, fit: Fit) -> bool:
        every = fit.evaluate_every
        return bool(every) and (line.step % every == 0 or bool(line.stopped))

    def _evaluate(
        self, line: Line, model: nn.Module, loader: Any, fit: Fit, progress: _Progress
    ) -> None:
        total, weights = 0.0, 0.0
        model.eval()
        with torch.no_grad():
            for batch in line.split(loader):
                loss, weight = self._forward(line, model, batch, fit)
                size = samples_in(batch) if weight is None else weight
                total += float(loss) * size
                weights += size
        model.train()
        mean = line.mean(total / weights if weights else 0.0, weight=weights)
        evaluation = Evaluation(line.step, mean)
        progress.evaluations.append(evaluation)
        self._call("on_evaluate", evaluation)

    def _call(self, what: str, *facts: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(*facts)


def samples_in(batch: Any) -> int:
    """The number of samples in a collated batch: the length of its first tensor.

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
    if isinstance(part, Mapping):  # Also a BatchEncoding, which is no dict.
        inner = part.values()
    elif isinstance(part, list | tuple):
        inner = part
    return next((found for each in inner if (found := _first_tensor(each)) is not None), None)
