"""Detectors: whether a step's loss, or the norm of a gradient, is a spike. Off by default.

Theory of operation. A step is judged when its round is complete and before its record is given to
the journal, so a spike never moves a weight. The baseline is the median of the last `WINDOW`
committed steps, and their median absolute deviation (MAD), scaled to estimate a standard deviation.
A value more than `factor` such deviations above the median is a spike:

    limit = median + factor * max(1.4826 * MAD, 0.01 * |median|)

This is the modified z-score of B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers"
(ASQC Basic References in Quality Control, vol. 16, 1993), one-sided. A mean and a standard
deviation would follow the very spikes that are to be found. The second term of the maximum is ours:
once a loss has stopped moving, not every ripple is an outlier.

One worker's own gradient is compared with those of the others in the same step, and not with the
past: if its norm is more than a factor times the median of theirs, that worker's data, device or
memory is the likely cause, and the halt names it. This is a rule of the seed, whose factor is 10.
If the losses of most workers are spikes, it is the batch or the weights: no worker is named then.

A person who answers RETRY has seen the value and accepts it: that step passes, whatever its value
is when its round is complete again. A step that passed is part of the window like any other; a
median hardly changes with it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason, describe_value
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.step_results import StepResult

__all__ = [
    "LEAST_SPREAD",
    "MAD_TO_DEVIATION",
    "WARM_UP",
    "WINDOW",
    "Detectors",
    "SpikeDetector",
    "in_norms",
    "is_spike",
]

WINDOW = 64
"""How many committed steps the baseline is taken from."""
WARM_UP = 16
"""With fewer steps than this, nothing is judged."""
MAD_TO_DEVIATION = 1.4826
"""1 / 0.6745: the ratio of the standard deviation of normal noise to its MAD."""
LEAST_SPREAD = 0.01
"""The smallest deviation, as a fraction of the median."""


def is_spike(halt: HaltEvidence) -> bool:
    """Whether a detector stopped the line."""
    return halt.reason in (HaltReason.LOSS_SPIKE, HaltReason.GRADIENT_NORM_SPIKE)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The median of the last `steps` committed steps, and a robust standard deviation."""

    median: float
    deviation: float
    steps: int

    def limit(self, factor: float) -> float:
        """The limit above which a value is a spike."""
        return self.median + factor * self.deviation


class SpikeDetector:
    """Judges one quantity by its values in the last steps; `factor` None: it is not judged."""

    def __init__(self, name: str, reason: HaltReason, factor: float | None) -> None:
        """Starts without a baseline."""
        self._name = name
        self._reason = reason
        self._factor = factor
        self._seen: deque[float] = deque(maxlen=WINDOW)

    @property
    def baseline(self) -> Baseline | None:
        """What is usual; None after too few steps, or if all values were exactly 0."""
        if len(self._seen) < WARM_UP:
            return None
        median = statistics.median(self._seen)
        mad = statistics.median(abs(value - median) for value in self._seen)
        deviation = max(MAD_TO_DEVIATION * mad, LEAST_SPREAD * abs(median))
        return Baseline(median, deviation, len(self._seen)) if deviation > 0 else None

    def judge(self, value: float | None) -> LineDefect | None:
        """Whether a step with this value is a spike."""
        if self._factor is None or value is None:
            return None
        baseline = self.baseline
        if baseline is None:
            return None
        limit = baseline.limit(self._factor)
        if value <= limit:
            return None
        return LineDefect(
            reason=self._reason,
            message=f"the {self._name} {value:.6g} is above {limit:.6g}, {self._factor:g} "
            f"deviations over the median {baseline.median:.6g} of the last {baseline.steps} steps",
            value=describe_value(value),
        )

    def note(self, value: float | None) -> None:
        """Notes the value of a committed step."""
        # The window slides: the oldest value drops out by itself.
        if value is not None:
            self._seen.append(value)


def in_norms(norms: Mapping[int, float], factor: float) -> LineDefect | None:
    """The worker whose own norm is more than `factor` times the median of the others'.

    Args:
        norms: by worker, of those that contributed to one step.
        factor: above 0.
    """
    if len(norms) < 2:
        return None
    worker = max(norms, key=lambda each: norms[each])
    usual = statistics.median(norm for each, norm in norms.items() if each != worker)
    # Where the others have no gradient at all, no factor means anything.
    if usual == 0 or norms[worker] <= factor * usual:
        return None
    norm = norms[worker]
    return LineDefect(
        reason=HaltReason.GRADIENT_NORM_SPIKE,
        message=f"worker {worker}'s own gradient has the norm {norm:.6g}, more than {factor:g} "
        f"times the median of the others', which is {usual:.6g}: look at its data, its device "
        "and its memory",
        worker=worker,
        value=describe_value(norm),
    )


class Detectors:
    """Judges loss and gradient norms of each step of a line."""

    def __init__(
        self,
        *,
        loss_spike: float | None = None,
        gradient_norm_spike: float | None = None,
        worker_gradient_norm: float | None = None,
        recent: Iterable[StepResult] = (),
        accepted_step: int | None = None,
    ) -> None:
        """Starts where the journal ends.

        Args:
            loss_spike: deviations above the median that a loss may be; None: any.
            gradient_norm_spike: likewise for the norm of the averaged gradient.
            worker_gradient_norm: how many times the others' median a worker's own norm may be;
                None: any number.
            recent: the results of the last committed steps, oldest first.
            accepted_step: the step whose spike a person accepted, if it is not committed yet.
        """
        self._loss = SpikeDetector("loss", HaltReason.LOSS_SPIKE, loss_spike)
        self._norm = SpikeDetector(
            "gradient norm", HaltReason.GRADIENT_NORM_SPIKE, gradient_norm_spike
        )
        self._worker_factor = worker_gradient_norm
        self._accepted = accepted_step
        # Oldest first, as they were committed: the window drops the oldest.
        for result in recent:
            self._note(result)

    def judge(self, round_: StepRound) -> LineDefect | None:
        """The spike in a complete round; None if there is none.

        One worker's gradient comes first: it explains a spike of the whole line.
        """
        if self._judges_nothing(round_):
            return None
        return (
            self._judge_workers(round_)
            or self._loss.judge(round_.loss)
            or self._norm.judge(round_.gradient_norm)
        )

    def judge_most(self, round_: StepRound) -> LineDefect | None:
        """The spike of a loss that most workers have: then nobody's own value says anything."""
        if self._judges_nothing(round_):
            return None
        losses = [
            ready.loss_sum / ready.weight for _, ready in round_.in_rank_order if ready.weight
        ]
        most = self._loss.judge(statistics.median_low(losses))
        return self._loss.judge(round_.loss) if most is not None else None

    def accepts(self, round_: StepRound) -> bool:
        """Whether a person has seen what a round's step is, and accepts it."""
        return round_.terms.step == self._accepted

    def usual_norm(self, round_: StepRound) -> float | None:
        """The usual norm of the averaged gradient, if that of a round is a spike; else None."""
        baseline = self._norm.baseline
        if baseline is None or self._norm.judge(round_.gradient_norm) is None:
            return None
        return baseline.median

    def answered(self, halt: HaltEvidence, answer: HaltAnswer) -> None:
        """A person answered a halt: RETRY accepts the spike."""
        if answer is HaltAnswer.SKIP:
            # The next try at this step has other samples, whose loss nobody has seen.
            self._accepted = None
        elif answer is HaltAnswer.RETRY and is_spike(halt):
            self._accepted = halt.step

    def committed(self, result: StepResult) -> None:
        """A step is durable: it joins the baseline, and an accepted spike is done with."""
        self._accepted = None
        self._note(result)

    def _judges_nothing(self, round_: StepRound) -> bool:
        # Without weight there is no loss: all workers abstained.
        return self.accepts(round_) or round_.weight == 0

    def _judge_workers(self, round_: StepRound) -> LineDefect | None:
        if self._worker_factor is None:
            return None
        norms = {
            worker: ready.own_gradient_norm
            for worker, ready in round_.in_rank_order
            # What an overflow left of a gradient says nothing about the worker.
            if ready.weight > 0 and ready.own_gradient_norm is not None and not ready.overflow
        }
        return in_norms(norms, self._worker_factor)

    def _note(self, result: StepResult) -> None:
        if result.weight > 0:
            self._loss.note(result.loss)
            self._norm.note(result.gradient_norm)
