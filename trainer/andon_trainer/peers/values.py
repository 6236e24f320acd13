"""What is done to values: reductions, and the gate that looks for values that are not finite.

Sums and means of float32 are one pass of `_fused.c` over all inputs, which finds a bad value as it
goes. Everything else is reduced by `Work.reduce`, and
looked at by `Gate.first_bad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from andon.protocol.encoding import fused
from andon.protocol.halts import describe_value
from andon.protocol.sessions import RankFault, SessionEnd
from andon_trainer.core.peer_plan import Buffer, Make, Span
from andon_trainer.core.peer_work import Found, Gate, Work
from andon_trainer.core.values import first_not_finite, is_finite

__all__ = ["BadValue", "Values", "copied"]

_FUSED = ("sum", "avg")
_FEW_BYTES = 2**14
_sum = getattr(fused, "sum", None)
_copy = getattr(fused, "copy", None)
_checked_copy = getattr(fused, "checked_copy", None)


def copied(out: memoryview, values: memoryview) -> None:
    """Copies bytes, without the interpreter's lock if they are many."""
    if _copy is None or values.nbytes < _FEW_BYTES:
        out[:] = values
    else:
        _copy(out, values)


class BadValue(Exception):
    """A value that is not finite, in an input or in a reduction: the fault that it is."""

    def __init__(self, fault: RankFault) -> None:
        """Carries the fault, whose call is not known here."""
        super().__init__(fault.message)
        self.fault = fault


@dataclass(slots=True)
class Values:
    """The values of one call at one rank."""

    work: Work
    rank: int
    """This rank in the session."""
    ranks: int
    """How many the group has."""
    gate: Gate | None
    """None: every value is legal, or became so."""

    @classmethod
    def of(cls, work: Work, rank: int, ranks: int) -> Values:
        """Those of a call that begins."""
        return cls(work, rank, ranks, work.gate)

    @property
    def is_fused(self) -> bool:
        """Whether reductions are those of `_fused.c`."""
        return self.work.call.dtype == "float32" and self.work.call.reduction in _FUSED

    def reduce(self, make: Make, start: int, out: memoryview, inputs: Sequence[memoryview]) -> None:
        """Reduces the bytes of a make that begin at `start`.

        Raises:
            BadValue: an input of this rank or the result is not finite, and must be.
        """
        if self.gate is not None:
            for span, values in zip(make.inputs, inputs, strict=True):
                # In place it could not be looked at afterwards.
                if span.buffer is Buffer.GIVES and _address(values) == _address(out):
                    self.require_finite(span.within(start, start + values.nbytes), values)
        if self.is_fused:
            finite = self._sum(out, inputs, last=make.last)
        else:
            assert self.work.reduce is not None, "a call that reduces has a way to"
            self.work.reduce(out, inputs, last=make.last)
            finite = self.gate is None or self.gate.first_bad(out) is None
        if not finite and self.gate is not None:
            self.judge(make, start, out, inputs)

    def judge(self, make: Make, start: int, out: memoryview, inputs: Sequence[memoryview]) -> None:
        """Finds out why a reduction is not finite; nothing if it is after all.

        Raises:
            BadValue: it is not.
        """
        bad = self._first_bad(out)
        if bad is None or self._expected():
            return
        others = "all inputs are finite"
        for span, values in zip(make.inputs, inputs, strict=True):
            found = self._first_bad(values)
            if found is not None and span.buffer is Buffer.GIVES:
                raise self._input(span.within(start, span.size), found)
            if found is not None:
                # Its own gate let it pass.
                others = "an input of another rank is not finite"
        element = self._element(make.out.within(start, make.out.size), bad[0])
        raise BadValue(
            RankFault(
                end=SessionEnd.NON_FINITE_REDUCTION,
                culprit=None,
                message=f"{self.work.call}: {others}, and element {element} of the result is "
                f"{bad[1] or 'not finite'}",
                element=(element,),
                value=bad[1],
            )
        )

    def require_finite(self, span: Span, values: memoryview) -> None:
        """Looks at some of this rank's input.

        Raises:
            BadValue: it has a value that is not finite, and must not.
        """
        if self.gate is None:
            return
        bad = self._first_bad(values)
        if bad is not None and not self._expected():
            raise self._input(span, bad)

    # ------------------------------------------------------------------ inside

    def _sum(self, out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> bool:
        divisor = float(self.ranks) if last and self.work.call.reduction == "avg" else 1.0
        if _sum is not None:
            return bool(_sum(out, tuple(inputs), divisor) < 0)
        whole = np.frombuffer(out, np.float32)
        with np.errstate(all="ignore"):
            acc = np.frombuffer(inputs[0], np.float32).copy()
            for each in inputs[1:]:
                np.add(acc, np.frombuffer(each, np.float32), out=acc)
            np.divide(acc, np.float32(divisor), out=whole)
        return is_finite(whole)

    def _expected(self) -> bool:
        """Whether overflows are expected: then nobody looks any more in this call."""
        assert self.gate is not None
        if self.gate.expected():
            self.gate = None
            return True
        return False

    def _first_bad(self, values: memoryview) -> tuple[int, str] | None:
        """The first element that is not finite, and what it is."""
        if self.work.call.dtype == "float32":
            numbers = np.frombuffer(values, np.float32)
            if _checked_copy is None:
                found = first_not_finite(numbers)
                return None if found is None else (found[0], describe_value(found[1]))
            at = _checked_copy(None, values)
            return None if at < 0 else (at, describe_value(float(numbers[at])))
        index = None if self.gate is None else self.gate.first_bad(values)
        return None if index is None else (index, "")

    def _element(self, span: Span, element: int) -> int:
        """An element of a span, counted in its tensor."""
        return span.start // self.work.itemsize + element

    def _input(self, span: Span, bad: tuple[int, str]) -> BadValue:
        """The fault of an element of this rank's input, counted from the span's first one."""
        assert self.gate is not None
        element, value = bad
        at = self._element(span, element)
        before = sum(view.nbytes for view in self.work.parts[span.part].gives[: span.index])
        found: Found = self.gate.explain(span.part, before // self.work.itemsize + at)
        value = found.value or value
        where = found.parameter or "element"
        place = ", ".join(map(str, found.element or (at,)))
        return BadValue(
            RankFault(
                end=SessionEnd.NON_FINITE,
                culprit=self.rank,
                message=f"rank {self.rank} gave {value or 'a value that is not finite'} in "
                f"{where}[{place}] to {self.work.call}",
                parameter=found.parameter,
                element=found.element or (at,),
                value=value,
            )
        )


def _address(view: memoryview) -> int:
    """Where a view lies in memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
