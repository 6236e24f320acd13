"""Detectors: whether a step's loss, or its gradient's norm, is a spike. Off unless asked for.

Theory of operation. A step is judged when its round is complete and before its record is given to
the journal, so a spike moves no weight. What is usual is taken from the last `WINDOW` committed
steps, robustly: their median, and their median absolute deviation (MAD), scaled to estimate a
standard deviation. A value more than `factor` such deviations above the median is a spike:

    limit = median + factor * max(1.4826 * MAD, 0.01 * |median|)

This is the modified z-score of B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers"
(ASQC Basic References in Quality Control, vol. 16, 1993), one-sided; mean and standard deviation
would be dragged along by the very spikes that are looked for. The second term of the maximum is
ours: a loss that has stopped moving must not make every ripple an outlier.

A person who answers RETRY has seen the value: that step passes, once it is whole, whatever it is.
A step that passed belongs to the window like any other, which a median hardly feels.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason, describe_value
from andon_coordinator.core.defects import Defect
from andon_coordinator.core.effects import StepResult
from andon_coordinator.core.round import Round

__all__ = [
    "LEAST_SPREAD",
    "MAD_TO_DEVIATION",
    "WARM_UP",
    "WINDOW",
    "Detectors",
    "Watch",
    "is_spike",
]

WINDOW = 64
"""Committed steps that a baseline is made of."""
WARM_UP = 16
"""With fewer of them nothing is judged."""
MAD_TO_DEVIATION = 1.4826
"""1 / 0.6745: what makes the MAD of normal noise its standard deviation."""
LEAST_SPREAD = 0.01
"""The least deviation, as a part of the median."""


def is_spike(halt: HaltEvidence) -> bool:
    """Whether a detector stopped the line."""
    return halt.reason in (HaltReason.LOSS_SPIKE, HaltReason.GRADIENT_NORM_SPIKE)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was usual: the median of the last `steps`, and a robust standard deviation."""

    median: float
    deviation: float
    steps: int

    def limit(self, factor: float) -> float:
        """Above it is a spike."""
        return self.median + factor * self.deviation


class Watch:
    """One quantity and what it was in the last steps; `factor` None: it is not judged."""

    def __init__(self, name: str, reason: HaltReason, factor: float | None) -> None:
        """Has seen nothing yet."""
        self._name = name
        self._reason = reason
        self._factor = factor
        self._seen: deque[float] = deque(maxlen=WINDOW)

    @property
    def baseline(self) -> Baseline | None:
        """What is usual; None while too little was seen, or if all of it was exactly 0."""
        if len(self._seen) < WARM_UP:
            return None
        median = statistics.median(self._seen)
        mad = statistics.median(abs(value - median) for value in self._seen)
        deviation = max(MAD_TO_DEVIATION * mad, LEAST_SPREAD * abs(median))
        return Baseline(median, deviation, len(self._seen)) if deviation > 0 else None

    def judge(self, value: float | None) -> Defect | None:
        """Whether a step with this value is a spike."""
        baseline = self.baseline
        if self._factor is None or value is None or baseline is None:
            return None
        limit = baseline.limit(self._factor)
        if value <= limit:
            return None
        return Defect(
            reason=self._reason,
            message=f"the {self._name} {value:.6g} is above {limit:.6g}, {self._factor:g} "
            f"deviations over the median {baseline.median:.6g} of the last {baseline.steps} steps",
            value=describe_value(value),
        )

    def note(self, value: float | None) -> None:
        """A step with this value was committed."""
        if value is not None:
            self._seen.append(value)


class Detectors:
    """Judges loss and gradient norm of each step of a line."""

    def __init__(
        self,
        *,
        loss_spike: float | None = None,
        gradient_norm_spike: float | None = None,
        recent: Iterable[StepResult] = (),
        accepted_step: int | None = None,
    ) -> None:
        """Starts where the journal ends.

        Args:
            loss_spike: deviations above the median that a loss may be; None: any.
            gradient_norm_spike: likewise for the norm of the averaged gradient.
            recent: what the last committed steps came to, oldest first.
            accepted_step: the step whose spike a person accepted, if it is not committed yet.
        """
        self._loss = Watch("loss", HaltReason.LOSS_SPIKE, loss_spike)
        self._norm = Watch("gradient norm", HaltReason.GRADIENT_NORM_SPIKE, gradient_norm_spike)
        self._accepted = accepted_step
        for result in recent:
            self._note(result)

    def judge(self, round_: Round) -> Defect | None:
        """Whether a complete round is a spike: of its loss first. Steps without weight are none."""
        if round_.step == self._accepted or round_.weight == 0:
            return None
        return self._loss.judge(round_.loss) or self._norm.judge(round_.gradient_norm)

    def answered(self, halt: HaltEvidence, answer: HaltAnswer) -> None:
        """A person answered: a spike that is to be tried again is accepted.

        Whoever skips leaves the step's samples out, and with them what was accepted.
        """
        if answer is HaltAnswer.SKIP:
            self._accepted = None
        elif answer is HaltAnswer.RETRY and is_spike(halt):
            self._accepted = halt.step

    def committed(self, result: StepResult) -> None:
        """A step is durable: it is part of what is usual, and nothing is accepted any more."""
        self._accepted = None
        self._note(result)

    def _note(self, result: StepResult) -> None:
        if result.weight > 0:
            self._loss.note(result.loss)
            self._norm.note(result.gradient_norm)
