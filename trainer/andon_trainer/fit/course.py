"""The course of a run: what happens around the steps, and what the report says of it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from andon.protocol.limits import MAX_SCALAR_NAME_BYTES
from andon_trainer.errors import LineHalted
from andon_trainer.fit.callbacks import Callback, Epoch, Evaluation, Report, Step
from andon_trainer.fit.schedules import LearningRates
from andon_trainer.fit.settings import Fit
from andon_trainer.line.line import Line
from andon_trainer.state.weights import weights_digest

__all__ = ["BestEvaluation", "Course", "CourseState", "EpochSums"]


class BestEvaluation:
    """The best evaluation of a run. It is in checkpoints, and the same on all workers."""

    def __init__(self, fit: Fit) -> None:
        """There was no evaluation yet."""
        self._name, self._mode = fit.judged_by, fit.best_is
        self.evaluation: Evaluation | None = None

    def take(self, evaluation: Evaluation) -> float:
        """Compares with the best so far; returns the value that is compared.

        Raises:
            ValueError: the evaluation lacks the metric to judge by.
        """
        value = evaluation.value(self._name)
        worst = math.inf if self._mode == "min" else -math.inf
        best = self.evaluation.value(self._name) if self.evaluation else worst
        if value < best if self._mode == "min" else value > best:  # Never of nan.
            self.evaluation = evaluation
        return value

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation."""
        return {"evaluation": asdict(self.evaluation) if self.evaluation else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state that `state_dict` returned."""
        self.evaluation = Evaluation(**state["evaluation"]) if state["evaluation"] else None


@dataclass(slots=True)
class EpochSums:
    """What the committed steps of one epoch came to."""

    number: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0

    def after(self, number: int, loss: float, samples: int, seconds: float) -> EpochSums:
        """The sums with a committed step of epoch `number`; its first one begins them anew."""
        sums = self if number == self.number else EpochSums(number)
        part = loss * samples if samples else 0.0
        return EpochSums(
            number,
            sums.loss_sum + part,
            sums.samples + samples,
            sums.steps + 1,
            sums.seconds + seconds,
        )

    def over(self, number: int, evaluation: Evaluation | None) -> Epoch:
        """What epoch `number` came to."""
        sums = self if self.number == number else EpochSums(number)
        return Epoch(
            number=number,
            loss=sums.loss_sum / sums.samples if sums.samples else math.nan,
            samples=sums.samples,
            steps=sums.steps,
            seconds=sums.seconds,
            evaluation=evaluation,
        )


class CourseState:
    """What a course keeps in checkpoints, and gives to a newcomer.

    So an epoch's sums are right also where a worker joined in the middle, or was started again.
    """

    def __init__(self, best: BestEvaluation) -> None:
        """No step was committed yet."""
        self._best = best
        self.sums = EpochSums()

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation, and the sums."""
        return {**self._best.state_dict(), "epoch": asdict(self.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state that `state_dict` returned, perhaps that of a version without sums."""
        self._best.load_state_dict(state)
        self.sums = EpochSums(**state.get("epoch", {}))


class Course:
    """Evaluates, judges, calls callbacks and notes what happened. Used by one thread.

    Every decision here is made of what is the same on all workers: the number of committed steps,
    the epoch, means over all workers, and registered state. So all workers evaluate after the same
    steps, and end together.
    """

    def __init__(self, line: Line, fit: Fit, callbacks: Sequence[Callback]) -> None:
        """Registers what belongs into checkpoints: the best, and callbacks that have a state."""
        self._line, self._fit, self._callbacks = line, fit, callbacks
        self._best = BestEvaluation(fit)
        self._kept = CourseState(self._best)
        line.register("trainer", self._kept)
        for index, callback in enumerate(callbacks):
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                line.register(f"callback.{index}", callback)
        self._losses: list[float] = []
        self._evaluations: list[Evaluation] = []
        self._checkpoints: list[Path] = []
        self._evaluated_at = -1
        self._seen = 0.0
        """When the last step was noted."""

    def over(
        self,
        model: nn.Module,
        rates: LearningRates,
        measure: Callable[[], dict[str, float]] | None,
    ) -> Self:
        """The worker has joined; the course is a context for the loop.

        Args:
            model: the prepared one.
            rates: step with what happens here.
            measure: evaluates: the loss and the metrics, by name; None: nothing is evaluated.
        """
        self._model, self._rates, self._measure = model, rates, measure
        self._seen = time.perf_counter()
        self._call("on_start", self._line, model)
        return self

    def __enter__(self) -> Self:
        """The course, while the loop runs."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the callbacks of a halt."""
        if isinstance(error, LineHalted):
            self._call("on_halt", error)

    def after_step(self, epoch: int) -> None:
        """A step was committed."""
        line, before = self._line, self._seen
        assert line.loss is not None
        self._seen = time.perf_counter()
        seconds = self._seen - before
        rate = line.step_samples / max(seconds, 1e-9)
        kept = self._kept
        kept.sums = kept.sums.after(line.step_epoch, line.loss, line.step_samples, seconds)
        self._losses.append(line.loss)
        self._call("on_step", Step(line.step, line.loss, rate, self._rates.of_last_step))
        self._note_checkpoint()
        every = self._fit.evaluate_every
        if isinstance(every, int) and every and (line.step % every == 0 or line.stopped):
            self._evaluate(epoch)

    def after_epoch(self, epoch: int) -> None:
        """The loop over an epoch's batches is over: the epoch ended, or the run was stopped."""
        fit, line = self._fit, self._line
        whole = line.epoch > epoch
        last = bool(line.stopped) or epoch + 1 == fit.epochs
        # Once a step: with `evaluate_every=5` the last step of an epoch may have been evaluated.
        if (last or (whole and fit.evaluate_every == "epoch")) and self._evaluated_at != line.step:
            self._evaluate(epoch)
        if whole:
            self._rates.after_epoch()
            here = self._evaluated_at == line.step
            evaluation = self._evaluations[-1] if here else None
            self._call("on_epoch", self._kept.sums.over(epoch, evaluation))

    def _evaluate(self, epoch: int) -> None:
        line = self._line
        if self._measure is None or not self._fit.evaluate_every:
            return
        means = self._measure()
        self._evaluated_at = line.step
        evaluation = Evaluation(line.step, means.pop("loss"), means, epoch)
        self._evaluations.append(evaluation)
        if line.is_main:  # All workers have the same means.
            means = {"loss": evaluation.loss, **evaluation.metrics}
            line.log({_scalar_name(name): value for name, value in means.items()})
        value, fit = self._best.take(evaluation), self._fit
        if fit.keep_best or fit.patience:
            line.best(value, fit.best_is, fit.patience)
        self._rates.after_evaluation(evaluation.loss)
        self._call("on_evaluate", evaluation)

    def report(self) -> Report:
        """What happened; the training is over."""
        self._note_checkpoint()
        report = Report(
            steps=self._line.step,
            losses=self._losses,
            evaluations=self._evaluations,
            digest=weights_digest([self._model]).hex(),
            run_dir=self._line.run_dir,
            epochs=self._line.epoch,
            best=self._best.evaluation,
            checkpoints=self._checkpoints,
            stopped=self._line.stopped or "epochs",
            model=self._model,
        )
        self._call("on_end", report)
        return report

    def _note_checkpoint(self) -> None:
        # One is written beside some steps, and noted after them, or at the end.
        for folder in self._line.checkpoints[len(self._checkpoints) :]:
            self._checkpoints.append(folder)
            self._call("on_checkpoint", folder)

    def _call(self, what: str, *facts: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(*facts)


def _scalar_name(metric: str) -> str:
    """The name that a mean over the validation set is logged under; metrics have any name."""
    return f"val/{re.sub(r'[^A-Za-z0-9_./-]', '_', metric)}"[:MAX_SCALAR_NAME_BYTES]
