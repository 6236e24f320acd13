"""Held state: the line's weights, while a worker's own optimizer steps move the models'.

On the schedule LOCAL a worker moves its weights before the line has committed anything. What they
were is kept, to measure the change from, to apply the mean change to, and to go back to if what was
computed must not count. The state of the worker's own optimizer, and of whatever else it steps, is
kept as well, since it has seen the same gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from andon_trainer.state import rng
from andon_trainer.state.replica import Replica
from andon_trainer.state.weights import named_state

__all__ = ["HeldState", "InnerState"]


@dataclass(frozen=True, slots=True)
class InnerState:
    """What a worker's own steps move beside the weights."""

    optimizers: list[dict[str, Any]] = field(default_factory=list)
    registered: dict[str, dict[str, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, replica: Replica, device: torch.device) -> InnerState:
        """A copy of the present state."""
        return cls(
            [copy.deepcopy(optimizer.state_dict()) for optimizer in replica.optimizers],
            {
                name: copy.deepcopy(dict(thing.state_dict()))
                for name, thing in replica.registered.items()
                # A module (an EMA) moves on commits only, and may be as large as the model. So does
                # the outer optimizer.
                if not isinstance(thing, nn.Module) and thing is not replica.outer
            },
            rng.capture(device),
        )

    def restore(self, replica: Replica, device: torch.device) -> None:
        """Sets the state back, so that what is computed again draws the same random numbers."""
        for optimizer, state in zip(replica.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(state)
        for name, state in self.registered.items():
            replica.registered[name].load_state_dict(state)
        rng.restore(self.generators, device)


class HeldState:
    """The line's weights and buffers, and the state with which this worker's steps began."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        """Holds nothing yet."""
        self._replica = replica
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._inner = InnerState()
        self._aside: list[torch.Tensor] | None = None
        """What the models held, while they show what is held."""

    def take(self, inner: InnerState | None = None, but: Container[int] = ()) -> None:
        """Copies the models as they are. Their memory is used again for the next copy.

        Args:
            inner: the state that goes with it; None: the present one.
            but: ids of tensors whose copies stay as they are.
        """
        now = self._present()
        if len(now) != len(self._tensors):
            self._tensors = [torch.empty_like(tensor, requires_grad=False) for tensor in now]
        with torch.no_grad():
            for held, tensor in zip(self._tensors, now, strict=True):
                if id(tensor) not in but:
                    held.copy_(tensor)
        self._inner = inner or self.inner()

    @property
    def began(self) -> InnerState:
        """The inner state that goes with what is held."""
        return self._inner

    def inner(self) -> InnerState:
        """A copy of the present inner state."""
        return InnerState.of(self._replica, self._device)

    def restore(self) -> None:
        """Makes the models, and everything that goes with them, what they were."""
        self._aside = None
        self._fill(self._tensors)
        self._inner.restore(self._replica, self._device)

    @property
    def is_shown(self) -> bool:
        """Whether the models show what is held."""
        return self._aside is not None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The models hold what is held, and afterwards what they held; not if `restore` was called.

        It is for between two loop bodies, where no forward or backward is under way.
        """
        self._aside = [tensor.detach().clone() for tensor in self._present()]
        self._fill(self._tensors)
        try:
            yield
        finally:
            if self._aside is not None:
                self._fill(self._aside)
            self._aside = None

    def _fill(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for given, tensor in zip(tensors, self._present(), strict=True):
                tensor.copy_(given)

    def tree(self) -> dict[str, Any]:
        """What the replica's state was, as `Replica.tree` has it. Nothing is copied."""
        replica, inner = self._replica, self._inner
        tree = replica.tree()
        names = [
            name for name, tensor in named_state(replica.modules) if tensor not in replica.base
        ]
        tree["model"] |= dict(zip(names, self._tensors, strict=True))
        tree["optimizers"] = inner.optimizers
        tree["registered"] |= inner.registered
        return tree

    def weights_of(self, parameters: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The held copies of some of the models' tensors, by the tensors' ids."""
        pairs = zip(self._present(), self._tensors, strict=True)
        return {id(tensor): held for tensor, held in pairs if id(tensor) in parameters}

    def _present(self) -> list[torch.Tensor]:
        # No step of a worker's own moves the base, which may be much the largest part.
        base = self._replica.base
        return [tensor for _, tensor in named_state(self._replica.modules) if tensor not in base]
