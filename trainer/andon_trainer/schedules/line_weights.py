"""The line's weights on a worker of local steps, while its models hold this worker's own.

They are kept apart (`HeldState`), compared by their digest, and moved by the outer optimizer at the
end of a window. That optimizer's parameters are those of the models, so for its step these hold the
line's weights for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from andon_trainer.averaging.changes import ChangeExchange
from andon_trainer.core.reports import NO_DIGEST, Digest
from andon_trainer.place.member import RunMember
from andon_trainer.schedules.own_weights import Part
from andon_trainer.state.held_state import HeldState
from andon_trainer.state.replica import Replica

__all__ = ["LineWeights", "OuterStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """What moves the line's weights at the end of a window."""

    optimizer: Optimizer
    moving: Callable[[], AbstractContextManager[None]]
    """Around its step: it is no optimizer that the script prepared."""
    max_grad_norm: float | None = None
    """The greatest norm of a local step's gradient."""
    mix: float = 0.0
    """With which factor own weights are kept where a fragment's average arrives."""


class LineWeights:
    """The weights that all workers have in common. Used by one thread."""

    def __init__(
        self,
        member: RunMember,
        replica: Replica,
        held: HeldState,
        changes: ChangeExchange,
        outer: OuterStep,
    ) -> None:
        """Knows of none yet.

        Args:
            member: where the line stands.
            replica: holds the models.
            held: the line's weights, once a window has begun.
            changes: exchanges what workers change of them.
            outer: moves them.
        """
        self._member = member
        self._replica = replica
        self._held = held
        self._changes = changes
        self._outer = outer

    def now(self) -> dict[int, torch.Tensor]:
        """Those that are held, by the parameters' ids."""
        return self._held.weights_of(dict(self.parameters()))

    def parameters(self, fragment: int | None = None) -> Iterator[Part]:
        """What is exchanged, in a fragment of the blocks, or in all."""
        if fragment is None:
            for group in self._outer.optimizer.param_groups:
                for part in group["params"]:
                    yield id(part), part
        else:
            for part in self._changes.parameters_of(fragment):
                yield id(part), part

    def rest(self, exchanged: Sequence[Part]) -> list[Part]:
        """The parameters that a round did not exchange."""
        keys = {key for key, _ in exchanged}
        return [(key, part) for key, part in self.parameters() if key not in keys]

    def move(
        self, start: dict[int, torch.Tensor], exchanged: Sequence[Part], *, moves: bool
    ) -> None:
        """Makes the exchanged parameters the line's new weights, by the mean change in `p.grad`.

        Args:
            start: the line's old weights.
            exchanged: the parameters of the round.
            moves: whether there is a mean.
        """
        with torch.no_grad():
            for key, part in exchanged:
                part.copy_(start[key])
        for _, part in self.rest(exchanged):
            part.grad = None  # Of a local step; the outer optimizer passes them over.
        if moves:
            with self._outer.moving():
                self._outer.optimizer.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drops what is in `p.grad`."""
        for _, part in self.parameters():
            part.grad = None

    def digest_of_models(self, *, wanted: bool = False) -> Digest:
        """The digest of the models' weights, if it is wanted or the line compares this head's."""
        here = self._member.position
        if not (wanted or here.digest_due):
            return NO_DIGEST
        return self._replica.weights(here.coordinator_can)

    def digest_of_held(self, *, wanted: bool = True) -> Digest:
        """That of the line's weights, while the models hold what was computed from there."""
        if not (wanted or self._member.position.digest_due):
            return NO_DIGEST
        with self._held.shown():
            return self.digest_of_models(wanted=True)
