"""Gates: an optimizer and a scheduler move only when the line's step is committed.

`optimizer` and `scheduler` stay the objects that the script made; what changes is `step` of these
very instances, as torch's own schedulers do it.

The audit: what moves the weights, and by which gradients.

Theory of operation. Weights are the same on all workers as long as all of them move by the same
averaged gradients, on commits. Three things would move one worker's apart, without a word: a
parameter whose gradient nobody averages, an optimizer that no commit holds back, and a gradient
that comes after the mean (see `late`). The first is looked for when a script prepares, and before
each step among the parameters that were frozen then, or were not there yet. The second is met at
its first step: torch calls a hook before any optimizer's step.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from andon_trainer.gradients.model_layout import ModelPlan, module_prefixes

__all__ = [
    "Audit",
    "Gatekeeper",
    "Trial",
    "gate_optimizer",
    "gate_scheduler",
    "refuse_optimizers",
    "refuse_unprepared",
]


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


def refuse_optimizers(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Looks through what a script prepares.

    Raises:
        ValueError: an optimizer can't work with averaged gradients, or trains a parameter that
            belongs to none of the modules.
    """
    ours = {id(part) for module in modules for part in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, SparseAdam):
            raise ValueError(
                "SparseAdam takes sparse gradients alone, and averages are dense: use Adam, and "
                "nn.Embedding without sparse=True"
            )
        if _needs_closure(optimizer):
            raise ValueError(
                f"{kind} evaluates the loss several times in one step, and a step on the line has "
                "one gradient: use an optimizer whose step() needs no closure, such as AdamW"
            )
        for place, part in _numbered(optimizer):
            if part.requires_grad and part.numel() and id(part) not in ours:
                raise ValueError(
                    f"{place} of the {kind}, of shape {tuple(part.shape)}, belongs to none of the "
                    "prepared models: nobody would average its gradient, and it would train apart "
                    "on every worker. Give the module that holds it to line.prepare, too; a lone "
                    "parameter as nn.ParameterList([parameter])"
                )


class Audit:
    """What may move the weights of one line's models."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Knows the names; `open` begins to look."""
        self._names = {
            id(part): prefix + name
            for prefix, module in zip(module_prefixes(modules), modules, strict=True)
            for name, part in module.named_parameters()
        }
        self._prepared = {id(optimizer) for optimizer in optimizers}
        self._exchanged: set[int] = set()
        self._strangers: dict[int, tuple[int, list[tuple[str, nn.Parameter]]]] = {}
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._moving = False
        self._handle: RemovableHandle | None = None

    def open(self, plan: ModelPlan) -> None:
        """From now on no optimizer but the prepared ones moves what `plan` exchanges."""
        self._exchanged = {id(part) for parameters in plan.parameters for part in parameters}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Looks no more; a second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if `optimizer` would move a parameter by a gradient of this worker's.

        Such parameters were frozen when the script prepared, or came to the optimizer later.
        """
        size = _size(optimizer)
        known, strangers = self._strangers.get(id(optimizer), (-1, []))
        if size != known:
            strangers = [
                (self._names.get(id(part), place), part)
                for place, part in _numbered(optimizer)
                if id(part) not in self._exchanged and part.numel()
            ]
            self._strangers[id(optimizer)] = size, strangers
        for name, part in strangers:
            if part.grad is not None:
                raise RuntimeError(
                    f"{name} has a gradient that nobody averaged, since it was not trained when "
                    f"the script called line.prepare: this {type(optimizer).__name__} would move "
                    "it apart from the other workers'. Prepare with every parameter that will "
                    "ever train, and call requires_grad_(False) after line.prepare on those that "
                    "are to wait"
                )

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A commit is here: what steps now does so for a prepared optimizer."""
        self._moving = True
        try:
            yield
        finally:
            self._moving = False

    def _before_step(
        self, optimizer: Optimizer, _arguments: tuple[Any, ...], _named: dict[str, Any]
    ) -> None:
        size = _size(optimizer)
        if self._moving or self._harmless.get(optimizer) == size:
            return
        for _place, part in _numbered(optimizer):
            if id(part) in self._exchanged:
                self._refuse(optimizer, self._names[id(part)])
        self._harmless[optimizer] = size

    def _refuse(self, optimizer: Optimizer, name: str) -> None:
        kind = type(optimizer).__name__
        if id(optimizer) in self._prepared:
            fact = f"{kind}.step was called past the optimizer's own step(), which waits for the"
            raise RuntimeError(f"{fact} commit: call optimizer.step()")
        raise RuntimeError(
            f"this {kind} was not prepared and moves {name}, which the line trains: it would not "
            "wait for the others. Pass it to line.prepare(model, optimizer, ...), and call its "
            "step() once line.backward(loss) has returned"
        )


def _numbered(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group, content in enumerate(optimizer.param_groups):
        for index, part in enumerate(content["params"]):
            yield f"parameter {index} of group {group}", part


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` can't be called without an argument."""
    try:
        parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):
        return False  # Nothing is known of it; it will say so itself.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    return len(required) > 1  # besides self
