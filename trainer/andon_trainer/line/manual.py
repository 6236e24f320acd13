"""Manual steps: the calls of `Line` for scripts that say themselves what is exchanged, and when."""

from __future__ import annotations

import math

import torch
from torch import nn

from andon_trainer.line.properties import LineProperties
from andon_trainer.model.wrappers import named_parameters, plain_name, unwrapped
from andon_trainer.schedules.manual import SYNC_BUFFERS, ManualStepper

__all__ = ["ManualSteps"]


class ManualSteps(LineProperties):
    """What `Line` offers to GANs, reinforcement learning, several models and optimizers.

    Calls are matched by their order, not by name: in each step every worker makes the same calls
    in the same order. A step ends with `should_commit`; what was exchanged in it counts only if
    that returns True.
    """

    def join(self, *modules: nn.Module) -> None:
        """Joins the line with `modules`, for manual steps; use it instead of `prepare`.

        The workers' models are compared, the modules are moved to `line.device`, and they get rank
        0's weights. Nothing is wrapped, and optimizers step whenever the script calls them. Before
        `join`, register optimizers and whatever else a checkpoint or a new worker needs, with
        `line.register(name, thing)`.

        ```python
        line.register("optimizer", optimizer)
        line.join(generator, discriminator)
        ```

        Args:
            modules: every module whose gradients are exchanged.

        Raises:
            RuntimeError: `prepare` or `join` was called before.
            TypeError: an argument is not a module.
            ValueError: no parameter is trained, or two modules share a parameter.
            JoinRefused: the line does not accept this worker.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineLost: no coordinator answers.
        """
        for thing in modules:
            if not isinstance(thing, nn.Module):
                raise TypeError(
                    f"line.join takes modules, not {type(thing).__name__}: give an optimizer or a "
                    'scheduler to line.register("name", it)'
                )
        self._join_for_manual_steps(modules)

    def all_reduce_gradients(self, module: nn.Module, weight: float | None = None) -> None:
        """Replaces `p.grad` by the mean over all workers, for every trained parameter of `module`.

        Call it after the last backward that reaches the module.

        Args:
            module: one of the joined modules.
            weight: this worker's weight in the mean, such as its number of samples; finite, at
                least 0. With 0 the worker contributes nothing and gets the others' mean. None: all
                workers weigh the same.

        Raises:
            ValueError: the weight is negative or not finite, all workers' weights are 0 (gradients
                are zero then), or the module was not joined.
            RuntimeError: a GradScaler scales the script's losses.
            LineHalted: a value was not finite on some worker; no weights moved.
        """
        given = 1.0 if weight is None else float(weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        self._manual_steps.average(module, given)

    def should_commit(self) -> bool:
        """Ends the step; returns True on all workers or on none.

        If it is True, call the optimizers' `step()` right away. If it is False, the roster changed:
        `p.grad` is None, `line.rank` and `line.world_size` are new, and the script computes step
        `line.step + 1` again. It is also False if the run ended before the step could: then
        `line.complete` is True.

        ```python
        if line.should_commit():
            optimizer.step()
        ```

        Raises:
            RuntimeError: a gradient was added after its mean was taken.
            RunOver: the script goes on though `line.complete` is True.
            LineHalted: the line stopped; no weights moved.
        """
        committed = self._manual_steps.should_commit()
        self.complete = self.complete or bool(self.stopped)
        return committed

    def sync_buffers(self, module: nn.Module) -> None:
        """Copies rank 0's buffers of `module`, of any dtype, to all workers.

        Raises:
            LineHalted: the line stopped, or the workers' buffers differ in name, dtype or shape.
        """
        buffers = unwrapped(module).named_buffers()
        named = {plain_name(name): buffer for name, buffer in buffers}
        self._manual_steps.broadcast(SYNC_BUFFERS, named)

    def sync_params(self, module: nn.Module) -> None:
        """Copies rank 0's parameters of `module`, trained or frozen, to all workers.

        Raises:
            LineHalted: the line stopped, or the workers' parameters differ in name, dtype or shape.
        """
        self._manual_steps.broadcast("sync_params", dict(named_parameters(unwrapped(module))))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites `tensor` with rank 0's, bit for bit.

        Args:
            tensor: dense, of any dtype and shape, on any device; the same dtype and shape on every
                worker.

        Raises:
            ValueError: the tensor is sparse or quantised.
            LineHalted: the line stopped, or the workers' tensors differ in dtype or shape.
        """
        self._manual_steps.broadcast("broadcast", {"tensor": tensor})

    def barrier(self) -> None:
        """Waits until every worker has called it; returns at once if the step is lost.

        Raises:
            LineHalted: the line stopped.
        """
        self._manual_steps.barrier()

    @property
    def _manual_steps(self) -> ManualStepper:
        if self._manual is None:
            raise RuntimeError(
                "this script did not join for manual steps: call line.join(model, ...) instead of "
                "line.prepare(...), whose loop exchanges gradients by itself"
            )
        return self._manual

    def _join_for_manual_steps(self, modules: tuple[nn.Module, ...]) -> None:
        raise NotImplementedError
