"""A snapshot: the state of a replica at one moment, while training goes on.

Theory of operation. A snapshot is cut where the script waits in its loader: the optimizers,
schedulers and averages of the last step have run, and no forward of the next one has moved a
buffer. What is small, and what the next forward may write, is copied right there. The large rest
is written by the steps of optimizers only: parameters, and the optimizers' own states. A thread
copies it beside forward and backward (`complete`), and the next step of any optimizer of this
process waits until that is done. Torch calls a hook before each of them, whoever calls the step:
the script, a gate, or the line itself.

A script may write weights itself, and a state may arrive from another worker. So after the copy it
is looked whether it is that of the cut. Torch counts the writes to each tensor, but not all: none
by `.data`, none of a fused optimizer. So the bytes of each copy must have the sum that the tensor's
had at the cut, too. To sum up takes a third of the time of a copy, and no memory. If anything
differs, the snapshot is torn, and of no use: whoever wanted it cuts another one, with everything
copied at once.

The copies lie in memory that is used again for the next snapshot, be it a checkpoint or a state for
another worker: see `CopyRooms`. To get that much memory from the system takes many times as long as
to copy into it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from andon.host.memory import available_bytes
from andon.host.priority import give_way
from andon_trainer.state.base import sum_of_bytes
from andon_trainer.state.file_work import NICENESS
from andon_trainer.state.trees import is_dense, map_tensors, plain_tensor

__all__ = ["LARGE_BYTES", "CopyRoom", "CopyRooms", "Snapshot", "is_ample", "large_bytes_of"]

LARGE_BYTES = 2**20
"""From this size on a tensor on the CPU is copied beside training, and into memory used before."""
_ALIGNMENT = 64
"""Of each tensor's copy."""
_PAGE_BYTES = 4096
_PART_OF_MEMORY = 8
"""What is at most one part in so many of what the machine has left is little."""


class CopyRoom:
    """Memory for the copies of one snapshot at a time. Used by one thread at a time."""

    def __init__(self) -> None:
        """Has none yet."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def get(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        """So many bytes with any content: those of before, if they are enough.

        Args:
            size: in bytes.
            pinned: whether a GPU is to copy into it.
        """
        if self._memory.numel() < size or pinned > self._pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # First: both may be too much.
            self._memory, self._pinned = _new_memory(size, pinned=pinned), pinned
        return self._memory[:size]

    def touch(self, size: int, *, pinned: bool = False) -> None:
        """Gets memory from the system ahead of a snapshot, which takes a while."""
        self.get(size, pinned=pinned).numpy()[::_PAGE_BYTES] = 0


class CopyRooms:
    """A worker's memory for copies of its state: one room, which is lent to one copy after another.

    Lent and let go by the training thread, given back by any.
    """

    def __init__(self) -> None:
        """Has a room without memory."""
        self._kept: CopyRoom | None = CopyRoom()

    def lend(self) -> CopyRoom:
        """The room; while another copy lies there, a new one, for this copy alone."""
        room, self._kept = self._kept, None
        return CopyRoom() if room is None else room

    def give_back(self, room: CopyRoom) -> None:
        """Nobody reads any more what lies in a room that was lent."""
        if self._kept is None:
            self._kept = room

    def getting(self, size: int, *, pinned: bool) -> Callable[[], None]:
        """What gets memory from the system ahead of a copy. It has to be called, on a thread of its
        own, which yields to others.

        Args:
            size: in bytes.
            pinned: whether a GPU is to copy into it.
        """
        room = self.lend()

        def get() -> None:
            give_way(NICENESS)
            with suppress(OSError, RuntimeError):  # Whoever needs it then says so.
                room.touch(size, pinned=pinned)
            self.give_back(room)

        return get

    def let_go(self) -> None:
        """Gives the memory back to the system, unless it is lent."""
        self._kept = None


def is_ample(size: int) -> bool:
    """Whether so many bytes are little beside what this machine has left."""
    available = available_bytes()
    return available is not None and size <= available // _PART_OF_MEMORY


def _new_memory(size: int, *, pinned: bool) -> torch.Tensor:
    if pinned and size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    # Private: a child that the script forks has no part in it.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # Large pages are got much more quickly, where the system has them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(slots=True)
class _Part:
    """A large tensor."""

    source: torch.Tensor
    """Its memory at the cut, even if it gets another one afterwards (`p.data = ...`)."""
    original: torch.Tensor
    """The tensor itself, of which torch counts the writes."""
    copy: torch.Tensor
    """Has no memory before it is copied into."""
    version: int = 0
    sum: torch.Tensor | None = None
    """Of its bytes at the cut; None: it is copied at the cut."""


class Snapshot:
    """A tree of state at one moment. Cut and closed by one thread, completed by any."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        late: Collection[int] = (),
        *,
        rooms: CopyRooms,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        """Cuts it: copies what `complete` does not.

        Args:
            tree: nested dicts, lists and tuples of tensors and plain values.
            late: ids of the tensors that the steps of optimizers write.
            rooms: lend one for the large copies, until the snapshot is closed.
            large_bytes: what is smaller, and not on a GPU, is copied now.
        """
        self._rooms = rooms
        self._room: CopyRoom | None = rooms.lend()
        self._may_be_late = frozenset(late)
        self._large_bytes = large_bytes
        self._late: dict[int, _Part] = {}
        """What is copied beside training, by the tensors' ids."""
        self._now: dict[int, _Part] = {}
        """What is large and copied now."""
        self._copied = threading.Event()
        self._torn = False
        self.large_bytes = 0
        """How much of it is large."""
        self._unhook: Callable[[], None] = lambda: None
        self.tree: dict[str, Any] = map_tensors(tree, self._take)
        """The state in host memory, once the snapshot is complete."""
        self._give_memory()
        for part in self._now.values():
            _copy(part)
        if not self._late:
            self._copied.set()
            return
        gpus = {part.source.device for part in self._late.values() if part.source.is_cuda}
        # The copies wait for what the script's thread has queued until now, and for nothing else.
        self._cut_on = {each: torch.cuda.current_stream(each).record_event() for each in gpus}
        self._unhook = register_optimizer_step_pre_hook(self._before_step).remove

    def complete(self) -> bool:
        """Copies what is left; returns whether all of it is of the moment of the cut."""
        if not self._copied.is_set():
            try:
                self._copy_late()
            finally:
                # Whatever happened: optimizers wait for it.
                self._copied.set()
            # After that, since nobody has to wait for it.
            self._torn = self._torn or not all(map(_has_sum_of_cut, self._late.values()))
        return not self._torn

    def close(self, *, keeps_room: bool = True) -> None:
        """No optimizer waits for it, and nobody reads it any more; a second call does nothing.

        Args:
            keeps_room: whether the memory of its copies is kept for the next one.
        """
        unhook, self._unhook = self._unhook, lambda: None
        unhook()
        room, self._room = self._room, None
        if room is not None and keeps_room:
            self._rooms.give_back(room)

    # ------------------------------------------------------------------ the cut

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's copy, or what will be that."""
        if not is_dense(tensor):
            return tensor  # It is refused where it is packed.
        known = self._late.get(id(tensor)) or self._now.get(id(tensor))
        if known is not None:
            return known.copy
        if self._is_late(tensor):
            part = self._late[id(tensor)] = _part_of(tensor)
            part.version, part.sum = tensor._version, sum_of_bytes(part.source)
            return part.copy
        plain = plain_tensor(tensor, "a tensor")
        if plain.data_ptr() != tensor.data_ptr() or not plain.numel():
            return plain  # It is a copy already.
        if plain.nbytes < self._large_bytes:
            return plain.clone()
        part = self._now[id(tensor)] = _part_of(tensor)
        return part.copy

    def _is_late(self, tensor: torch.Tensor) -> bool:
        return (
            id(tensor) in self._may_be_late
            and (tensor.is_cuda or tensor.nbytes >= self._large_bytes)
            # What lies otherwise is put in order now.
            and tensor.is_contiguous()
            # Else its bytes are summed up in another way than those of the copy.
            and tensor.storage_offset() * tensor.element_size() % 8 == 0
            and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        )

    def _give_memory(self) -> None:
        """Gives each large tensor the place of its copy."""
        parts = [*self._late.values(), *self._now.values()]
        places, size = [], 0
        for part in parts:
            places.append(size)
            size += _aligned(part.source.nbytes)
        self.large_bytes = size
        assert self._room is not None
        memory = self._room.get(size, pinned=any(part.source.is_cuda for part in parts))
        for part, at in zip(parts, places, strict=True):
            flat = memory[at : at + part.source.nbytes]
            # The copy is in the tree already.
            part.copy.set_(flat.view(part.source.dtype).view(part.source.shape))  # type: ignore[call-overload]  # torch's types lack it

    # ------------------------------------------------------------------ beside training

    def _copy_late(self) -> None:
        parts = list(self._late.values())
        for part in parts:
            if not part.source.is_cuda:
                _copy(part)
        for device, cut in self._cut_on.items():
            _copy_from(device, cut, [part for part in parts if part.source.device == device])
        self._torn = any(part.original._version != part.version for part in parts)

    def _before_step(self, _optimizer: Optimizer, *_given: Any) -> None:
        """Torch's hook: an optimizer of this process is about to step."""
        self._copied.wait()


def large_bytes_of(tree: Mapping[str, Any], large_bytes: int = LARGE_BYTES) -> int:
    """How much memory a snapshot of a tree needs for what is large."""
    sizes: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if is_dense(tensor) and (tensor.is_cuda or tensor.nbytes >= large_bytes):
            sizes[id(tensor)] = _aligned(tensor.nbytes)
        return tensor

    map_tensors(tree, see)
    return sum(sizes.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _part_of(tensor: torch.Tensor) -> _Part:
    return _Part(tensor.detach(), tensor, torch.empty(0, dtype=tensor.dtype))


def _copy(part: _Part) -> None:
    # By NumPy, which lets other threads run meanwhile, and begins none of its own.
    part.copy.view(-1).view(torch.uint8).numpy()[:] = part.source.view(-1).view(torch.uint8).numpy()


def _copy_from(device: torch.device, cut: torch.cuda.Event, parts: list[_Part]) -> None:
    """Copies from a GPU, on a stream of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
    stream.wait_event(cut)
    with torch.cuda.stream(stream):
        for part in parts:
            part.copy.copy_(part.source, non_blocking=True)
            if part.sum is not None:
                # Its memory is the other stream's, and must not be used again before it is read.
                part.sum.record_stream(stream)
                part.sum = part.sum.to("cpu", non_blocking=True)
    stream.synchronize()


def _has_sum_of_cut(part: _Part) -> bool:
    return part.sum is None or int(part.sum) == int(sum_of_bytes(part.copy))
