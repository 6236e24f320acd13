"""Callbacks, and what they are told: steps, epochs, evaluations, the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from andon_trainer.errors import LineHalted
from andon_trainer.line.line import Line

__all__ = ["Callback", "Epoch", "Evaluation", "Report", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step, for `Callback.on_step`."""

    number: int
    """Number of committed steps, including this one."""
    loss: float
    """Mean loss over all workers, each counted by its weight."""
    samples_per_second: float
    """Of all workers together."""
    learning_rate: float = 0.0
    """The first parameter group's, with which this step was made."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the validation set, the same on all workers."""

    step: int
    """Number of committed steps."""
    loss: float
    """Mean loss over the validation set."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics' means over the validation set, by name."""
    epoch: int = 0
    """The epoch, from 0, after or in which it was made."""

    def value(self, name: str) -> float:
        """The loss, or the metric of this name.

        Raises:
            ValueError: there is no such metric.
        """
        if name == "loss":
            return self.loss
        if name not in self.metrics:
            known = ", ".join(("loss", *self.metrics))
            raise ValueError(f"the evaluation has no {name}: keep_best is one of {known}")
        return self.metrics[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch that is over, for `Callback.on_epoch`.

    It counts the committed steps of all workers, and no other: also those that this worker was not
    there for, or made before it was started again. Samples that an operator left out do not count.
    """

    number: int
    """The epoch, from 0."""
    loss: float
    """Mean loss of its steps, each counted by its samples; NaN if it had no step. The same on all
    workers."""
    samples: int
    """Samples of its steps, of all workers together; the same on all workers."""
    steps: int
    """Number of its committed steps; the same on all workers."""
    seconds: float
    """What its steps took, with what callbacks and evaluations between them took, by the clock of
    this worker, or of the one whose state it goes on from."""
    evaluation: Evaluation | None = None
    """The evaluation at its end; None if there was none."""


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
    epochs: int = 0
    """Number of whole epochs in the run."""
    best: Evaluation | None = None
    """The best of `evaluations`; None if there was none."""
    checkpoints: list[Path] = field(default_factory=list)
    """Folders of the checkpoints that this worker wrote, oldest first; some may be gone since."""
    stopped: str = ""
    """Why training ended: `steps`, `epochs`, or the reason that was given to `line.stop`."""
    model: nn.Module | None = None
    """The trained model; what `Trainer.model` returned, with the final weights."""


class Callback:
    """Base class of what `Trainer` calls as it trains; override what you need.

    ```python
    class Print(Callback):
        def on_step(self, step: Step) -> None:
            print(step.number, step.loss)
    ```

    Every worker calls its own callbacks. An exception ends the worker. A callback that wants to end
    the training keeps the `line` of `on_start`, and calls `line.stop(reason)`. One that has
    `state_dict` and `load_state_dict` is part of checkpoints, and of what a newcomer receives.
    """

    def on_start(self, line: Line, model: nn.Module) -> None:
        """Training begins: the worker has joined. The line's weights come with the first batch."""

    def on_step(self, step: Step) -> None:
        """A step was committed."""

    def on_epoch(self, epoch: Epoch) -> None:
        """An epoch is over, and evaluated if it was due."""

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """The validation set was evaluated."""

    def on_checkpoint(self, folder: Path) -> None:
        """This worker wrote a checkpoint; one worker of the line writes them."""

    def on_halt(self, halt: LineHalted) -> None:
        """The line stopped; `fit` raises `halt` after this."""

    def on_end(self, report: Report) -> None:
        """Training is over, and `fit` returns `report` after this."""
