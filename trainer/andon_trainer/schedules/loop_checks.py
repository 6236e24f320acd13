"""Checks of the script's loop body: mistakes that would train wrongly, without an error.

`MovedParameters` looks at parameters that the script itself moves more often than once a step,
`HookedParameters` at hooks that see no mean, `OwnBuffers` at what manual steps make of buffers, and
the functions below at the device and the calls of the loop body. What kind of loss goes backward is
looked at in `loss_check`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from andon_trainer.averaging.held_buffers import PlainBuffers
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.schedules.step_state import StepPhase, StepState
from andon_trainer.script.prepared import has_device_map
from andon_trainer.script.scaling import ScalerGate
from andon_trainer.state.replica import Replica

__all__ = [
    "HookedParameters",
    "MovedParameters",
    "OwnBuffers",
    "check_device",
    "check_loop_body",
    "no_batch",
    "no_batch_may_be_left_out",
    "step_was_not_called",
]

log = logging.getLogger(__name__)

_HOOKS_CHECKED = 1000
"""Steps in which parameters are searched for hooks: who sets one sets it early."""
_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}
_OWN_HOOKS = ("andon_trainer.", "torch.nn.parallel.")


def check_device(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Raises RuntimeError if a model is not on `device`, where its batches and averages are.

    `modules`: those that are to be on a single device.
    """
    for module in modules:
        for parameter in module.parameters():
            here = parameter.device
            if (here.type, here.index or 0) != (device.type, device.index or 0):
                remedy = (
                    'load it with device_map={"": line.device}'
                    if has_device_map(module)
                    else "leave model.cuda() and model.to(...) out after line.prepare, which moves "
                    "it, and the batches; Line(device=...) picks another device"
                )
                raise RuntimeError(
                    f"a prepared model is on {here}, and this worker computes on {device}: {remedy}"
                )
            break  # One parameter is enough: `to` moves them all.


def check_loop_body(state: StepState, scaling: ScalerGate | None = None) -> None:
    """Raises RuntimeError if a loop body ended without a call that belongs into it."""
    if state.waiting:
        raise RuntimeError(
            f"step {state.assigned.step}: the loop body ended without line.backward(loss): "
            "every sample must be counted, so call it for each batch (weight=0 counts none). To "
            "evaluate on the training set iterate line.split(loader)"
        )
    if state.last and state.phase is StepPhase.AVERAGED:
        raise step_was_not_called(state)
    if scaling is not None:
        scaling.check_body()


def no_batch(call: str, *, begun: bool) -> RuntimeError:
    """The error of a call without a batch; `begun`: whether the script iterates its loader."""
    if not begun:
        return RuntimeError(
            f"{call} was called before any batch was taken from the prepared loader: iterate the "
            "one that line.prepare returned, `model, optimizer, loader = line.prepare(model, "
            "optimizer, loader)`, or line.shards, and not the loader that it was given"
        )
    return RuntimeError(
        f"{call} is called once for each batch that the prepared loader yields: there is none now. "
        "Several losses of one batch go backward together, line.backward(loss + other); models "
        "with a loss each, as in a GAN, join by hand, line.join(generator, discriminator), as "
        "docs/guide/several-models.md shows; a batch of another loader can't be trained on"
    )


def step_was_not_called(state: StepState) -> RuntimeError:
    """The error of a loop body that leaves averaged gradients unused."""
    return RuntimeError(
        f"step {state.assigned.step}: the gradients are averaged, and the loop body ended "
        "without optimizer.step(): call it each time, by a prepared optimizer; line.step counts "
        "the commits. To leave a batch out call optimizer.zero_grad() before optimizer.step(), on "
        "all workers alike: then it moves no weight. To accumulate gradients write `with "
        "line.accumulate(k):` around the loop body, or make the loader's batch k times as large "
        "and call line.prepare(..., micro_batch_size=n), in place of `if i % k`"
    )


def no_batch_may_be_left_out() -> RuntimeError:
    """The error of a loss that can't go backward, where other processes wait for its backward."""
    return RuntimeError(
        "the loss of this batch is not finite, and its weight is 0. Such a batch does not go "
        "backward, and the other processes of this host would wait for it in SyncBatchNorm: for a "
        "batch without targets give line.backward a loss that is 0, such as (outputs * 0).sum()"
    )


class MovedParameters:
    """Parameters that the script itself moves, in loop bodies that committed nothing.

    An EMA of models and registered objects then moves once a micro-batch, and once an attempt,
    where the script means once a step. Weights that the line trains move apart: by `p -= lr *
    p.grad`, or by a wrapper around an optimizer. Torch counts the writes to each tensor, so this
    can be noticed.

    A script can't foresee that an attempt is void. There it writes as it does after each
    `optimizer.step()`, for example a clip: what the line trains is put back afterwards.
    """

    def __init__(self, replica: Replica, trained: AccumulatedGradients | None) -> None:
        """Searches at the first call of `begin`.

        Args:
            replica: what is looked at.
            trained: what the line trains; None: it moves with each local step.
        """
        self._replica = replica
        self._trained = set() if trained is None else {id(part) for _, part in trained.named()}
        self._registered = -1
        self._parts: list[tuple[str, nn.Parameter]] = []
        self._before: list[int] = []
        """How often each was written to before the loop body."""
        self._held: dict[int, torch.Tensor] = {}
        """Copies of what the line trains, by id, made where an attempt turned out to be void."""
        self._warned = False

    def begin(self) -> None:
        """A loop body begins."""
        if len(self._replica.registered) != self._registered:
            self._registered = len(self._replica.registered)
            self._parts = list(self._search())
        self._before = self._versions()
        self._held.clear()

    def hold(self) -> None:
        """The attempt is void, and its gradients have freed the memory that copies need."""
        for (_, part), before in zip(self._parts, self._before, strict=True):
            if id(part) in self._trained and part._version == before:
                self._held[id(part)] = part.detach().clone()

    def check(self, phase: StepPhase, *, committed: bool) -> None:
        """Looks for writes in a loop body that committed nothing.

        If the attempt is void, a warning is logged, and weights that were written to since `hold`
        are put back. The same values are no change.

        Args:
            phase: of the step that the body was for.
            committed: whether the body committed the line's step, or the line has sent a state.

        Raises:
            RuntimeError: there was one, and the step's next micro-batch would write again.
        """
        counts = zip(self._parts, self._before, self._versions(), strict=True)
        moved = [part for part, old, new in counts if old != new]
        if phase is StepPhase.VOID and not committed:
            moved = [(name, part) for name, part in moved if not self._is_as_held(part)]
        # Let go of in any case: copies take as much memory as the weights.
        held, self._held = self._held, {}
        if committed or not moved:
            return
        name, part = moved[0]
        text = (
            f"{name} was changed in a loop body that committed nothing: an EMA moves once a "
            "step, so write `if line.committed: ema.update_parameters(model)`"
        )
        if id(part) in self._trained and phase is StepPhase.VOID:
            text = (
                f"{name} was changed by the loop body itself in an attempt that is not committed. "
                "What is written after optimizer.step() was put back; change weights only under "
                "`if line.committed:`"
            )
        elif id(part) in self._trained:
            text = (
                f"{name} was changed by the loop body itself (`p -= lr * p.grad`, or a wrapper "
                "around an optimizer), in a step that is not committed: the workers' weights would "
                "move apart. Let an optimizer of torch do it, such as torch.optim.SGD, give that "
                "to line.prepare, and call its step(); change weights yourself only under `if "
                "line.committed:`, or join by hand, as docs/guide/several-models.md shows"
            )
        if phase is not StepPhase.VOID:
            raise RuntimeError(text)
        with torch.no_grad():
            for _, part in moved:
                if id(part) in held:
                    part.copy_(held[id(part)])
        if not self._warned:
            self._warned = True
            log.warning("%s", text)

    def _versions(self) -> list[int]:
        return [part._version for _, part in self._parts]

    def _is_as_held(self, part: nn.Parameter) -> bool:
        return id(part) in self._held and torch.equal(part, self._held[id(part)])

    def _search(self) -> Iterator[tuple[str, nn.Parameter]]:
        modules = list(self._replica.modules)
        modules += [
            each for each in self._replica.registered.values() if isinstance(each, nn.Module)
        ]
        seen = {
            id(part)
            for optimizer in self._replica.optimizers
            for group in optimizer.param_groups
            for part in group["params"]
        } - self._trained
        for module in modules:
            for name, part in module.named_parameters():
                # Tensors made in inference mode do not count their writes.
                if id(part) not in seen and not part.is_inference():
                    seen.add(id(part))
                    yield name, part


class HookedParameters:
    """Warns, once, of a parameter whose hooks see the gradient of some of the samples only.

    Torch runs them inside backward, where a gradient is this worker's, and one micro-batch's. They
    are not moved to the mean: a hook is also how a script looks at a worker's own gradient.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], averaging: str) -> None:
        """Takes the parameters with their names; `averaging` is the call that averages."""
        self._parameters = list(parameters)
        self._averaging = averaging
        self._left = _HOOKS_CHECKED

    def look(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Searches all parameters, or some of them, for a hook that is not ours."""
        if self._left <= 0:
            return
        self._left -= 1
        wanted = None if parameters is None else {id(part) for part in parameters}
        for name, part in self._parameters:
            register = _hooked_by(part) if wanted is None or id(part) in wanted else None
            if register is not None:
                self._left = 0
                log.warning(
                    "%s has a hook (%s), which sees the gradient of this worker's samples, and of "
                    "one micro-batch: a clamp, a norm or a sign of it is not that of the whole "
                    "batch. Change p.grad between %s and optimizer.step() instead, where it is the "
                    "mean over all workers. A hook that multiplies by a constant, such as a mask, "
                    "may stay; see docs/guide/plain-script.md#hooks-on-parameters",
                    name,
                    register,
                    self._averaging,
                )
                return


class OwnBuffers:
    """Warns, once, of a buffer that changes from step to step, on each worker in its own way.

    By hand the script says what is exchanged, and does not hear in time that a step begins: so
    buffers are neither copied between workers, nor put back before a step is computed again.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Finds the buffers; two commits of several workers are compared."""
        self._buffers = PlainBuffers(modules, lambda _: True)
        self._before: dict[str, torch.Tensor] | None = None
        self.settled = not self._buffers
        """Whether nothing is looked for any more, such as when the script copies rank 0's."""

    def committed(self) -> None:
        """Several workers have committed a step."""
        if self.settled:
            return
        before, self._before = self._before, self._buffers.read()
        if before is None:
            return
        self.settled, self._before = True, None
        if changed := self._buffers.changed(before):
            log.warning(
                "a step changes the buffer %s%s, and each worker keeps its own: after line.join no "
                "buffer is copied, or put back before a step is computed again. Call "
                "line.sync_buffers(model) in each step, or before you evaluate; see "
                "docs/guide/several-models.md#rules",
                changed[0],
                f" and {len(changed) - 1} others" if len(changed) > 1 else "",
            )


def _hooked_by(part: nn.Parameter) -> str | None:
    """The method by which a hook of the script's was set on a parameter; None: there is none."""
    for register, place in _HOOKS.items():
        hooks = getattr(part, place, None)
        if hooks and not all(
            str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS) for hook in hooks.values()
        ):
            return register
    return None
