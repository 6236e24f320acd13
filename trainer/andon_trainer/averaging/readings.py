"""Readings: numbers on their way from a device to the host, which nobody waits for too early.

Theory of operation. `float(tensor)` of a tensor on a GPU waits until the GPU has done all work that
was queued before. A training script that does so once a step, between forward and backward, leaves
the GPU idle each time: so a worker that is alone never does it. A reading queues the copy to pinned
memory, notes an event behind it, and waits for that event only when its numbers are asked for. By
then backward is queued, too. On a CPU a number is there at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from andon_trainer.averaging.compute_clock import DeviceEvent

__all__ = ["DeviceReader", "HostReader", "LossReadings", "PendingNumbers", "Reader", "make_reader"]


class PendingNumbers:
    """The numbers of one small tensor."""

    __slots__ = ("_done", "_host", "_numbers")

    def __init__(self, host: torch.Tensor, done: DeviceEvent | None = None) -> None:
        """Takes host memory that is complete once `done` has happened; None: it is already."""
        self._host: torch.Tensor | None = host
        self._done = done
        self._numbers: list[float] | None = None
        if done is None:
            self._take()

    @property
    def here(self) -> bool:
        """Whether asking for the numbers waits for nothing."""
        return self._numbers is not None

    def numbers(self) -> list[float]:
        """The numbers, in order; the first call waits until they have arrived."""
        if self._numbers is None:
            assert self._done is not None
            self._done.synchronize()
            return self._take()
        return self._numbers

    def _take(self) -> list[float]:
        assert self._host is not None
        self._numbers = numbers = self._host.flatten().tolist()
        self._host = None  # A few bytes that stay may keep the heap from shrinking or growing.
        return numbers

    def number(self) -> float:
        """The only number."""
        (number,) = self.numbers()
        return number


class Reader(Protocol):
    """Begins readings."""

    def begin(self, tensor: torch.Tensor) -> PendingNumbers:
        """Begins to read a tensor as it is now, whatever is done to it later."""


class HostReader:
    """Reads at once, and waits for the device if the tensor is on one."""

    def begin(self, tensor: torch.Tensor) -> PendingNumbers:
        """Reads."""
        return PendingNumbers(tensor.detach())


class DeviceReader:
    """Reads behind the work that the current stream of a tensor's device has queued."""

    def __init__(
        self, make_event: Callable[[], DeviceEvent], current_stream: Callable[[torch.device], Any]
    ) -> None:
        """Takes what makes an event, and what tells the calling thread's stream of a device."""
        self._make_event = make_event
        self._current_stream = current_stream

    def begin(self, tensor: torch.Tensor) -> PendingNumbers:
        """Queues the copy. A tensor that is on the host is read at once."""
        if tensor.device.type == "cpu":
            return PendingNumbers(tensor.detach())
        # Torch gives the copy pinned memory of its own, which it does not use again before the
        # copy is done. So it is truly asynchronous.
        host = tensor.detach().to("cpu", non_blocking=True)
        done = self._make_event()
        # Behind the copy, on the same stream: once it has happened, the numbers are there.
        done.record(self._current_stream(tensor.device))
        return PendingNumbers(host, done)


def make_reader(device: torch.device) -> Reader:
    """The reader that suits a device."""
    if device.type != "cuda":
        return HostReader()
    return DeviceReader(
        lambda: cast(DeviceEvent, torch.cuda.Event()),  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.current_stream,
    )


class LossReadings:
    """The losses of a step's micro-batches. Used by one thread."""

    def __init__(self, reader: Reader) -> None:
        """None is under way."""
        self.reader = reader
        self._under_way: list[PendingNumbers] = []

    def begin(self, loss: torch.Tensor, *, gated: bool) -> PendingNumbers:
        """Begins to read a loss; `gated`: `first_not_finite` looks at it, if it is not here yet."""
        reading = self.reader.begin(loss)
        if gated and not reading.here:
            self._under_way.append(reading)
        return reading

    def clear(self) -> None:
        """A step begins."""
        self._under_way.clear()

    def first_not_finite(self) -> float | None:
        """The first of the gated losses that is not finite; waits for them, and forgets them."""
        losses, self._under_way = self._under_way, []
        return next((loss.number() for loss in losses if not math.isfinite(loss.number())), None)
