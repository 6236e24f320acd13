"""Spikes: what a line does about one by itself, if nobody is to come.

A detector finds a spike in a complete round, before its record (`detectors`). `--on-spike` says how
far the line may go by itself; each policy includes those before it:

    halt    a person answers (the default)
    limit   the averaged gradient is scaled down to the usual norm, and the step is committed
    skip    the step's samples are left out, and recorded as skipped
    back    the line goes back to a checkpoint, and leaves out what was trained since
    drop    a worker whose gradients alone stand out again and again, or drift, is sent away

What is tried is the least that fits the spike. A spike that stays is no matter of one batch: after
limits in `IN_A_ROW` steps in a row a step's samples are left out, and after so many attempts at it
the weights are at fault. Then the line goes back to the last checkpoint that has proved good: the
step after it was committed, and was no spike. (With a policy that does not go back, limits go on.)
What one worker's gradient does is not in the weights, so nobody goes back for it.

Each action has a budget for a thousand steps: a line that needs more has another problem than
spikes, and halts. All that is decided depends on the steps' reports and on earlier decisions, which
the journal keeps: so a coordinator that starts again decides alike, and the same run decides the
same again.

Sources: A. Chowdhery et al., "PaLM", arXiv:2204.02311, section 5.1, left out batches around some
twenty spikes; A. Kumar et al., "ZClip", arXiv:2504.02507, scales a gradient whose norm is an
outlier down to a usual one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "BUDGETS",
    "IN_A_ROW",
    "STANDS_OUT",
    "Spike",
    "SpikeAction",
    "SpikeBook",
    "SpikeDecision",
]

SPAN = 1000
"""Budgets are for so many steps."""
IN_A_ROW = 3
"""So many steps' samples may be left out without a committed step between: more is no spike."""
DRIFTS_FOR = 64
"""A drift of all may have begun so many steps before it is found."""
STANDS_OUT = 3
"""A worker is dropped when its gradients alone stand out for the so-many-th time in a span."""


class SpikeAction(enum.Enum):
    """What a line does about a spike; in the order of policies."""

    HALT = "halt"
    LIMIT = "limit"
    SKIP = "skip"
    BACK = "back"
    DROP = "drop"


BUDGETS = {
    SpikeAction.LIMIT: 50,
    SpikeAction.SKIP: 20,
    SpikeAction.BACK: 3,
    SpikeAction.DROP: 2,
}
"""How often each may be done within `SPAN` steps."""
_ORDER = list(SpikeAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A value that a detector found."""

    step: int
    """The step that is not committed yet."""
    what: str
    """In words."""
    worker: int | None = None
    """Whose own gradient stands out from the others' of the same step; None: the line's."""
    lasts: bool = False
    """Whether it is a drift: leaving out one step's samples is no remedy."""
    norm: float | None = None
    """The norm of the averaged gradient."""
    usual: float | None = None
    """Its usual norm, if `norm` is a spike, alone or beside the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeDecision:
    """What was done about a spike."""

    step: int
    action: SpikeAction
    what: str
    """The spike, and why this action; in words."""
    worker: int | None = None
    scale: float = 1.0
    """What the averaged gradient is multiplied with: below 1 only for LIMIT."""


class SpikeBook:
    """Decides, and remembers what was decided."""

    def __init__(self, policy: SpikeAction, earlier: Iterable[SpikeDecision] = ()) -> None:
        """Starts with the decisions of earlier coordinators, oldest first."""
        self.policy = policy
        self._made: deque[SpikeDecision] = deque(earlier)

    def decide(
        self, spike: Spike, *, can_limit: bool, can_drop: bool, can_back: bool = False
    ) -> SpikeDecision:
        """What is to be done about a spike; it is noted as done.

        Args:
            spike: what was found.
            can_limit: whether every worker of the round can scale the averaged gradient.
            can_drop: whether the line can go on without the worker.
            can_back: whether there is a checkpoint from before `began` that a worker can load.
        """
        self._forget(spike.step)
        whys = [spike.what]
        for action in self._fitting(spike, can_limit=can_limit, can_drop=can_drop):
            # Once a budget is used up, nothing else that is done to one step helps.
            if not self._includes(action) or (len(whys) > 1 and action is not SpikeAction.BACK):
                continue
            why = self._exhausted(spike, action)
            if not why and action is SpikeAction.BACK and not can_back:
                why = (
                    f"nobody here can load a checkpoint from before step {self.began(spike)}, to "
                    "which the line could go back"
                )
            if not why:
                return self._note(spike, action, "; ".join(whys))
            whys.append(why)
        return self._note(spike, SpikeAction.HALT, "; ".join(whys))

    def began(self, spike: Spike) -> int:
        """The first of the steps in a row that were spikes; of a drift, the earliest it can be."""
        step = spike.step
        if spike.lasts:
            return max(1, step - DRIFTS_FOR)
        limited = {made.step for made in self._since_back() if made.action is SpikeAction.LIMIT}
        while step - 1 in limited:
            step -= 1
        return step

    def left(self, step: int) -> dict[SpikeAction, int]:
        """How often each action that the policy includes may still be done at a step, within the
        `SPAN` steps that end with it; empty if the line halts for each spike."""
        lately = [made.action for made in self._made if made.step > step - SPAN]
        return {
            action: max(0, budget - lately.count(action))
            for action, budget in BUDGETS.items()
            if self._includes(action)
        }

    def _includes(self, action: SpikeAction) -> bool:
        return _ORDER.index(action) <= _ORDER.index(self.policy)

    def _since_back(self) -> list[SpikeDecision]:
        """What was decided in the present history: steps before the line went back are no more."""
        found: list[SpikeDecision] = []
        for made in reversed(self._made):
            if made.action is SpikeAction.BACK:
                break
            found.append(made)
        return found

    def _fitting(self, spike: Spike, *, can_limit: bool, can_drop: bool) -> list[SpikeAction]:
        """The actions that fit a spike, the first choice first."""
        if spike.lasts and spike.worker is None:
            return [SpikeAction.BACK]
        if spike.lasts:
            return [SpikeAction.DROP] if can_drop else []
        if spike.worker is not None:
            # A hard batch makes all gradients large; one worker's alone says that it, or its share,
            # is at fault. Its share once or twice; the third time itself.
            again = self._times_out(spike.worker) + 1 >= STANDS_OUT
            return (
                [SpikeAction.DROP, SpikeAction.SKIP] if again and can_drop else [SpikeAction.SKIP]
            )
        beyond = [SpikeAction.SKIP, SpikeAction.BACK]
        stays = self._includes(SpikeAction.BACK) and spike.step - self.began(spike) >= IN_A_ROW
        if spike.norm is not None and can_limit and spike.usual and not stays:
            return [SpikeAction.LIMIT, *beyond]
        return beyond

    def _exhausted(self, spike: Spike, action: SpikeAction) -> str:
        """Why an action may not be done once more; empty if it may."""
        done = sum(made.action is action for made in self._made)
        if done >= BUDGETS[action]:
            does = "go back" if action is SpikeAction.BACK else action.value
            return f"{done} times in {SPAN} steps the line chose to {does} by itself"
        row = sum(made.action is action and made.step == spike.step for made in self._since_back())
        if action is SpikeAction.SKIP and row >= IN_A_ROW:
            return f"the samples of {row} attempts at this step were left out already"
        return ""

    def _times_out(self, worker: int) -> int:
        """How often a worker's gradients alone stood out lately."""
        return sum(made.worker == worker for made in self._made)

    def _forget(self, step: int) -> None:
        while self._made and self._made[0].step <= step - SPAN:
            self._made.popleft()

    def _note(self, spike: Spike, action: SpikeAction, what: str) -> SpikeDecision:
        scale = 1.0
        if action is SpikeAction.LIMIT:
            assert spike.norm is not None
            assert spike.usual is not None
            scale = spike.usual / spike.norm
            what = f"{what}; the averaged gradient was scaled by {scale:.3g}"
        decision = SpikeDecision(
            step=spike.step, action=action, what=what, worker=spike.worker, scale=scale
        )
        if action is not SpikeAction.HALT:
            self._made.append(decision)
        return decision
