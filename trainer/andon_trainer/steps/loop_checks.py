"""Checks of the script's loop body: mistakes that would train wrongly, without an error.

`LossCheck` looks at the graph of a loss for a sum where a mean is expected, `UnoptimizedParameters`
at parameters that the script itself moves more often than once a step, `HookedParameters` at hooks
that see no mean, and the functions below at the device and the calls of the loop body.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from andon_trainer.gradients.readings import HostReader, Reader, Reading
from andon_trainer.state.replica import Replica
from andon_trainer.steps.prepared import has_device_map
from andon_trainer.steps.scaling import ScalerGate
from andon_trainer.steps.step_state import StepPhase, StepState

__all__ = [
    "HookedParameters",
    "LossCheck",
    "UnoptimizedParameters",
    "check_device",
    "check_loop_body",
    "is_divided",
    "no_batch_may_be_left_out",
    "step_was_not_called",
]

log = logging.getLogger(__name__)

_LOSSES_CHECKED = 1000
"""Later losses are computed like these."""
_HOOKS_CHECKED = 1000
"""Steps in which parameters are searched for hooks: who sets one sets it early."""
_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}
_OWN_HOOKS = ("andon_trainer.", "torch.nn.parallel.")
_MEAN, _SUM = 1, 2
"""Reductions, as torch numbers them."""
_MOST_NODES = 16


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


def step_was_not_called(state: StepState) -> RuntimeError:
    """The error of a loop body that leaves averaged gradients unused."""
    return RuntimeError(
        f"step {state.assigned.step}: the gradients are averaged, and the loop body ended "
        "without optimizer.step(): call it each time; line.step counts the commits. To accumulate "
        "gradients write `with line.accumulate(k):` around the loop body, or make the loader's "
        "batch k times as large and call line.prepare(..., micro_batch_size=n), in place of "
        "`if i % k`"
    )


def no_batch_may_be_left_out() -> RuntimeError:
    """The error of a loss that can't go backward, where other processes wait for its backward."""
    return RuntimeError(
        "the loss of this batch is not finite, and its weight is 0. Such a batch does not go "
        "backward, and the other processes of this host would wait for it in SyncBatchNorm: for a "
        "batch without targets give line.backward a loss that is 0, such as (outputs * 0).sum()"
    )


class UnoptimizedParameters:
    """Parameters of models and registered objects that no optimizer moves, such as an EMA's.

    A script that updates them in its loop body does so once a micro-batch, and once an attempt,
    where it means once a step. Torch counts the writes to each tensor, so this can be noticed.
    """

    def __init__(self, replica: Replica) -> None:
        """Searches at the first call of `versions`."""
        self._replica = replica
        self._registered = -1
        self._parts: list[tuple[str, nn.Parameter]] = []
        self._warned = False

    def versions(self) -> list[int]:
        """How often each was written to."""
        if len(self._replica.registered) != self._registered:
            self._registered = len(self._replica.registered)
            self._parts = list(self._search())
        return [part._version for _, part in self._parts]

    def check(self, before: list[int], phase: StepPhase, *, committed: bool) -> None:
        """Looks for writes since `before` in a loop body that committed nothing.

        Args:
            before: what `versions` returned before the body.
            phase: of the step that the body was for.
            committed: whether the body committed the line's step.

        Raises:
            RuntimeError: there was one, and the step's next micro-batch would write again. After a
                void attempt, which the script can't foresee, a warning is logged instead.
        """
        now = self.versions()
        if committed or now == before or len(now) != len(before):
            return
        name = next(
            name for (name, _), old, new in zip(self._parts, before, now, strict=True) if old != new
        )
        text = (
            f"{name} was changed in a loop body that committed nothing: an EMA moves once a "
            "step, so write `if line.committed: ema.update_parameters(model)`"
        )
        if phase is not StepPhase.VOID:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            log.warning("%s", text)

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
        }
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


def _hooked_by(part: nn.Parameter) -> str | None:
    """The method by which a hook of the script's was set on a parameter; None: there is none."""
    for register, place in _HOOKS.items():
        hooks = getattr(part, place, None)
        if hooks and not all(
            str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS) for hook in hooks.values()
        ):
            return register
    return None


class LossCheck:
    """Warns, once, of a loss that is not the mean over samples that the line takes it for.

    Workers' losses are averaged by their weights, which are their samples if the script says
    nothing. A sum over the batch, or a mean over some of its targets, then trains for something
    else, and differently with each number of workers. The graph behind the loss shows some of it.
    """

    def __init__(self, reader: Reader | None = None) -> None:
        """Has seen no loss; `reader` brings what a graph holds on a GPU to the host."""
        self._reader = reader or HostReader()
        self._means: list[tuple[Reading, int]] = []
        """Of means over targets: what they were divided by, on its way, and their targets."""
        self._factors: list[Reading] = []
        """What losses were multiplied by, perhaps by a GradScaler; on their way."""
        self._left = _LOSSES_CHECKED
        self._left_for_scale = _LOSSES_CHECKED

    def look_for_scale(self, loss: torch.Tensor) -> None:
        """Warns if a GradScaler has scaled the loss that the line does not know."""
        if self._left_for_scale <= 0:
            return
        self._left_for_scale -= 1
        factor = _factor(loss.grad_fn)
        if factor is not None:
            self._factors.append(self._reader.begin(factor))
            if self._factors[-1].here:
                self._look_at_factors()

    def _look_at_factors(self) -> None:
        factors, self._factors = self._factors, []
        for scale in (factor.number() for factor in factors):
            if scale <= 1 or math.frexp(scale)[0] != 0.5 or self._left_for_scale < 0:
                continue
            self._left_for_scale = -1
            log.warning(
                "the loss was scaled by %g before line.backward saw it, by a GradScaler that was "
                "not prepared: line.loss, the journal and --loss-spike have the scaled one, and "
                "the first overflow halts the line. Pass the scaler with the optimizer: "
                "line.prepare(model, optimizer, scaler, loader)",
                scale,
            )

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Warns if a loss without a weight is a sum, or a mean over some targets only."""
        if self._left <= 0:
            return
        self._left -= 1
        for node, multiplied in _terms(loss):
            if not multiplied and _sums(node, samples):
                self._warn(
                    "the loss is a sum over the batch (reduction='sum', or .sum()), and the line "
                    "averages it as a mean: it trains for the sum divided by the number of workers "
                    "and micro-batches. Give the mean: line.backward(loss / len(batch))"
                )
            elif _is_mean_over_targets(node):
                # Now, since backward frees what the graph has saved.
                total = self._reader.begin(node._saved_total_weight)
                self._means.append((total, node._saved_target.numel()))
                if total.here:
                    self.collect()

    def collect(self) -> None:
        """Looks at the numbers that were on their way, and warns; may wait for them."""
        self._look_at_factors()
        means, self._means = self._means, []
        for total, targets in means:
            partly = _partly(total.number(), targets)
            if partly:
                self._warn(
                    f"the loss is a mean over {partly}, and line.backward was given no weight: "
                    "parts of a batch with few count as much as those with many. Write "
                    "line.backward(loss, weight=...) with what the mean was taken over"
                )

    def _warn(self, text: str) -> None:
        if self._left >= 0:
            self._left = -1
            log.warning("%s; see docs/guide/losses.md", text)


def is_divided(loss: torch.Tensor, by: int) -> bool:
    """Whether a loss is a quotient by this very number, as accumulation by hand needs."""
    node = loss.grad_fn
    divisor = getattr(node, "_saved_other", None)
    if type(node).__name__ != "DivBackward0" or not isinstance(divisor, torch.Tensor):
        return False
    return divisor.numel() == 1 and divisor.device.type == "cpu" and float(divisor) == by


def _terms(loss: torch.Tensor) -> Iterator[tuple[Any, bool]]:
    """The graph nodes that a loss is a sum of, and whether a factor may make each a mean."""
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, multiplied = waiting.pop()
        name = type(node).__name__
        inputs = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
        if name == "AddBackward0":
            waiting += [(each, multiplied) for each in inputs]
        elif name in ("MulBackward0", "DivBackward0") and len(inputs) == 1:
            waiting.append((inputs[0], multiplied or not _enlarges(name, node)))
        else:
            yield node, multiplied


def _enlarges(name: str, node: Any) -> bool:
    """Whether a product is with a number above 1, as a gradient scaler's is."""
    factor = getattr(node, "_saved_other", None)
    if name != "MulBackward0" or not isinstance(factor, torch.Tensor):
        return False
    # A tensor on a GPU is taken for a mean's factor: reading it would wait for the GPU.
    return factor.device.type == "cpu" and float(factor) > 1


def _factor(node: Any) -> torch.Tensor | None:
    """What a loss was multiplied by, if it may be a scale: a float32 scalar."""
    factor = getattr(node, "_saved_other", None)
    if type(node).__name__ != "MulBackward0" or not isinstance(factor, torch.Tensor):
        return None
    # A plain number that a script multiplies by is saved as float64.
    if factor.numel() != 1 or factor.dtype is not torch.float32 or factor.requires_grad:
        return None
    return factor


def _sums(node: Any, samples: int) -> bool:
    """Whether a node sums over the batch."""
    if samples < 2:
        return False  # Sum and mean are the same.
    if type(node).__name__ == "SumBackward0":
        elements = torch.Size(getattr(node, "_saved_self_sym_sizes", ())).numel()
        return elements >= samples and elements % samples == 0
    return bool(getattr(node, "_saved_reduction", _MEAN) == _SUM)


def _is_mean_over_targets(node: Any) -> bool:
    """Whether a node is a cross-entropy's mean."""
    return type(node).__name__.startswith("NllLoss") and node._saved_reduction == _MEAN


def _partly(total: float, targets: int) -> str:
    """What a cross-entropy's mean was taken over, if not over all targets alike; else empty."""
    if abs(total - targets) <= 1e-4 * targets:
        return ""
    if total == int(total):
        return f"{int(total)} of {targets} targets"
    return f"targets of unequal weight ({total:.4g} for {targets})"
