"""Learning rates: schedulers by name, with warm-up, or from the script's own factory.

The names and their curves are those of transformers' `get_scheduler`: a warm-up from 0, then
`constant`, `linear` to 0, or half a `cosine` to 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from andon.host.logs import LogEvent
from andon.protocol.schedules import LearningRateScaling
from andon_trainer.fit.settings import Fit

__all__ = ["LearningRates", "Scheduler", "make_scheduler", "scale_learning_rates", "steps_of"]

log = logging.getLogger(__name__)

Scheduler = Literal["constant", "linear", "cosine"] | Callable[[Optimizer], LRScheduler]
"""A schedule's name, or a function that gets the optimizer and returns a scheduler."""

_CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda _part: 1.0,
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),
}
"""The rate's factor when a part, from 0 to 1, of what follows the warm-up is over."""


def steps_of(fit: Fit, loader: Any) -> int | None:
    """Number of steps in the whole run; None if the length of the data is not known."""
    if fit.steps is not None:
        return fit.steps
    assert fit.epochs is not None
    length = _length(loader)
    return None if length is None else fit.epochs * length


def _units(fit: Fit, loader: Any) -> int | None:
    """How often the scheduler steps in the whole run; None if that is not known."""
    if fit.scheduler_interval == "step":
        return steps_of(fit, loader)
    if fit.epochs is not None:
        return fit.epochs
    assert fit.steps is not None
    length = _length(loader)
    return None if length is None else -(-fit.steps // length)


def _length(loader: Any) -> int | None:
    """Steps in an epoch; None for an IterableDataset without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def scale_learning_rates(optimizer: Optimizer, fit: Fit, loader: Any) -> None:
    """Multiplies the optimizer's learning rates as `fit.lr_scaling` says, and tells people.

    Args:
        optimizer: as the script made it; no scheduler has seen it yet.
        fit: says how, and for which batch the rates were chosen.
        loader: over the training set; has a batch size if `fit` has none.

    Raises:
        ValueError: the size of a batch is not known.
    """
    if fit.base_batch_size is None:
        return
    batch = fit.batch_size or loader.batch_size
    if batch is None:
        raise ValueError(
            f"lr_scaling={fit.lr_scaling!r} needs the size of a batch, and the batch sampler of "
            "this DataLoader has none: scale the learning rate where the optimizer is made"
        )
    factor = LearningRateScaling(fit.lr_scaling).of(batch / fit.base_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    rates = ", ".join(f"{float(group['lr']):.4g}" for group in optimizer.param_groups)
    text = (
        f"learning rates are times {factor:.4g} ({fit.lr_scaling}), since a batch has {batch} "
        f"samples and they were chosen for {fit.base_batch_size}: {rates}"
    )
    log.info(LogEvent("learning_rates_scaled", text, factor=factor))


def make_scheduler(
    scheduler: Scheduler | None, optimizer: Optimizer, fit: Fit, loader: Any
) -> LRScheduler | None:
    """The scheduler of a run; None if it has none.

    Args:
        scheduler: its name, or the function that makes it.
        optimizer: whose learning rates it sets.
        fit: says how long the warm-up is.
        loader: over the training set; says how long a run of so many epochs is.

    Raises:
        ValueError: there is no such name, the length that a curve needs is not known, or a warm-up
            is asked of a scheduler that is the script's own.
    """
    if scheduler is None or callable(scheduler):
        if fit.warmup_steps or fit.warmup_ratio:
            raise ValueError(
                f"a warm-up belongs to a scheduler by name ({', '.join(_CURVES)}): give one, or "
                "build it into your own scheduler, with SequentialLR, and leave warmup out"
            )
        made = scheduler(optimizer) if scheduler else None
        if isinstance(made, ReduceLROnPlateau) and not fit.evaluate_every:
            raise ValueError(
                "ReduceLROnPlateau follows the evaluation's loss: say when to evaluate, "
                'Fit(evaluate_every="epoch") or a number of steps'
            )
        return made
    if scheduler not in _CURVES:
        raise ValueError(
            f"there is no scheduler {scheduler!r}: give one of {', '.join(_CURVES)}, or a function "
            "that gets the optimizer and returns a scheduler"
        )
    units = _units(fit, loader)
    if units is None and (scheduler != "constant" or fit.warmup_ratio):
        raise ValueError(
            f"the length of this training set is not known, and {scheduler} needs the number of "
            "steps: write Fit(steps=...) instead of epochs"
        )
    warmup = fit.warmup_steps or round(fit.warmup_ratio * (units or 0))
    return LambdaLR(optimizer, _factor(_CURVES[scheduler], warmup, units or 0))


def _factor(curve: Callable[[float], float], warmup: int, units: int) -> Callable[[int], float]:
    """The factor of the learning rate, by how often the scheduler has stepped."""

    def factor(done: int) -> float:
        if done < warmup:
            return done / warmup
        return curve(min(1.0, (done - warmup) / max(1, units - warmup)))

    return factor


class LearningRates:
    """Makes a run's scheduler step when it is due: after steps, epochs or evaluations."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, fit: Fit) -> None:
        """`scheduler`: None if the learning rates stay as they are."""
        self._optimizer, self._scheduler = optimizer, scheduler
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        self._interval = fit.scheduler_interval
        self.of_last_step = 0.0
        """The learning rate of the first group when the last step was made."""

    def after_step(self, *, counts: bool) -> None:
        """Call it once after each `optimizer.step()`; `counts`: of what the scheduler counts."""
        self.of_last_step = float(self._optimizer.param_groups[0]["lr"])
        each_step = not self._plateau and self._interval == "step"
        if self._scheduler is not None and each_step and counts:
            self._scheduler.step()

    def after_epoch(self) -> None:
        """An epoch is over."""
        if self._scheduler is not None and not self._plateau and self._interval == "epoch":
            self._scheduler.step()

    def after_evaluation(self, loss: float) -> None:
        """The validation set's mean loss is known."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
