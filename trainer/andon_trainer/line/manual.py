"""By hand: the calls of `Line` for scripts that say themselves what is exchanged, and when."""

from __future__ import annotations

import math

import torch
from torch import nn

from andon_trainer.line.properties import LineView
from andon_trainer.steps.manual import HandStepper

__all__ = ["ByHand"]


class ByHand(LineView):
    """What `Line` offers to GANs, reinforcement learning, several models and optimizers.

    Calls pair by their order: every worker makes the same ones, in the same order, in each step.
    A step ends with `should_commit`, and what was exchanged in it counts if that says True.
    """

    def join(self, *modules: nn.Module) -> None:
        """Joins the line with modules, in place of `prepare`; nothing is wrapped or gated.

        Their layouts are sent and compared; they are moved to `line.device` and come back with
        rank 0's weights. Optimizers, and whatever else a worker that comes back must have, go
        through `line.register(name, thing)` before it.

        Args:
            modules: every module whose gradients are exchanged.

        Raises:
            RuntimeError: this worker joined already.
            TypeError: something is no module.
            ValueError: nothing is trained, or two modules share a parameter.
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answers.
        """
        for thing in modules:
            if not isinstance(thing, nn.Module):
                raise TypeError(
                    f"line.join takes modules, not {type(thing).__name__}: give an optimizer or a "
                    'scheduler to line.register("name", it)'
                )
        self._join_by_hand(modules)

    def all_reduce_gradients(self, module: nn.Module, weight: float | None = None) -> None:
        """Makes `p.grad` the mean over all workers, for every trained parameter of `module`.

        Args:
            module: one of those that were joined.
            weight: what this worker's mean was taken over, such as samples; 0: it has nothing to
                give, and gets the others' mean. None: all workers count the same.

        Raises:
            ValueError: the weight is negative or not finite, all weights are 0 (gradients are zero
                then), or the module was not joined.
            LineHalted: a value was wrong somewhere; nobody's weights may move.
        """
        given = 1.0 if weight is None else float(weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        self._by_hand.average(module, given)

    def should_commit(self) -> bool:
        """Ends the step: True on all workers or on none; call the optimizers right after True.

        False: a worker was lost, or came. Gradients are gone, `line.rank` and `line.world_size`
        are new: compute the step `line.step + 1` again.

        Raises:
            LineHalted: the line stopped; nobody's weights may move.
        """
        committed = self._by_hand.should_commit()
        self.complete = self.complete or bool(self.stopped)
        return committed

    def sync_buffers(self, module: nn.Module) -> None:
        """Makes every buffer of `module`, of whatever type, rank 0's.

        Raises:
            LineHalted: the line stopped.
        """
        self._by_hand.broadcast("sync_buffers", dict(module.named_buffers()))

    def sync_params(self, module: nn.Module) -> None:
        """Makes every parameter of `module`, trained or frozen, rank 0's.

        Raises:
            LineHalted: the line stopped.
        """
        self._by_hand.broadcast("sync_params", dict(module.named_parameters()))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` rank 0's, in place and bit for bit: any dense type, on any device.

        Raises:
            ValueError: the tensor is sparse or quantised.
            LineHalted: the line stopped, or the workers' tensors differ in type or shape.
        """
        self._by_hand.broadcast("broadcast", {"tensor": tensor})

    def barrier(self) -> None:
        """Returns once every worker has called it, or one was lost.

        Raises:
            LineHalted: the line stopped.
        """
        self._by_hand.barrier()

    @property
    def _by_hand(self) -> HandStepper:
        if self._hand is None:
            raise RuntimeError(
                "this script did not join by hand: call line.join(model, ...) in place of "
                "line.prepare(...), whose loop exchanges gradients by itself"
            )
        return self._hand

    def _join_by_hand(self, modules: tuple[nn.Module, ...]) -> None:
        raise NotImplementedError
