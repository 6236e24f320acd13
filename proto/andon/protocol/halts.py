"""Halts: why a line stopped, and the evidence that every worker gets."""

from __future__ import annotations

import enum
import math
from ctypes import c_float
from dataclasses import dataclass

from andon.protocol.records import Key, PositionRange

__all__ = [
    "HaltAnswer",
    "HaltEvidence",
    "HaltReason",
    "describe_place",
    "describe_value",
    "indexed",
    "shown",
]

_FLOAT32_DIGITS = 9
"""So many tell any two float32 numbers apart."""


class HaltReason(enum.Enum):
    """Why the line stopped; closed. Values are those of `andon.v1.HaltReason`."""

    NON_FINITE_GRADIENT = 1
    NON_FINITE_LOSS = 2
    REPLICA_DIVERGENCE = 3
    LOSS_SPIKE = 4
    GRADIENT_NORM_SPIKE = 5
    OPERATOR = 6
    PROTOCOL_VIOLATION = 7
    NON_FINITE_AVERAGE = 8
    ENCODING_OVERFLOW = 9
    REPEATED_FAILURE = 10
    JOURNAL = 11
    STATE_LOST = 12
    CHECKPOINT = 13
    TOO_FEW_WORKERS = 14
    WRONG_ARITHMETIC = 15
    DATA_DIFFERS = 16

    @property
    def label(self) -> str:
        """The reason as a metric's label and as people write it: `non_finite_gradient`."""
        return self.name.lower()


class HaltAnswer(enum.Enum):
    """How a person may end a halt; values are those of `andon.v1.HaltAnswer`."""

    RETRY = 1
    SKIP = 2
    DROP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltEvidence:
    """One halt: what was seen, where, and by whom.

    `worker` is None if no single worker is at fault, `block` if no block is. `element` is the index
    in `parameter`, one number for each dimension, and `value` is the text of what was found there.
    `positions` are those of the step's batch, of all workers, in `epoch`. Both are None if no round
    was open.
    """

    id: int
    reason: HaltReason
    step: int
    key: Key | None = None
    worker: int | None = None
    block: int | None = None
    parameter: str = ""
    element: tuple[int, ...] = ()
    value: str = ""
    message: str = ""
    at_unix_s: float = 0.0
    epoch: int | None = None
    positions: PositionRange | None = None
    reported_by: int | None = None
    """The worker that reported it; None: the service saw it itself, or a person pulled the cord."""

    @property
    def claimed(self) -> bool:
        """Whether a worker says this, not of itself: only a claim, until a person has looked."""
        return self.reported_by is not None and self.worker != self.reported_by

    @property
    def place(self) -> str:
        """The place as people write it: `blocks.3.attn.weight[17, 204] (block 3)`; may be empty."""
        return describe_place(self.block, self.parameter, self.element)

    @property
    def when(self) -> str:
        """The step as people write it: `step 3 (epoch 1, positions 0 to 3)`, or `step 3`."""
        if self.epoch is None or self.positions is None:
            return f"step {self.step}"
        first, last = self.positions.start, self.positions.stop - 1
        batch = f"position {first}" if first == last else f"positions {first} to {last}"
        return f"step {self.step} (epoch {self.epoch}, {batch})"

    @property
    def outcome(self) -> str:
        """What happened to the weights, as a sentence."""
        if self.reason is HaltReason.REPLICA_DIVERGENCE:
            # Digests are compared after the commit: only this halt comes too late.
            return "The workers' weights moved apart before this was seen."
        return "No weight moved."

    def __str__(self) -> str:
        """The halt as one sentence, without a full stop."""
        return f"halted at {self.when}: {self.message or self.reason.label.replace('_', ' ')}"


def describe_place(block: int | None, parameter: str, element: tuple[int, ...]) -> str:
    """A place in the model as people write it, see `HaltEvidence.place`; empty: not known."""
    if not parameter:
        return "" if block is None else f"block {block}"
    return indexed(parameter, element) + ("" if block is None else f" (block {block})")


def indexed(parameter: str, element: tuple[int, ...]) -> str:
    """An element of a parameter as people write it: `blocks.3.attn.weight[17, 204]`."""
    return parameter + (f"[{', '.join(map(str, element))}]" if element else "")


def shown(value: float) -> str:
    """A float32 number in the fewest digits that no other one has."""
    if not math.isfinite(value):
        return describe_value(value)
    texts = [f"{value:.{digits}g}" for digits in range(1, _FLOAT32_DIGITS + 1)]
    return next((each for each in texts if c_float(float(each)).value == value), texts[-1])


def describe_value(value: float) -> str:
    """A number as evidence shows it: `nan`, `inf`, `-inf`, or its shortest decimal form."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(float(value))
