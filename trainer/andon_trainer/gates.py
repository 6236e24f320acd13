"""Gates: an optimizer and a scheduler move only when the line's step is committed.

`optimizer` and `scheduler` stay the objects that the script made; what changes is `step` of these
very instances, as torch's own schedulers do it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from andon_trainer.audit import Audit

__all__ = ["Gatekeeper", "gate_optimizer", "gate_scheduler", "refuse_unprepared"]


class Gatekeeper(Protocol):
    """Who knows where the step stands."""

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` was a commit."""

    def try_commit(self) -> bool:
        """Waits for the present step's commit; whether the weights are to move."""


def gate_optimizer(optimizer: Optimizer, keeper: Gatekeeper, audit: Audit) -> None:
    """Lets `optimizer.step()` move weights once a step, when it is committed."""
    real_step = optimizer.step

    @functools.wraps(real_step)  # keeps the mark by which schedulers know a step they counted
    def step(closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise ValueError(
                "a closure would evaluate the loss again on every worker: call "
                "line.backward(loss), then optimizer.step() without one"
            )
        audit.check(optimizer)
        if not keeper.try_commit():
            return None
        with audit.moving():
            return real_step()

    optimizer.step = step  # type: ignore[method-assign]  # of this instance only


def gate_scheduler(scheduler: LRScheduler, keeper: Gatekeeper) -> None:
    """Lets `scheduler.step()` act only after a committed step."""
    real_step = scheduler.step

    def step(_self: LRScheduler, *arguments: Any, **named: Any) -> None:
        if keeper.committed:
            real_step(*arguments, **named)

    _override_step(scheduler, step)


def refuse_unprepared(optimizers: Collection[Optimizer], prepared: Collection[LRScheduler]) -> None:
    """Makes schedulers of `optimizers` that are not `prepared` raise at their first step.

    They would move on attempts that were never committed, on some workers and not on others.
    """

    def step(*_arguments: Any, **_named: Any) -> NoReturn:
        raise RuntimeError(
            "this scheduler was not prepared: pass it to line.prepare(model, optimizer, "
            "scheduler, loader) with its optimizer"
        )

    known = {id(scheduler) for scheduler in prepared}
    ours = {id(optimizer) for optimizer in optimizers}
    for thing in gc.get_objects():
        # By type: isinstance would wake proxies.
        stranger = issubclass(type(thing), LRScheduler) and id(thing) not in known
        if stranger and id(getattr(thing, "optimizer", None)) in ours:
            _override_step(thing, step)


def _override_step(scheduler: LRScheduler, step: Callable[..., None]) -> None:
    """By a class of its own: `state_dict()` would list an attribute of the instance."""
    kind = type(scheduler)
    scheduler.__class__ = type(
        kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}
    )
