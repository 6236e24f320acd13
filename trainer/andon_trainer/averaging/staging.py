"""Staging: how gradients reach host memory, and averages the device, while backward runs.

Theory of operation. The CUDA path never waits for the whole device. Each block's gradients are
gathered, scaled and copied to pinned host memory on one side stream, which waits only for the
streams that made them; an event tells when the copy is done, and backward goes on meanwhile. On the
way back averages go through two pinned slots, so that filling one overlaps with the transfer of the
other, and the consumer's stream waits for an event. On a CPU every copy is done when the call
returns: the same interface, nothing to wait for.

An exchange may lend memory for the gradients, from which it sends them without another copy. Then
they are staged there, else in the staging's own memory. Either stays valid until the next `begin`,
whatever becomes of the exchange.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from andon.host.trace import Track
from andon_trainer.averaging.missing import MISSING
from andon_trainer.core.calls import Bytes, Floats
from andon_trainer.model.layout import ModelPlan
from andon_trainer.timeline import Timeline

__all__ = [
    "CudaStaging",
    "Factor",
    "HostStaging",
    "Lend",
    "PinnedMemory",
    "Staging",
    "TracedStaging",
    "lend_nothing",
    "make_staging",
]

log = logging.getLogger(__name__)

Factor = float | torch.Tensor
"""What gradients are multiplied with: a number, or a float32 scalar on the gradients' device."""

Lend = Callable[[int], tuple[Floats, Bytes] | None]
"""Memory that the exchange lends for a block: the vector, and the memory that it is part of."""

Gathered = Callable[[int, torch.Tensor, Sequence[torch.Tensor | None]], None]
"""Gets a block, the vector on the device in which its gradients are, and these gradients."""


def lend_nothing(_block: int) -> None:
    """For exchanges that have no memory to lend."""


class Staging(Protocol):
    """Moves blocks between parameters' gradients and flat float32 vectors in host memory."""

    def note(self, block: int) -> None:
        """The calling thread's stream has just written a gradient of `block`."""

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Begins to copy a block's gradients, times `scale`, to the host; None becomes MISSING."""

    def ready(self, block: int) -> bool:
        """Whether the copy that was begun is done. Never blocks."""

    def collect(self, block: int) -> torch.Tensor:
        """The flat vector; waits for the copy. Valid until the next `begin` of this block."""

    def put(self, block: int, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copies a block's flat host vector into gradients, and leaves out those that are None.

        Later work of the calling thread's stream sees it.
        """

    def close(self) -> None:
        """Lets go of lent memory, once no copy into it is under way; a second call does nothing."""


def make_staging(
    plan: ModelPlan,
    device: torch.device,
    lend: Lend = lend_nothing,
    timeline: Timeline | None = None,
    beside: Staging | None = None,
) -> Staging:
    """The CUDA path if all parameters are on one CUDA device, else the CPU's.

    Args:
        plan: the blocks.
        device: the model's.
        lend: returns the memory that the exchange would have a block's gradients in.
        timeline: records how long the host takes part.
        beside: one that was made for other contributions of the same blocks.
    """
    places = {parameter.device for block in plan.parameters for parameter in block}
    staging: Staging
    if device.type == "cuda" and len(places) == 1 and next(iter(places)).type == "cuda":
        near = beside.staging if isinstance(beside, TracedStaging) else beside
        assert near is None or isinstance(near, CudaStaging)
        staging = CudaStaging(plan, places.pop(), lend, beside=near)
    else:
        staging = HostStaging(plan, lend)
    return staging if timeline is None else TracedStaging(staging, timeline)


def _views(
    flat: torch.Tensor, like: Sequence[torch.Tensor | None], shapes: Sequence[torch.Size]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Each tensor of `like` with its piece of `flat`, in its shape."""
    start = 0
    for tensor, shape in zip(like, shapes, strict=True):
        yield flat[start : start + shape.numel()].view(shape), tensor
        start += shape.numel()
    assert start == flat.numel(), "a block's flat vector has another size than its parameters"


def _gather(
    flat: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
    shapes: Sequence[torch.Size],
    scale: Factor | None,
) -> None:
    """Fills `flat` with float32(gradient), each times float32(scale)."""
    # Rounded to float32 first, so that the products are the same bits on every device.
    factor = float(np.float32(scale)) if isinstance(scale, float) else scale
    for view, gradient in _views(flat, gradients, shapes):
        if gradient is None:
            view.fill_(MISSING)
            continue
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if factor is None:
            view.copy_(dense)
        elif dense.dtype == view.dtype and dense.device == view.device:
            torch.mul(dense, factor, out=view)
        else:
            # Widened before it is scaled: float16 could overflow.
            view.copy_(dense)
            view.mul_(factor)


def _parts(gradient: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a gradient is made of."""
    if gradient is None:
        return ()
    if gradient.is_sparse:
        return gradient._indices(), gradient._values()
    return (gradient,)


class HostStaging:
    """The CPU's path, and that of models on several devices: every copy is made at once."""

    def __init__(self, plan: ModelPlan, lend: Lend = lend_nothing) -> None:
        """Allocates nothing yet: a block's vector is made at its first use, if none is lent."""
        self._lend = lend
        self._shapes = [[parameter.shape for parameter in block] for block in plan.parameters]
        self._flats: list[torch.Tensor | None] = [None] * len(plan.parameters)
        self._own: list[torch.Tensor | None] = [None] * len(plan.parameters)

    def note(self, block: int) -> None:
        """Does nothing: there are no streams."""

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Copies."""
        flat = self._flats[block] = self._vector(block)
        if isinstance(scale, torch.Tensor):
            scale = scale.to(flat.device)
        with torch.no_grad():
            _gather(flat, gradients, self._shapes[block], scale)

    def _vector(self, block: int) -> torch.Tensor:
        # Asked for at each `begin`: a stream that was opened again lends other memory.
        lent, own = self._lend(block), self._own[block]
        if lent is not None:
            self._own[block] = None
            return torch.from_numpy(lent[0])
        if own is None:
            elements = sum(shape.numel() for shape in self._shapes[block])
            own = self._own[block] = torch.empty(elements, dtype=torch.float32)
        return own

    def ready(self, block: int) -> bool:
        """True once `begin` was called, which copies."""
        return self._flats[block] is not None

    def collect(self, block: int) -> torch.Tensor:
        """The flat vector."""
        flat = self._flats[block]
        assert flat is not None, "collect before begin"
        return flat

    def put(self, block: int, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copies."""
        with torch.no_grad():
            for view, gradient in _views(flat, gradients, self._shapes[block]):
                if gradient is not None:
                    gradient.copy_(view)

    def close(self) -> None:
        """Does nothing: lent memory is only used."""


class CudaStaging:
    """The CUDA path: one side stream, pinned host memory, events."""

    def __init__(
        self,
        plan: ModelPlan,
        device: torch.device,
        lend: Lend = lend_nothing,
        gathered: Gathered | None = None,
        beside: CudaStaging | None = None,
    ) -> None:
        """Makes the stream; memory is allocated at its first use.

        Args:
            plan: the blocks; all parameters are on `device`.
            device: a CUDA device.
            lend: returns the memory that the exchange would have a block's gradients in.
            gathered: called on the side stream, before a block is copied; may change its vector.
            beside: another one, whose stream and memory on the device this one uses, and whose lent
                memory is part of the same mapping.
        """
        self._beside = beside
        self._gathered = gathered
        self._device = device
        self._lend = lend
        self._shapes = [[parameter.shape for parameter in block] for block in plan.parameters]
        self._sizes = [sum(shape.numel() for shape in shapes) for shapes in self._shapes]
        self._side: torch.cuda.Stream
        self._pin: PinnedMemory
        if beside is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
            self._pin = PinnedMemory(torch.cuda.cudart(), self._side.synchronize)  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            self._side, self._pin = beside._side, beside._pin
        self._writers: list[set[torch.cuda.Stream]] = [set() for _ in self._sizes]
        """For each block, the streams that wrote its gradients."""
        self._pinned: list[torch.Tensor | None] = [None] * len(self._sizes)
        self._own: list[torch.Tensor | None] = [None] * len(self._sizes)
        self._done: list[torch.cuda.Event | None] = [None] * len(self._sizes)
        # One vector serves all blocks and both directions: the side stream runs in order.
        self._scratch: torch.Tensor | None = None
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def note(self, block: int) -> None:
        """Remembers the calling thread's stream: the side stream will wait for it."""
        self._writers[block].add(torch.cuda.current_stream(self._device))

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Queues gather, scale and copy on the side stream."""
        # The caller's own stream, too: it may have made the last of these gradients.
        self.note(block)
        flat = self._on_device()[: self._sizes[block]]
        pinned = self._pinned[block] = self._vector(block)
        # Backward may use several streams. Each gradient must be complete before it is gathered.
        for stream in self._writers[block]:
            self._side.wait_stream(stream)
        self._writers[block].clear()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        self._done[block] = done
        with torch.cuda.stream(self._side), torch.no_grad():
            _gather(flat, gradients, self._shapes[block], scale)
            if self._gathered is not None:
                self._gathered(block, flat, gradients)
            pinned.copy_(flat, non_blocking=True)
            done.record(self._side)
        for gradient in gradients:
            # The script may drop the gradient before the side stream has read it. The allocator
            # must not hand its memory out until then.
            for part in _parts(gradient):
                part.record_stream(self._side)

    def _vector(self, block: int) -> torch.Tensor:
        """Pinned memory for a block's gradients."""
        lent, own = self._lend(block), self._own[block]
        if lent is not None and self._pin.register(lent[1]):
            self._own[block] = None
            return torch.from_numpy(lent[0])
        if own is None:
            own = torch.empty(self._sizes[block], dtype=torch.float32, pin_memory=True)
            self._own[block] = own
        return own

    def ready(self, block: int) -> bool:
        """Whether the copy's event has happened."""
        done = self._done[block]
        return done is not None and bool(done.query())  # type: ignore[no-untyped-call]  # torch has no types here

    def collect(self, block: int) -> torch.Tensor:
        """The pinned vector, after the copy's event."""
        pinned, done = self._pinned[block], self._done[block]
        assert pinned is not None, "collect before begin"
        assert done is not None, "collect before begin"
        done.synchronize()
        return pinned

    def put(self, block: int, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Queues the transfer on the side stream; the calling thread's stream waits for it."""
        elements = flat.numel()
        slot, free = self._slot()
        # The slot's previous transfer must be over before the host overwrites it.
        free.synchronize()
        source = slot[:elements]
        source.copy_(flat)
        present = torch.cuda.current_stream(self._device)
        target = self._on_device()[:elements]
        # The last writer of these gradients (backward, or the script) used the current stream.
        self._side.wait_stream(present)
        with torch.cuda.stream(self._side), torch.no_grad():
            target.copy_(source, non_blocking=True)
            for view, gradient in _views(target, gradients, self._shapes[block]):
                if gradient is not None:
                    gradient.copy_(view)
                    gradient.record_stream(self._side)
            free.record(self._side)
        # What the script queues next (clipping, the optimizer) reads the averages.
        present.wait_event(free)

    def close(self) -> None:
        """Lets the driver forget lent memory, which is unmapped when the line is closed."""
        self._pin.close()

    def _on_device(self) -> torch.Tensor:
        if self._beside is not None:
            return self._beside._on_device()
        if self._scratch is None:
            # On the side stream, so that the allocator knows which stream uses it.
            with torch.cuda.stream(self._side):
                self._scratch = torch.empty(
                    max(self._sizes), dtype=torch.float32, device=self._device
                )
        return self._scratch

    def _slot(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        if not self._slots:
            self._slots = [
                (
                    torch.empty(max(self._sizes), dtype=torch.float32, pin_memory=True),
                    torch.cuda.Event(),  # type: ignore[no-untyped-call]  # torch has no types here
                )
                for _ in range(2)
            ]
        self._turn = 1 - self._turn
        return self._slots[self._turn]


class TracedStaging:
    """A staging that records on a timeline how long the host takes part in its copies."""

    def __init__(self, staging: Staging, timeline: Timeline) -> None:
        """Does what `staging` does."""
        self.staging = self._staging = staging
        self._timeline = timeline
        self.note = staging.note
        self.ready = staging.ready
        self.close = staging.close

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Begins to copy a block's gradients."""
        began = time.perf_counter()
        self._staging.begin(block, gradients, scale)
        self._timeline.span_on(Track.COPIES, "to host", began, block=block)

    def collect(self, block: int) -> torch.Tensor:
        """The flat vector; waits for the copy."""
        if self._staging.ready(block):
            return self._staging.collect(block)
        began = time.perf_counter()
        flat = self._staging.collect(block)
        self._timeline.span_on(Track.COPIES, "wait for copy", began, block=block)
        return flat

    def put(self, block: int, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copies an average back."""
        began = time.perf_counter()
        self._staging.put(block, gradients, flat)
        self._timeline.span_on(Track.COPIES, "write back", began, block=block)


class PinnedMemory:
    """Keeps lent memory registered with the CUDA driver, so that a GPU copies straight into it."""

    def __init__(self, runtime: Any, synchronize: Callable[[], None]) -> None:
        """Registers nothing yet.

        Args:
            runtime: `torch.cuda.cudart()`, or a fake of it.
            synchronize: returns once no copy into registered memory is under way.
        """
        self._runtime = runtime
        self._synchronize = synchronize
        self._memory: Bytes | None = None
        self._refused: Bytes | None = None

    def register(self, memory: Bytes) -> bool:
        """Registers memory instead of the memory before it; False if the driver refuses."""
        if memory is self._memory:
            return True
        # Asked once for each memory: the driver would answer the same, and the log would repeat it.
        if memory is self._refused:
            return False
        # First: memory that was lent before is unmapped once nobody holds it, and must not be
        # registered then.
        self._unregister()
        failure = int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if failure:
            log.info(
                "the CUDA driver does not pin shared memory (error %d): gradients are copied once "
                "more",
                failure,
            )
            self._refused = memory
            return False
        self._memory = memory
        return True

    def close(self) -> None:
        """Ends what `register` began; a second call does nothing."""
        self._unregister()

    def _unregister(self) -> None:
        if self._memory is not None:
            # A copy that is under way would write to pages that may move.
            self._synchronize()
            self._runtime.cudaHostUnregister(self._memory.ctypes.data)
            self._memory = None
