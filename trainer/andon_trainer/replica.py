"""The replica: everything that must be the same on all workers, as bytes and as a digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from andon.records import Cursor
from andon_trainer.checkpoint import Stateful, save_checkpoint
from andon_trainer.state import (
    check_tensors,
    join_tree,
    named_state,
    pack_tensors,
    split_tree,
    unpack_tensors,
    weights_digest,
    write_tensors,
)

__all__ = ["Replica"]

_LENGTH_BYTES = 8


@dataclass(slots=True)
class Replica:
    """A worker's models, optimizers, and whatever was registered, by name."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer] = ()
    registered: dict[str, Stateful] = field(default_factory=dict)
    _early: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States that came before the script registered what they are of."""

    def register(self, name: str, thing: Stateful) -> None:
        """Adds something with a state.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.registered:
            raise ValueError(f"{name!r} is registered already")
        self.registered[name] = thing
        if name in self._early:
            thing.load_state_dict(self._early.pop(name))

    def digest(self) -> bytes:
        """SHA-256 of the weights, 32 bytes; see docs/protocol.md."""
        return weights_digest(self.modules)

    def pack(self) -> bytes:
        """All of it, for a newcomer: the JSON's length, JSON, and safetensors; no pickle."""
        tree = {
            "model": dict(named_state(self.modules)),
            "optimizers": [dict(optimizer.state_dict()) for optimizer in self.optimizers],
            "registered": {name: dict(it.state_dict()) for name, it in self.registered.items()},
        }
        skeleton, tensors = split_tree(tree)
        text = json.dumps(skeleton).encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text + pack_tensors(tensors)

    def install(self, data: bytes) -> None:
        """Takes over what `pack` packed. What is not registered here yet is kept until it is.

        Raises:
            ValueError: it is damaged, or of other models or optimizers; nothing was changed.
        """
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        tensors = unpack_tensors(data[start:])
        tree: dict[str, Any] = join_tree(json.loads(data[_LENGTH_BYTES:start]), tensors)
        check_tensors(self.modules, tree["model"])
        if len(tree["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"the line has {len(tree['optimizers'])} optimizers, this script "
                f"{len(self.optimizers)}: prepare the same ones on every worker"
            )
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for name, state in tree["registered"].items():
            if name in self.registered:
                self.registered[name].load_state_dict(state)
            else:
                self._early[name] = state
        write_tensors(self.modules, tree["model"])

    def save(self, folder: Path, step: int, cursor: Cursor) -> Path:
        """Writes a checkpoint into `folder`, whole or not at all; returns the folder."""
        facts = {
            "step": step,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "digest": self.digest().hex(),
        }
        return save_checkpoint(folder, self.modules, self.optimizers, facts, self.registered)
