"""Scaling: the script's GradScaler acts on averaged gradients only, and once a step.

Theory of operation. A GradScaler looks whether gradients overflowed, where its `unscale_` or `step`
divides them by the scale, and lowers or raises the scale in `update`. On a line that must be one
decision of all workers. It is the commit: it says whether any worker's gradients overflowed. So the
first of `unscale_` and `step` waits for the commit, as `optimizer.step` does without a scaler, and
if the step overflowed an infinity is put into each optimizer's gradients. Torch then finds it on
every worker alike, skips the optimizer, and lowers the scale; no rule of the scaler is written
anew.

In all other loop bodies there is nothing to unscale: before a step's last micro-batch, in a void
round, or if nobody had a weight. There `unscale_`, `step` and `update` do nothing.

On a schedule of local steps the scaler is the worker's own, as its optimizer is: nothing is put
into gradients, and a local step that the scaler skips is a local step that changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from andon_trainer.averaging.loss_scale import LossScale

__all__ = ["ScalerGate", "ScalingKeeper", "refuse_scaler"]

_METHODS = ("scale", "unscale_", "step", "update")


class ScalingKeeper(Protocol):
    """Knows the state of the step, and waits for its commit."""

    @property
    def overflowed(self) -> bool:
        """Whether the commit said that scaled gradients overflowed."""

    def has_gradients(self) -> bool:
        """Whether `p.grad` is what optimizers are to step by now; may wait for the commit."""

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has moved the weights."""


def refuse_scaler(scaler: torch.amp.GradScaler, modules: list[nn.Module]) -> None:
    """Raises ValueError if a scaler could not unscale the modules' gradients.

    Torch finds that out at the first step, when the other workers' weights have moved.
    """
    own = type(scaler)._unscale_grads_ is not torch.amp.GradScaler._unscale_grads_
    if not scaler.is_enabled() or own:
        return
    for module in modules:
        for name, part in module.named_parameters():
            if part.requires_grad and part.dtype is torch.float16:
                raise ValueError(
                    f"{name} is float16, and a GradScaler can't unscale float16 gradients: leave "
                    "model.half() out, keep the weights in float32, and put forward and loss into "
                    "`with torch.autocast(line.device.type, dtype=torch.float16):`"
                )


class ScalerGate:
    """Gates one scaler's methods, on this instance."""

    def __init__(self, scale: LossScale) -> None:
        """Changes nothing yet."""
        self.loss_scale = scale
        self._scaler = scale.scaler
        self._checks: dict[int, Callable[[], None]] = {}
        """What must hold before a prepared optimizer's commit, by the optimizer's id."""
        self._stepped: dict[int, bool] = {}
        """Optimizers whose gradients were unscaled since the last update, and whether they stepped.
        """
        self._inside: Optimizer | None = None
        """The optimizer of the `scaler.step` that runs now."""
        self._reached = False
        """Whether that came to the optimizer's own step."""
        self._keeper: ScalingKeeper | None = None
        self._real: dict[str, Callable[..., Any]] = {}
        """The scaler's own methods."""
        self._undo: list[Callable[[], None]] = []

    def guard(self, optimizer: Optimizer, check: Callable[[], None]) -> None:
        """`check` must pass before the scaler waits for the commit of a prepared optimizer's step.

        It raises RuntimeError otherwise.
        """
        self._checks[id(optimizer)] = check

    def open(self, keeper: ScalingKeeper) -> None:
        """Gates the methods; does nothing for a scaler that is switched off."""
        if not self.loss_scale.enabled:
            return
        self._keeper = keeper
        gates = (self.loss_scale.scale, self._unscale, self._step, self._update)
        for name, gate in zip(_METHODS, gates, strict=True):
            self._replace(name, gate)

    def _unscale(self, optimizer: Optimizer) -> None:
        """In the place of `scaler.unscale_`."""
        if self._may_unscale(optimizer):
            self._real["unscale_"](optimizer)

    def _step(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        """In the place of `scaler.step`."""
        if id(optimizer) in self._checks and (arguments or named.get("closure") is not None):
            raise ValueError(
                "a closure would evaluate the loss again on every worker: call "
                "line.backward(loss), then scaler.step(optimizer) without one"
            )
        if not self._may_unscale(optimizer):
            self._require_keeper().try_commit()  # It ends a local step on borrowed samples.
            return None
        self._inside, self._reached = optimizer, False
        before = _with_state(optimizer)
        try:
            result = self._real["step"](optimizer, *arguments, **named)
        finally:
            self._inside = None
        _forget_unwritten(optimizer, before)
        self._stepped[id(optimizer)] = True
        keeper = self._require_keeper()
        if id(optimizer) in self._checks and not self._reached and keeper.try_commit():
            keeper.stepped(optimizer)  # A local step that was skipped is made.
        return result

    def _update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """In the place of `scaler.update`."""
        if self._stepped:
            self._stepped.clear()
            self._real["update"](new_scale)

    def close(self) -> None:
        """Gives the scaler its own methods back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._checks.clear()
        self._stepped.clear()

    def reached(self, optimizer: Optimizer) -> None:
        """A prepared optimizer's own `step` was called.

        Raises:
            RuntimeError: it was not the scaler that called it, so its gradients are scaled.
        """
        if not self.loss_scale.enabled:
            return
        if self._inside is not optimizer:
            raise RuntimeError(
                "the loss is scaled by the prepared GradScaler, and its gradients are, too: call "
                "scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
            )
        self._reached = True

    def check_body(self) -> None:
        """Checks, once a loop body is over, that the scaler was called as torch needs it.

        Raises:
            RuntimeError: a committed step's gradients were unscaled and not stepped with, or the
                scale was not updated after it.
        """
        stepped, self._stepped = self._stepped, {}
        if not all(stepped.values()):
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called, and the loop body ended without "
                "scaler.step(optimizer), which must follow in each loop body: the other workers' "
                "weights have moved"
            )
        if stepped:
            raise RuntimeError(
                "the loop body ended without scaler.update() after scaler.step(optimizer): call "
                "it in each loop body; where there is nothing to update it does nothing"
            )

    def _may_unscale(self, optimizer: Optimizer) -> bool:
        """Whether the scaler may go on with an optimizer; waits for the commit if it is missing."""
        check, known = self._checks.get(id(optimizer)), id(optimizer) in self._stepped
        if check is None:
            # Not prepared. If it moves what the line trains, the audit refuses its step.
            self._stepped.setdefault(id(optimizer), True)
            return True
        # All checks come before the commit: after it the other workers' weights have moved.
        check()
        keeper = self._require_keeper()
        if not keeper.has_gradients():
            return False
        if keeper.overflowed and not known and not _plant(optimizer):
            return False
        self._stepped.setdefault(id(optimizer), False)
        return True

    def _require_keeper(self) -> ScalingKeeper:
        assert self._keeper is not None, "open before use"
        return self._keeper

    def _replace(self, name: str, method: Any) -> None:
        self._real[name] = getattr(self._scaler, name)
        own = vars(self._scaler)
        before = own.get(name)
        own[name] = method

        def undo() -> None:
            if own.get(name) is method:
                del own[name]
                if before is not None:
                    own[name] = before

        self._undo.append(undo)


def _with_state(optimizer: Optimizer) -> set[torch.Tensor]:
    """The parameters for which an optimizer remembers anything."""
    return {
        part
        for part, state in optimizer.state.items()
        if any(value is not None for value in state.values())
    }


def _forget_unwritten(optimizer: Optimizer, before: set[torch.Tensor]) -> None:
    """Forgets what a step has made, if it was skipped; `before` had state already.

    Torch's fused SGD takes memory for its momentum before it skips the step that would have written
    it. What lies there would be the next step's momentum.
    """
    made = _with_state(optimizer) - before
    if made and not _is_finite(optimizer):
        for part in made:
            del optimizer.state[part]


def _is_finite(optimizer: Optimizer) -> bool:
    """Whether all of an optimizer's gradients are."""
    return all(
        bool(torch.isfinite(part.grad).all())
        for group in optimizer.param_groups
        for part in group["params"]
        if part.grad is not None
    )


def _plant(optimizer: Optimizer) -> bool:
    """Puts an infinity into an optimizer's gradients; False if it has none."""
    for group in optimizer.param_groups:
        for part in group["params"]:
            if part.grad is not None and part.grad.numel():
                with torch.no_grad():
                    part.grad.fill_(torch.inf)
                return True
    return False
