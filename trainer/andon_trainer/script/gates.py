"""Gates: optimizers and schedulers move only when the line's step is committed.

Theory of operation. Weights stay the same on all workers as long as all of them move by the same
averaged gradients, on the same commits. The script keeps its own optimizer and scheduler objects;
their `step` is replaced, on these instances, by one that first asks for the commit. Torch's
schedulers do the same with an optimizer's `step`.

Three things would still move one worker's weights apart from the others', without an error: a
parameter whose gradient is not averaged, an optimizer that no gate holds back, and a gradient that
is added after the mean (see `guards`). The `Audit` looks for the first before each step of a
prepared optimizer, and for the second in a hook that torch calls before any optimizer's step.

A line whose steps take more samples than the script's batch may want a greater learning rate. The
gate then multiplies the rates for the length of one step and puts them back, so that the script and
its schedulers never see it.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from andon_trainer.model.layout import ModelPlan, module_prefixes
from andon_trainer.model.wrappers import named_parameters
from andon_trainer.script.prepared import numbered_parameters
from andon_trainer.script.scaling import ScalerGate

__all__ = [
    "Audit",
    "Gatekeeper",
    "StepIdentity",
    "gate_optimizer",
    "gate_scheduler",
    "refuse_unprepared",
]

log = logging.getLogger(__name__)


class StepIdentity(NamedTuple):
    """Tells one step from the next: equal for all micro-batches and all attempts of a step."""

    commits: int
    """Steps that this worker has committed itself."""
    doubts: int
    """Grows when something else may have changed what the script computes: a halt, new weights."""
    world_size: int


class Gatekeeper(Protocol):
    """Knows the state of the step, and waits for its commit."""

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` moved the weights."""

    @property
    def identity(self) -> StepIdentity:
        """The step that the script computes now."""

    @property
    def moves(self) -> int:
        """Counts the steps that moved the weights."""

    @property
    def plan_steps(self) -> range | None:
        """Which steps of one process the last one stands for, on a line of local steps.

        One process would step on each whole batch of the plan. None: a step is one of those.
        """

    @property
    def learning_rate_scale(self) -> float:
        """What the line multiplies learning rates with in this step."""

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has moved the weights."""


def gate_optimizer(
    optimizer: Optimizer, keeper: Gatekeeper, audit: Audit, scaling: ScalerGate | None = None
) -> Callable[[], None]:
    """Makes `optimizer.step()` move weights once a step, when the step is committed.

    Args:
        optimizer: the script's.
        keeper: waits for the commit.
        audit: looks at the parameters before it.
        scaling: the scaler that must call the step; None: the script does.

    Returns:
        A function that undoes it.
    """
    gate = _OptimizerGate(optimizer, keeper, audit, scaling)
    if scaling is not None:
        scaling.guard(optimizer, gate.check)
    before = vars(optimizer).get("step")

    # `wraps` copies the attribute by which schedulers recognise an optimizer whose steps they
    # count.
    @functools.wraps(optimizer.step)
    def step(_self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        return gate.step(closure)

    # A bound method: schedulers that are made later replace `step.__func__`.
    gated = optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this instance

    def undo() -> None:
        gate.opened = True
        if vars(optimizer).get("step") is gated:
            del vars(optimizer)["step"]
            if before is not None:
                vars(optimizer)["step"] = before

    return undo


class _OptimizerGate:
    """What happens at a prepared optimizer's `step()`."""

    def __init__(
        self, optimizer: Optimizer, keeper: Gatekeeper, audit: Audit, scaling: ScalerGate | None
    ) -> None:
        self._optimizer = optimizer
        self._real_step = optimizer.step
        self._keeper = keeper
        self._audit = audit
        self._scaling = scaling
        self._rates = _LearningRates(optimizer)
        self.opened = False
        """Whether it lets everything pass: a scheduler that was made later wraps, and keeps it."""

    def check(self) -> None:
        """Raises RuntimeError if the step would make the workers' weights differ."""
        self._audit.check(self._optimizer)
        # Once the step is committed, the rates may be those of the next one: a scheduler has moved
        # them, and this optimizer steps after another one.
        if not self._keeper.committed:
            self._rates.check(self._keeper.identity)

    def step(self, closure: Callable[[], float] | None) -> Any:
        """Moves the weights if the step is committed."""
        if self.opened:
            return self._real_step(closure)
        if closure is not None:
            raise ValueError(
                "a closure would evaluate the loss again on every worker: call "
                "line.backward(loss), then optimizer.step() without one"
            )
        if self._scaling is not None:
            self._scaling.reached(self._optimizer)
        # All checks come before the commit: after it the other workers' weights have moved.
        self.check()
        if not self._keeper.try_commit():
            return None
        with self._audit.moving(), self._rates.scaled(self._keeper.learning_rate_scale):
            result = self._real_step()
        self._keeper.stepped(self._optimizer)
        return result


class _LearningRates:
    """The learning rates of one step; they must not change between its micro-batches."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: tuple[StepIdentity, list[Any]] | None = None
        self._told = False
        """Whether the log says that the line scales them."""

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Multiplies them; afterwards they are as before, to the bit."""
        if scale == 1:
            yield
            return
        if not self._told:
            self._told = True
            log.info(
                "the line scales learning rates by the samples of a step: this step of %s is made "
                "with %g times the script's rate",
                type(self._optimizer).__name__,
                scale,
            )
        groups = self._optimizer.param_groups
        numbers = [(group, group["lr"]) for group in groups if _is_number(group.get("lr"))]
        rates = [group.get("lr") for group in groups]
        tensors = {id(rate): rate for rate in rates if isinstance(rate, torch.Tensor)}
        # In place: a captured or compiled step reads the tensor's memory. And each tensor once,
        # since several groups may have the same one.
        copies = [(rate, rate.detach().clone()) for rate in tensors.values()]
        try:
            for group, rate in numbers:
                group["lr"] = rate * scale
            with torch.no_grad():
                for rate in tensors.values():
                    rate.mul_(scale)
            yield
        finally:
            for group, rate in numbers:
                group["lr"] = rate
            with torch.no_grad():
                for rate, before in copies:
                    rate.copy_(before)

    def check(self, step: StepIdentity) -> None:
        """Raises RuntimeError if they changed since the first look in this step."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        # A rate that is a tensor may be on a GPU, and reading it would wait for the GPU.
        rates = [rate for rate in rates if _is_number(rate)]
        if self._seen is not None and self._seen[0] == step and self._seen[1] != rates:
            raise RuntimeError(
                f"the learning rate changed from {self._seen[1]} to {rates} between two "
                "micro-batches, or two attempts, of one step: the loop body runs more often than "
                "steps are committed. Set it from line.step, or where line.committed is true; give "
                "a scheduler to line.prepare(model, optimizer, scheduler, loader)"
            )
        self._seen = step, rates


def _is_number(rate: Any) -> bool:
    """Whether a rate is neither a tensor nor left out."""
    return isinstance(rate, int | float)


def gate_scheduler(scheduler: LRScheduler, keeper: Gatekeeper) -> Callable[[], None]:
    """Makes `scheduler.step()` act only after a committed step; returns what undoes it.

    With local steps a fast worker makes more of them than a slow one. A scheduler that the script
    steps at each of them follows the plan instead, and so has the same rate on all workers.
    """
    real_step = scheduler.step
    counted = keeper.moves
    lead: int | None = None
    """The scheduler's own steps, less the plan's: a script may have made some before."""

    def step(_self: LRScheduler, *arguments: Any, **named: Any) -> None:
        nonlocal counted, lead
        commits = keeper.moves
        # The second condition is for schedulers that step once an epoch. The epoch's last step may
        # have been skipped, so any commit since the scheduler last acted counts.
        if not keeper.committed and commits <= counted:
            return
        at_each, counted = commits == counted + 1, commits
        plan, made = keeper.plan_steps, _steps_made(scheduler)
        if not at_each or plan is None or made is None or arguments or named:
            real_step(*arguments, **named)
            return
        if lead is None:
            lead = made - plan.start
        for _ in range(made, lead + plan.stop):
            real_step()

    return _override_step(scheduler, step)


def _steps_made(scheduler: LRScheduler) -> int | None:
    """How often it was stepped; it is taken back together with the weights. None: unknown."""
    counts = (getattr(each, "last_epoch", None) for each in _parts(scheduler))
    return next((count for count in counts if isinstance(count, int)), None)


def refuse_unprepared(
    optimizers: Collection[Optimizer], prepared: Collection[LRScheduler]
) -> Callable[[], None]:
    """Makes schedulers of `optimizers` that are not `prepared` raise at their first step.

    They would also act on attempts that were never committed, which some workers make and others
    do not. The schedulers that a prepared one consists of are left alone.

    Returns:
        A function that undoes it.
    """

    def step(*_arguments: Any, **_named: Any) -> NoReturn:
        raise RuntimeError(
            "this scheduler was not prepared: make it before line.prepare(model, optimizer, "
            "scheduler, loader), and pass it with its optimizer"
        )

    known = {id(part) for scheduler in prepared for part in _parts(scheduler)}
    ours = {id(optimizer) for optimizer in optimizers}
    undos = []
    # An optimizer does not know its schedulers, so they are searched among all objects.
    for thing in gc.get_objects():
        # By type: isinstance would call `__class__` of lazy proxies, and so load what they stand
        # for.
        stranger = issubclass(type(thing), LRScheduler) and id(thing) not in known
        if stranger and id(getattr(thing, "optimizer", None)) in ours:
            undos.append(_override_step(thing, step))

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler and those that it consists of: SequentialLR, ChainedScheduler."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _override_step(scheduler: LRScheduler, step: Callable[..., None]) -> Callable[[], None]:
    """Replaces `step` by means of a subclass: an attribute would end up in `state_dict()`."""
    kind = type(scheduler)
    ours = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    scheduler.__class__ = ours

    def undo() -> None:
        if type(scheduler) is ours:
            scheduler.__class__ = kind

    return undo


class Audit:
    """Finds what would move the models' weights by anything but averaged gradients."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Notes the parameters' names; `open` begins to look."""
        self._names = {
            id(part): prefix + name
            for prefix, module in zip(module_prefixes(modules), modules, strict=True)
            for name, part in named_parameters(module)
        }
        self._prepared = {id(optimizer) for optimizer in optimizers}
        self._exchanged: set[int] = set()
        self._unexchanged: dict[int, tuple[int, list[tuple[str, nn.Parameter]]]] = {}
        """For each optimizer, its size and the parameters that are not exchanged."""
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Optimizers of other parameters, with their sizes when they were looked at."""
        # Weak references: a script may make many short-lived optimizers, and ids are reused.
        self._moving = False
        self._handle: RemovableHandle | None = None

    def open(self, plan: ModelPlan) -> None:
        """From now on only prepared optimizers may move what `plan` exchanges."""
        self._exchanged = {id(part) for parameters in plan.parameters for part in parameters}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Stops looking; a second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if `optimizer` would move a parameter by a gradient not averaged.

        Such a parameter was frozen when the script prepared, or was added to the optimizer later.
        """
        # Looked up again only when the optimizer's size changed: this runs in every step.
        size = _size(optimizer)
        known, unexchanged = self._unexchanged.get(id(optimizer), (-1, []))
        if size != known:
            unexchanged = [
                (self._names.get(id(part), place), part)
                for place, part in numbered_parameters(optimizer)
                if id(part) not in self._exchanged and part.numel()
            ]
            self._unexchanged[id(optimizer)] = size, unexchanged
        for name, part in unexchanged:
            if part.grad is not None and self._handle is None:
                raise RuntimeError(
                    f"{name} has a gradient, and this worker has not joined the line yet: "
                    "line.prepare was given no DataLoader, and line.shards was not called. Give it "
                    "the loader of the training set, and write line.backward(loss)"
                )
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
        """Around a committed step: optimizers inside a prepared optimizer may step, too."""
        self._moving = True
        try:
            yield
        finally:
            self._moving = False

    def _before_step(
        self, optimizer: Optimizer, _arguments: tuple[Any, ...], _named: dict[str, Any]
    ) -> None:
        """Torch's hook: any optimizer of this process is about to step."""
        size = _size(optimizer)
        if self._moving or self._harmless.get(optimizer) == size:
            return
        for _place, part in numbered_parameters(optimizer):
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


def _size(optimizer: Optimizer) -> int:
    """Number of the optimizer's parameters."""
    return sum(len(group["params"]) for group in optimizer.param_groups)
