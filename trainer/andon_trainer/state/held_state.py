"""Held state: a copy of what a worker's own optimizer steps move, to go back to.

On the schedule LOCAL a worker moves its weights before the line has committed anything. Whenever it
waits for others, its models must hold the line's weights all the same: it may have to send them to
a newcomer, write a checkpoint, or show them to a script that caught a halt. So the state at the
window's beginning is kept, and exchanged with the present one for as long as the worker waits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from andon_trainer.state import rng
from andon_trainer.state.replica import Replica
from andon_trainer.state.weights import named_state

__all__ = ["HeldState"]


class HeldState:
    """Weights and buffers, optimizers, whatever else is registered, and random generators."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        """Holds nothing yet."""
        self._replica = replica
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._optimizers: list[dict[str, Any]] = []
        self._registered: dict[str, dict[str, Any]] = {}
        self._generators: dict[str, Any] = {}

    def take(self) -> None:
        """Copies the present state; its memory is used again for the next copy."""
        now = self._present()
        if len(now) != len(self._tensors):
            self._tensors = [torch.empty_like(tensor, requires_grad=False) for tensor in now]
        with torch.no_grad():
            for held, tensor in zip(self._tensors, now, strict=True):
                held.copy_(tensor)
        self._optimizers = [copy.deepcopy(each.state_dict()) for each in self._replica.optimizers]
        self._registered = {
            name: copy.deepcopy(dict(thing.state_dict()))
            for name, thing in self._replica.registered.items()
            # A module (an EMA) moves on commits only, and may be as large as the model.
            if not isinstance(thing, nn.Module)
        }
        self._generators = rng.capture(self._device)

    def swap(self) -> None:
        """Exchanges what is held with the present state, all but the random generators."""
        with torch.no_grad():
            for held, tensor in zip(self._tensors, self._present(), strict=True):
                mine = tensor.clone()
                tensor.copy_(held)
                held.copy_(mine)
        for index, optimizer in enumerate(self._replica.optimizers):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(self._optimizers[index])
            self._optimizers[index] = state
        for name, held_state in self._registered.items():
            thing = self._replica.registered[name]
            state = copy.deepcopy(dict(thing.state_dict()))
            thing.load_state_dict(held_state)
            self._registered[name] = state

    def rewind_generators(self) -> None:
        """Sets the random generators back, so that what is computed again draws the same."""
        rng.restore(self._generators, self._device)

    def start_of(self, parameters: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The held copies of some of the models' tensors, by the tensors' ids."""
        pairs = zip(self._present(), self._tensors, strict=True)
        return {id(tensor): held for tensor, held in pairs if id(tensor) in parameters}

    def _present(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in named_state(self._replica.modules)]
