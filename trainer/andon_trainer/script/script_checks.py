"""Checks of what a script does around its loop body: mistakes that the loop alone would misname.

Each of them would otherwise be noticed late, as something else: a scaler that the line does not
know as an overflow, weights that were replaced after joining as workers that differ, and a wrapper
whose tensors are in no checkpoint as a newcomer that differs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.state.base import looks

__all__ = [
    "JoinedWeights",
    "refuse_scaler_by_hand",
    "refuse_unknown_scaler",
    "scales",
    "warn_of_unsaved_tensors",
    "warn_of_wrappers",
]

log = logging.getLogger(__name__)

_DEPTH = 6
_UNKNOWN_SCALER = (
    "the loss was scaled by a GradScaler that was not prepared: the line would take the first "
    "overflow, which a scaler provokes, for a wrong value, and halt"
)
_REPLACED = (
    "%(name)s was changed between line.%(call)s and %(end)s, by load_state_dict or by hand. "
    "line.%(call)s returns with the line's weights: those of worker 0, of the checkpoint that a "
    "run is resumed from, or what the others have trained, which this would undo. Load or "
    "initialise the model before line.%(call)s; see docs/guide/checkpoints.md"
)


def refuse_unknown_scaler(factor: torch.Tensor) -> None:
    """Raises RuntimeError if a loss was multiplied by the scale of a GradScaler."""
    # No number is compared: reading one would wait for a GPU.
    if any(scale.data_ptr() == factor.data_ptr() for scale in scales()):
        raise RuntimeError(
            f"{_UNKNOWN_SCALER}. Pass the scaler with the optimizer, line.prepare(model, "
            "optimizer, scaler, loader), and write line.backward(loss)"
        )


def refuse_scaler_by_hand(before: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError if a GradScaler has begun to scale losses since joining by hand.

    `before`: the scales that there were; a scaler makes its own when it scales its first loss.
    """
    known = {id(scale) for scale in before}
    if any(id(scale) not in known for scale in scales()):
        raise RuntimeError(
            f"{_UNKNOWN_SCALER}. Manual steps take no scaler: leave it out, and use bfloat16, "
            "torch.autocast(line.device.type, dtype=torch.bfloat16); or give it to line.prepare "
            "with the optimizer, if one loss for each batch is enough"
        )


def scales() -> list[torch.Tensor]:
    """The scale of each GradScaler of this process that has scaled a loss."""
    # By type: isinstance would call `__class__` of lazy proxies, and so load what they are for.
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
    return [each._scale for each in found if getattr(each, "_scale", None) is not None]


def warn_of_wrappers(prepared: Sequence[Optimizer]) -> None:
    """Warns of an optimizer around a prepared one, such as Lookahead, that was not prepared."""
    known = {id(each) for each in prepared}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Optimizer) or id(thing) in known:
            continue
        if any(id(each) in known for each in vars(thing).values()):
            log.warning(
                "%s is around a prepared optimizer, and was not prepared itself: what it keeps of "
                "its own is in no checkpoint and reaches no worker that joins later, and it acts "
                "in each loop body, also where no weight moves. Give line.prepare the wrapper in "
                "place of the optimizer inside it",
                type(thing).__name__,
            )


class JoinedWeights:
    """The weights with which a worker has joined: the script must not replace them afterwards.

    The line may have sent them: rank 0's, those of a checkpoint, or what the others have trained.
    """

    def __init__(self, gradients: AccumulatedGradients, arrived: object) -> None:
        """Notes how each looks; `arrived`: the last state that came."""
        self._gradients = gradients
        self._arrived = arrived
        self._before = self._looks()

    def check(self, arrived: object) -> None:
        """Raises RuntimeError if one was changed by the script; call it before the first batch.

        `arrived`: the last state that came by now.
        """
        if name := self._changed(arrived):
            facts = {"name": name, "call": "prepare", "end": "the first batch"}
            raise RuntimeError(_REPLACED % facts)

    def warn(self, arrived: object) -> None:
        """Warns if one was changed; call it before the first gradients of a manual step.

        It is no error there: a step may have begun with a clip of the weights, as a WGAN's does.
        """
        if name := self._changed(arrived):
            end = "the first line.all_reduce_gradients"
            log.warning(_REPLACED, {"name": name, "call": "join", "end": end})

    def _changed(self, arrived: object) -> str:
        """The name of a parameter that the script has changed; empty if there is none."""
        if arrived is not self._arrived:
            return ""  # The line has written them.
        names = (name for name, _ in self._gradients.named())
        seen = zip(names, self._before, self._looks(), strict=True)
        return next((name for name, old, new in seen if old != new), "")

    def _looks(self) -> list[Any]:
        return looks([part for _, part in self._gradients.named()])


def warn_of_unsaved_tensors(optimizers: Sequence[Optimizer]) -> None:
    """Warns of an optimizer around another one that keeps tensors out of its state."""
    for optimizer in optimizers:
        kept = vars(optimizer)
        inner = [each for each in kept.values() if isinstance(each, Optimizer)]
        if not inner:
            continue
        saved = {each.data_ptr() for each in _tensors(optimizer.state_dict())}
        known = {
            each.data_ptr()
            for one in (optimizer, *inner)
            for each in _tensors([one.param_groups, *one.state.values()])
        }
        for name, value in kept.items():
            if name in ("param_groups", "state", "defaults"):
                continue
            if any(each.data_ptr() not in saved | known for each in _tensors(value)):
                kind = type(optimizer).__name__
                log.warning(
                    "%s keeps tensors in `%s`, which its state_dict() leaves out: a worker that "
                    "joins later, or a run that is resumed, would have others, and the line halts "
                    "when the weights differ. Put them into state_dict() and load_state_dict()",
                    kind,
                    name,
                )
                break


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 1:  # A counter is no state that anybody would miss.
            yield value
    elif depth and isinstance(value, Mapping):
        for part in list(value.values()):
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth - 1)
