"""A stand-in for a GPU: tensors without memory, and a count of what would wait for them.

PyTorch's `meta` device computes shapes and no numbers. So whatever reads a number of it raises;
here it is counted instead. A copy that does not block is no wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DEVICE", "StandInEvent", "Waits"]

DEVICE = torch.device("meta")

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts, while it is entered, what waits for the stand-in and what travels behind its work."""

    def __init__(self, numbers: float = 1.0) -> None:
        """Every number of the device is `numbers`."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._numbers = numbers
        self.reads: list[str] = []
        """What would wait for the device."""
        self.copies = 0
        """Copies to the host that wait for nothing."""
        self.recorded = self.passed = 0
        """Events on the stream, and how many of them the host knows to have happened."""
        self.events = 0
        """How often the host waited for an event that had not happened."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        there = args and isinstance(args[0], torch.Tensor) and args[0].device == DEVICE
        if there and func in _READS:
            self.reads.append(str(func))
            return self._numbers
        if there and func is _aten._to_copy.default and named.get("device") == torch.device("cpu"):
            if named.get("non_blocking"):
                self.copies += 1
            else:
                self.reads.append(str(func))
            dtype = named.get("dtype") or args[0].dtype
            return torch.full(args[0].shape, self._numbers, dtype=dtype)
        return func(*args, **named)

    def event(self) -> StandInEvent:
        """A new event."""
        return StandInEvent(self)


class StandInEvent:
    """An event of the stand-in's stream, which does nothing until somebody waits."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._place = 0

    def record(self, _stream: object, /) -> None:
        """The stream will pass it."""
        self._waits.recorded += 1
        self._place = self._waits.recorded

    def synchronize(self) -> None:
        """Waits, unless something later was waited for already."""
        if self._place > self._waits.passed:
            self._waits.passed = self._place
            self._waits.events += 1

    def elapsed_time(self, _end: object, /) -> float:
        """Is never asked for."""
        raise AssertionError("nobody times a worker that is alone")
