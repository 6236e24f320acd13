"""Gates: an optimizer and a scheduler move only when the line's step is committed.

`optimizer` and `scheduler` stay the objects that the script made; what changes is `step` of these
very instances, as torch's own schedulers do it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterator
from types import MethodType
from typing import Any, NamedTuple, NoReturn, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from andon_trainer.audit import Audit

__all__ = ["Gatekeeper", "Trial", "gate_optimizer", "gate_scheduler", "refuse_unprepared"]


class Gatekeeper(Protocol):
    """Who knows where the step stands."""

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` was a commit."""

    @property
    def trial(self) -> Trial:
        """What the script computes now; it goes on to the next one with each commit."""

    def try_commit(self) -> bool:
        """Waits for the present step's commit; whether the weights are to move."""


class Trial(NamedTuple):
    """A step as it is tried: the same for all its micro-batches, and for attempts in vain."""

    commits: int
    """Steps that this worker has committed itself."""
    doubts: int
    """Grows when something else may have changed what it computes: a halt, newer weights."""
    world_size: int


def gate_optimizer(optimizer: Optimizer, keeper: Gatekeeper, audit: Audit) -> None:
    """Lets `optimizer.step()` move weights once a step, when it is committed."""
    real_step = optimizer.step
    rates = _Rates(optimizer)

    @functools.wraps(real_step)  # keeps the mark by which schedulers know a step they counted
    def step(_self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise ValueError(
                "a closure would evaluate the loss again on every worker: call "
                "line.backward(loss), then optimizer.step() without one"
            )
        audit.check(optimizer)
        rates.check(keeper.trial)
        if not keeper.try_commit():
            return None
        with audit.moving():
            return real_step()

    # A method, as schedulers expect that are made later.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this instance


class _Rates:
    """The learning rates that one step is tried with: they must not move with each try."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: tuple[Trial, list[Any]] | None = None

    def check(self, trial: Trial) -> None:
        """Raises RuntimeError if they changed since this trial began."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        # A rate that is a tensor may be on a device, and to look at it would wait for that.
        rates = [rate for rate in rates if isinstance(rate, int | float)]
        if self._seen is not None and self._seen[0] == trial and self._seen[1] != rates:
            raise RuntimeError(
                f"the learning rate changed from {self._seen[1]} to {rates} between two "
                "micro-batches, or two attempts, of one step: loop bodies are more than steps. Set "
                "it from line.step, or where line.committed is true; a scheduler goes to "
                "line.prepare(model, optimizer, scheduler, loader)"
            )
        self._seen = trial, rates


def gate_scheduler(scheduler: LRScheduler, keeper: Gatekeeper) -> None:
    """Lets `scheduler.step()` act only after a committed step.

    One that steps once an epoch acts after any commits since it last did: the epoch's last step
    may have been skipped.
    """
    real_step = scheduler.step
    counted = keeper.trial.commits

    def step(_self: LRScheduler, *arguments: Any, **named: Any) -> None:
        nonlocal counted
        commits = keeper.trial.commits
        if keeper.committed or commits > counted:
            counted = commits
            real_step(*arguments, **named)

    _override_step(scheduler, step)


def refuse_unprepared(optimizers: Collection[Optimizer], prepared: Collection[LRScheduler]) -> None:
    """Makes schedulers of `optimizers` that are not `prepared` raise at their first step.

    They would move on attempts that were never committed, on some workers and not on others. Those
    that a prepared one is made of belong to it.
    """

    def step(*_arguments: Any, **_named: Any) -> NoReturn:
        raise RuntimeError(
            "this scheduler was not prepared: make it before line.prepare(model, optimizer, "
            "scheduler, loader), and pass it with its optimizer"
        )

    known = {id(part) for scheduler in prepared for part in _parts(scheduler)}
    ours = {id(optimizer) for optimizer in optimizers}
    for thing in gc.get_objects():
        # By type: isinstance would wake proxies.
        stranger = issubclass(type(thing), LRScheduler) and id(thing) not in known
        if stranger and id(getattr(thing, "optimizer", None)) in ours:
            _override_step(thing, step)


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler and those that it is made of: SequentialLR, ChainedScheduler."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _override_step(scheduler: LRScheduler, step: Callable[..., None]) -> None:
    """By a class of its own: `state_dict()` would list an attribute of the instance."""
    kind = type(scheduler)
    scheduler.__class__ = type(
        kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}
    )
