"""Held buffers: what an attempt at a step did to a model's buffers, and what they were before it.

Theory of operation. A forward may write to buffers: running statistics, the vectors of a spectral
norm, a codebook, a queue. An attempt that is void must leave no trace there, as it leaves none in
the weights. So they are copied when an attempt begins, and put back before the worker waits for the
next one.

What an attempt made of them belongs to its gradient. If that is sent again, they are taken out
again. If samples are added to it, their forward begins where that of the others began, as if all
had been one batch; what it makes of the buffers is dropped. So a step moves them once, however
often it is tried.

Buffers are looked up by their owners each time, since a forward may put another tensor in their
place. They are compared to tell which were written to: torch's count of writes misses those to
`buffer.data`. That count serves only for those that are too large to be copied in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from andon_trainer.model.layout import module_prefixes
from andon_trainer.model.wrappers import named_modules

__all__ = ["MOST_BYTES", "Held", "PlainBuffers"]

MOST_BYTES = 64 * 2**20
"""So many bytes of a script's buffers are copied in each step, the smallest first."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Buffers(Protocol):
    """Buffers that can be copied, and set."""

    def read(self) -> dict[str, torch.Tensor]:
        """A copy of all of them."""

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets them to what `read` returned."""


class Held:
    """Buffers as they were before an attempt, and after it. Used by one thread."""

    def __init__(self, buffers: _Buffers) -> None:
        """Holds nothing yet."""
        self._buffers = buffers
        self.start: dict[str, torch.Tensor] = {}
        """What they were when the step's first attempt began."""
        self.kept: dict[str, torch.Tensor] | None = None
        """What belongs to the gradient that is kept."""
        self._open = False
        """Whether an attempt was begun that is neither committed nor put away."""

    def begin(self, start: dict[str, torch.Tensor] | None = None) -> None:
        """An attempt begins, of which nothing is kept.

        Args:
            start: what buffers become if it is void; None: what they are now.
        """
        self.start = self._buffers.read() if start is None else start
        self.kept, self._open = None, True

    def add(self) -> None:
        """An attempt begins that sends the kept gradient again, or adds samples to it."""
        self._open = True

    def keep(self) -> None:
        """The last backward is over: what forward made of them belongs to its gradient."""
        if self.kept is None:
            self.note()
        else:
            self.take_out()

    def note(self) -> None:
        """What the buffers are now is what is kept."""
        self.kept = self._buffers.read()

    def take_out(self) -> None:
        """Sets what `keep` kept; what forward did since then is dropped."""
        if self.kept is not None:
            self._buffers.write(self.kept)

    def put_away(self) -> None:
        """The worker waits between two attempts: they are as before."""
        # Only if an attempt was begun: what a script writes between two steps stays.
        if self._open:
            self._buffers.write(self.start)
        self._open = False

    def close(self) -> None:
        """The attempt is committed."""
        self.kept, self._open = None, False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer is, and what it was like when it was found."""

    name: str
    owner: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def now(self) -> torch.Tensor | None:
        """The present tensor; None if it is of another kind than the one that was found."""
        buffer = self.owner._buffers.get(self.key)
        if buffer is None or (buffer.shape, buffer.dtype) != (self.shape, self.dtype):
            return None
        return None if buffer.is_inference() else buffer.detach()


class PlainBuffers:
    """The buffers of some modules that are of no normalisation layer, by their names."""

    def __init__(self, modules: Sequence[nn.Module], wanted: Callable[[nn.Module], bool]) -> None:
        """Finds those of the modules that are `wanted`, each once, in their order.

        What is copied and what is not is the same on all workers.
        """
        self._places: dict[str, _Place] = {}
        self._large: dict[str, _Place] = {}
        self._written: dict[str, tuple[int, int]] = {}
        """Of each large buffer, which tensor it was and how often that was written to."""
        found = {place.name: buffer for place, buffer in _search(modules, wanted)}
        left = MOST_BYTES
        small: set[str] = set()
        # Equal ones stay in the order of the search: all workers choose the same.
        for name, buffer in sorted(found.items(), key=lambda each: _bytes_of(each[1])):
            left -= _bytes_of(buffer)
            if left >= 0 and buffer.layout is torch.strided and not buffer.is_quantized:
                small.add(name)
        # In the order of registration, in which they travel.
        for place, _ in _search(modules, wanted):
            (self._places if place.name in small else self._large)[place.name] = place

    def __bool__(self) -> bool:
        """Whether any is copied."""
        return bool(self._places)

    @property
    def names(self) -> list[str]:
        """Of those that are copied."""
        return list(self._places)

    @property
    def outline(self) -> str:
        """Names, types and shapes, which must be the same on all workers."""
        places = self._places.values()
        return "\n".join(f"{each.name} {each.dtype} {tuple(each.shape)}" for each in places)

    def read(self) -> dict[str, torch.Tensor]:
        """A copy of each."""
        return {name: buffer.clone() for name, buffer in self.present().items()}

    def present(self) -> dict[str, torch.Tensor]:
        """Each, but for those that have another shape now."""
        places = ((name, place.now()) for name, place in self._places.items())
        return {name: buffer for name, buffer in places if buffer is not None}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets those that have other values."""
        changed = self.changed(values)
        with torch.no_grad():
            # Not the others: an expanded tensor, such as a mask, can't be written to.
            for name, buffer in self.present().items():
                if name in changed:
                    buffer.copy_(values[name])

    def blank(self, name: str) -> torch.Tensor:
        """A tensor like a buffer, or the buffer itself."""
        place = self._places[name]
        buffer = place.now()
        return torch.zeros(place.shape, dtype=place.dtype) if buffer is None else buffer

    def changed(
        self, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor] | None = None
    ) -> list[str]:
        """The names of those that are not what they were, bit for bit.

        `now`: what they are; None: the present values.
        """
        both = [
            (name, _bits(before[name].to(buffer.device)), _bits(buffer))
            for name, buffer in (self.present() if now is None else now).items()
            if name in before
        ]
        here = [each for each in both if each[2].device.type == "cpu"]
        there = [each for each in both if each[2].device.type != "cpu"]
        names = [name for name, old, now in here if not torch.equal(old, now)]
        if there:
            # A GPU is waited for once, and not for each buffer.
            flags = [(old != now).any() for _, old, now in there]
            differ = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
            names += [each[0] for each, differs in zip(there, differ, strict=True) if differs]
        return names

    def watch(self) -> None:
        """An attempt begins: `check` looks for writes to large buffers from now on."""
        self._written = {name: _write_count(place) for name, place in self._large.items()}

    def check(self) -> None:
        """Raises RuntimeError if a buffer was written to that can't be copied in each step."""
        for name, count in self._written.items():
            place = self._large[name]
            if count != _write_count(place):
                raise RuntimeError(
                    f"the loop body changes the buffer {name}, which is too large, or of a kind, "
                    f"to be copied in each step (up to {MOST_BYTES >> 20} MiB are, the smallest "
                    "first): the workers' would become different. Make it smaller, or change it "
                    "under `if line.committed:` from what is the same on all workers"
                )


def _search(
    modules: Sequence[nn.Module], wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[_Place, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, root in zip(module_prefixes(modules), modules, strict=True):
        for path, module in named_modules(root):
            for key, buffer in module._buffers.items() if wanted(module) else ():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = prefix + (f"{path}.{key}" if path else key)
                    yield _Place(name, module, key, buffer.shape, buffer.dtype), buffer


def _bytes_of(buffer: torch.Tensor) -> int:
    return buffer.numel() * buffer.itemsize


def _write_count(place: _Place) -> tuple[int, int]:
    buffer = place.owner._buffers[place.key]
    if buffer is None or buffer.is_inference():
        return 0, 0  # It does not count its writes.
    return id(buffer), buffer._version


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers: nan is equal to nan, and types can be compared that can't."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.itemsize])
