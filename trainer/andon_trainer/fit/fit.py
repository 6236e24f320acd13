"""Trainer: a complete training loop, written with `Line` and nothing else.

Reading `Trainer.fit` shows how a loop of one's own is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from andon_trainer.fit.batches import call_model, weighted
from andon_trainer.fit.callbacks import Callback, Report
from andon_trainer.fit.course import Course
from andon_trainer.fit.evaluating import Metric, evaluate
from andon_trainer.fit.handle import TrainingRun
from andon_trainer.fit.loaders import Collate, Data, training_loader, validation_loader
from andon_trainer.fit.progress import ProgressBar
from andon_trainer.fit.schedules import (
    LearningRates,
    Scheduler,
    make_scheduler,
    scale_learning_rates,
    steps_of,
)
from andon_trainer.fit.seeds import WorkerSeeds, seed_everything
from andon_trainer.fit.settings import Fit
from andon_trainer.line.line import Line

__all__ = ["Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
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

    `model`, `optimizer`, `data` and `scheduler` are functions, each called once in every `fit`,
    after the random generators were seeded alike on all workers.
    """

    model: Callable[[], nn.Module]
    """Returns the model."""
    optimizer: Callable[[nn.Module], Optimizer]
    """Gets the model and returns its optimizer."""
    data: Callable[[], tuple[Data, Data | None]]
    """Returns the training and the validation set; the latter may be None. A DataLoader in place of
    a set is taken as it is, with its sampler, batches and `collate_fn`."""
    loss: Callable[[nn.Module, Any], Any] = call_model
    """Gets the model and a batch, called for each micro-batch. Returns the mean loss, a scalar; the
    mean and its weight (the number of terms, such as tokens); or an output that has a `.loss`.
    Default: calls the model with the batch, as models of transformers want it: a mapping by name, a
    sequence in order."""
    collate_fn: Collate | None = None
    """Makes a batch of a list of samples; None: DataLoader's own."""
    scheduler: Scheduler | None = None
    """`constant`, `linear` or `cosine`, with `Fit`'s warm-up; or a function that gets the optimizer
    and returns a scheduler."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What to average over the validation set beside the loss, by name: functions of model and
    batch, or of predictions and targets if there is a `predict`. Each returns a batch's mean, or
    the mean and its weight."""
    predict: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    """Gets the model and a batch; returns predictions and targets for all metrics. None: metrics
    get the model and the batch."""
    callbacks: Sequence[Callback] = ()
    """What is called as the training goes on."""
    inner: Callable[[nn.Module], nn.Module] | None = None
    """What of the model `Fit.save_to` writes: of a wrapper the model inside, `lambda model:
    model.backbone`. None: all of it."""

    def __post_init__(self) -> None:
        """Refuses a metric that would hide the loss."""
        if "loss" in self.metrics:
            raise ValueError("the loss is averaged by itself: give the metric another name")

    def fit(self, fit: Fit) -> Report:
        """Trains for `fit.steps` or `fit.epochs`, alone or on the environment's line.

        A resumed run (`Fit(resume=...)`, `andon run --resume`) goes on after its checkpoint.

        Args:
            fit: the settings of this run.

        Returns:
            Losses, evaluations, and the final weights with their digest.

        Raises:
            ValueError: the settings contradict what the script's functions returned.
            TypeError: `loss` or a metric returned something that has no mean.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineHalted: the line stopped and `on_halt` is `raise`; callbacks were called before.
            JoinRefused, LineLost: as from `Line.prepare`.
        """
        line = Line(
            seed=fit.seed,
            line_options=fit.line_options,
            run_dir=fit.run_dir,
            resume=fit.resume,
            checkpoint_every=fit.checkpoint_every or None,
            total_steps=fit.steps,
        )
        seed_everything(fit.seed)
        training, validation = self.data()
        loader: Any = training_loader(training, fit, self.collate_fn)
        evaluated = validation_loader(validation, fit, loader, self.collate_fn)
        model = self.model()
        optimizer = self.optimizer(model)
        scale_learning_rates(optimizer, fit, loader)
        scheduler = make_scheduler(self.scheduler, optimizer, fit, loader)
        # Switched off for other precisions: `step` is then the optimizer's own.
        scaler = torch.amp.GradScaler(line.device.type, enabled=fit.precision == "float16")
        bar = ProgressBar(steps_of(fit, loader), wanted=fit.progress)
        course = Course(line, fit, [*self.callbacks, bar])
        model, optimizer, scaler, loader, *_ = line.prepare(
            *(model, optimizer, scaler, loader, *([scheduler] if scheduler else [])),
            micro_batch_size=fit.micro_batch_size,
        )
        rates = LearningRates(optimizer, scheduler, fit)
        # With same bits the line seeds each grain, whoever computes it.
        seeds = None if line.same_bits else WorkerSeeds(fit.seed)
        measure = None
        if evaluated is not None:  # A loader over a stream has no truth value.
            measure = partial(self._evaluate, line, model, evaluated, fit)

        with line, bar, course.over(model, rates, measure):
            for epoch in line.epochs(fit.epochs or fit.steps or 0):
                for batch in loader:
                    if seeds is not None:
                        seeds.begin(line.step, line.rank)
                    optimizer.zero_grad()
                    with fit.autocast(line.device):
                        loss, weight = weighted(self.loss(model, batch), "loss")
                    line.backward(loss, weight)
                    if fit.max_grad_norm is not None:
                        scaler.unscale_(optimizer)
                        clip_grad_norm_(model.parameters(), fit.max_grad_norm)
                    scaler.step(optimizer)
                    scaler.update()
                    if not line.overflowed:  # then no weight moved, and no scheduler should
                        # `steps` are the line's: with local steps, windows.
                        rates.after_step(counts=line.committed or fit.steps is None)
                    if line.committed:
                        course.after_step(epoch)
                course.after_epoch(epoch)
            if fit.save_to is not None and line.is_main:
                save_weights(self.inner(model) if self.inner else model, Path(fit.save_to))
            return course.report()

    def start(self, fit: Fit) -> TrainingRun:
        """Trains as `fit` does, in the background of this process; returns at once.

        There is one run at a time in a process. A program that ends while its run trains leaves the
        line after the step, as at a SIGTERM: call `join`.

        Args:
            fit: the settings of this run. Without `progress=True` no progress bar is shown.

        Returns:
            The handle of the run: its metrics, `stop` and `join`.

        Raises:
            RuntimeError: another run trains in this process.
        """
        quiet = replace(fit, progress=bool(fit.progress))
        return TrainingRun(
            lambda watch: replace(self, callbacks=[*self.callbacks, watch]).fit(quiet)
        )

    def _evaluate(
        self, line: Line, model: nn.Module, loader: DataLoader[Any], fit: Fit
    ) -> dict[str, float]:
        """The loss and the metrics of the validation set, by name."""

        def measure(batch: Any) -> dict[str, Any]:
            with fit.autocast(line.device):
                given = self.predict(model, batch) if self.predict else (model, batch)
                metrics = {name: metric(*given) for name, metric in self.metrics.items()}
                return {"loss": self.loss(model, batch), **metrics}

        # With overlap, fragments or a quorum this worker's own are ahead of them.
        with line.common_weights():
            return evaluate(line, model, loader, measure, ("loss", *self.metrics))


def save_weights(model: nn.Module, place: Path) -> None:
    """Writes a model's weights; those who read `place` see the old file or the whole new one.

    Args:
        model: has a `save_pretrained`, or is any other.
        place: a `.safetensors` file; any other name is a folder for `save_pretrained`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix != ".safetensors":
        cast(Any, model).save_pretrained(str(place))
        return
    draft = place.with_name(f".{place.name}.draft")
    save_model(model, str(draft))
    draft.replace(place)
