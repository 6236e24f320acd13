"""One rank's side of a call between ranks: where its elements lie, and how they are reduced.

Buffers are flat views of bytes in the processor's memory. They must stay as they are until the call
has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from andon.protocol.peer_calls import Call, CallKind

__all__ = ["Ended", "Found", "Gate", "Part", "Reduce", "Work"]


class Reduce(Protocol):
    """Reduces inputs of one element type, element by element."""

    def __call__(self, out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> None:
        """Writes `((inputs[0] op inputs[1]) op inputs[2]) …` to `out`.

        `out` may be the memory of one of the inputs, and else overlaps none of them. All have the
        same length. `last` is false if the result is an input of a further reduction: a mean is
        divided only in the last one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A value that is not finite, as people name it."""

    parameter: str = ""
    """The parameter whose gradient it is in; empty if that is not known."""
    element: tuple[int, ...] = ()
    """The index in the parameter; in the call's tensor if there is no parameter."""
    value: str = ""
    """`nan`, `inf` or `-inf`."""


class Gate(Protocol):
    """Looks for values that are not finite, before they leave the rank."""

    def first_bad(self, values: memoryview) -> int | None:
        """The index of the first element that is not finite; None: all are."""

    def expected(self) -> bool:
        """Whether overflows are expected, as a gradient scaler's are: then the call goes on.

        Asked after something was found, in the input or in a reduction, and before `explain`.
        """

    def explain(self, part: int, element: int) -> Found:
        """Names an element of the call's input: that of part `part`, counted in elements.

        Called at most once, after something was found that is not expected.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a call, or one for each rank of the group.

    | kind | gives | takes |
    |---|---|---|
    | ALL_REDUCE | the input | the result; may be the same memory |
    | REDUCE | the input | at the root the result; may be the same memory |
    | REDUCE_SCATTER | one for each rank | the result |
    | ALL_GATHER | the input | one for each rank |
    | GATHER | the input | at the root one for each rank |
    | SCATTER | at the root one for each rank | the result |
    | BROADCAST | at the root the input | elsewhere the result |
    | ALL_TO_ALL | one for each rank | one for each rank |
    | BARRIER | nothing | nothing |
    | SEND | at the sender the input | at the receiver the result |
    """

    gives: tuple[memoryview, ...] = ()
    takes: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank brings to a call."""

    call: Call
    itemsize: int
    """Bytes of an element."""
    parts: tuple[Part, ...] = ()
    """As many as `call.tensors`; none for a barrier."""
    reduce: Reduce | None = None
    """How elements are reduced. Sums and means of float32 don't call it."""
    gate: Gate | None = None
    """None: every value is legal. Inputs and sums of float32 don't call `first_bad`."""
    peer: int | None = None
    """The other rank of a SEND, in the group; None: this rank receives from any."""
    receives: bool = False
    """Whether this rank is the receiver of a SEND."""

    def __post_init__(self) -> None:
        """Refuses what no plan can be made for."""
        if self.call.kind.reduces and self.reduce is None:
            raise ValueError(f"{self.call} without a way to reduce")
        if self.call.kind is CallKind.SEND and self.peer is None and not self.receives:
            raise ValueError("a sender names the receiver")


Ended = Callable[[BaseException | None], None]
"""Called once when a call has ended; the argument says why it failed."""
