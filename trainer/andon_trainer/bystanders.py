"""Bystanders: parameters that no optimizer moves, such as an EMA's.

A script that updates them in its loop body does so once a micro-batch, and once an attempt, where
it means once a step. Torch counts the writes to a tensor, so that can be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

from andon_trainer.present import Phase, Present
from andon_trainer.replica import Replica

__all__ = ["Bystanders"]

log = logging.getLogger(__name__)


class Bystanders:
    """Parameters of a replica's models, and of what was registered, that no optimizer has."""

    def __init__(self, replica: Replica) -> None:
        """Looks at nothing yet."""
        self._replica = replica
        self._registered = -1
        self._parts: list[tuple[str, nn.Parameter]] = []
        self._warned = False

    def versions(self) -> list[int]:
        """How often each was written to."""
        if len(self._replica.registered) != self._registered:
            self._registered = len(self._replica.registered)
            self._parts = list(self._found())
        return [part._version for _, part in self._parts]

    def check(self, before: list[int], present: Present) -> None:
        """Looks for what was written to in a loop body that committed nothing.

        Raises:
            RuntimeError: there is such a parameter, and the step's next micro-batch would write
                again. After an attempt in vain a warning is logged.
        """
        now = self.versions()
        if present.phase is Phase.COMMITTED or now == before or len(now) != len(before):
            return
        name = next(
            name for (name, _), old, new in zip(self._parts, before, now, strict=True) if old != new
        )
        text = (
            f"{name} was changed in a loop body that committed nothing: an EMA moves once a "
            "step, so write `if line.committed: ema.update_parameters(model)`"
        )
        if present.phase is not Phase.VOID:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            log.warning("%s", text)

    def _found(self) -> Iterator[tuple[str, nn.Parameter]]:
        modules = list(self._replica.modules)
        modules += [
            each for each in self._replica.registered.values() if isinstance(each, nn.Module)
        ]
        moved = {
            id(part)
            for optimizer in self._replica.optimizers
            for group in optimizer.param_groups
            for part in group["params"]
        }
        for module in modules:
            for name, part in module.named_parameters():
                if id(part) not in moved and not part.is_inference():
                    moved.add(id(part))
                    yield name, part
