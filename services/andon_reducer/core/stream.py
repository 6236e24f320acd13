"""Streams: what the core remembers of each, and what a message may not be by itself."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.encoding import Encoding
from andon.protocol.limits import MAX_ELEMENTS
from andon.protocol.messages import Abstain, BlockGradient, Operation
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.effects import Refusal
from andon_reducer.core.exchange import Place, place_of
from andon_reducer.core.mean import MEAN_ENCODINGS

__all__ = ["Limits", "Stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a chunk may be."""

    max_payload_bytes: int
    max_held_bytes: int = 2**62
    """Of all runs together."""
    chunk_elements: int | None = None
    """Chunks start at multiples of it and are no longer; None: anywhere, and of any length."""

    def __post_init__(self) -> None:
        """Refuses chunks without a byte or an element."""
        elements = 1 if self.chunk_elements is None else self.chunk_elements
        if self.max_payload_bytes < 1 or elements < 1:
            raise ValueError("a chunk has at least one element, and its payload one byte")


@dataclass(slots=True)
class Stream:
    """One stream of one worker."""

    number: int
    worker: int
    latest_term: int = 2**64 - 1
    """A key of a greater term is made up: believed, it would keep every other round out."""
    shared: bool = False
    """Whether its worker shares memory with the reducer."""
    last: tuple[Key, Place] | None = None
    """The last chunk that it brought; of a slice, the place of its last element."""
    parked: BlockGradient | None = None
    """What it brought when there was no room."""
    paused: bool = False
    """Whether it was told to wait, because of what is parked."""
    stale: Key | None = None
    """The last key of which it was told that it is stale."""

    def refusal(self, message: BlockGradient | Abstain, limits: Limits) -> Refusal | None:
        """Why the stream must end with this message; None if the message can be looked at."""
        if message.key.term > self.latest_term:
            text = (
                f"no coordinator had the term {message.key.term}: it is too far ahead of the clock"
            )
            return Refusal(Reason.INVALID_MESSAGE, text)
        if message.rank >= message.world_size:
            text = f"rank {message.rank} is beyond a world of {message.world_size}"
            return Refusal(Reason.INVALID_MESSAGE, text)
        if isinstance(message, Abstain):
            return None
        return (
            _not_offered(message)
            or _wrong_size(message, limits.max_payload_bytes)
            or _not_for_memory(message)
            or _off_grid(message, limits.chunk_elements)
            or self._out_of_order(message)
        )

    def _out_of_order(self, gradient: BlockGradient) -> Refusal | None:
        if self.last is None or gradient.key < self.last[0]:
            # An older key is answered as stale, which says more.
            return None
        if (gradient.key, place_of(gradient)) > self.last:
            return None
        place = f"block {gradient.block}, element {gradient.offset}"
        text = f"{place} came late: chunks rise by sequence, block and element on each stream"
        return Refusal(Reason.INVALID_MESSAGE, text)


def _not_offered(gradient: BlockGradient) -> Refusal | None:
    if gradient.operation is Operation.BROADCAST:
        if gradient.answer_encoding in (None, gradient.encoding):
            return None
        text = "a broadcast comes back as it was sent: leave answer_encoding out"
        return Refusal(Reason.NOT_OFFERED, text)
    if gradient.operation is not Operation.WEIGHTED_MEAN:
        text = f"{gradient.operation.name.lower()} is not offered by this reducer"
        return Refusal(Reason.NOT_OFFERED, text)
    for encoding in (gradient.encoding, gradient.answer_encoding or gradient.encoding):
        if encoding not in MEAN_ENCODINGS:
            text = f"means of {encoding.name.lower()} are not offered by this reducer"
            return Refusal(Reason.NOT_OFFERED, text)
    return None


def _wrong_size(gradient: BlockGradient, max_payload_bytes: int) -> Refusal | None:
    if gradient.count == 0 or gradient.offset + gradient.count > MAX_ELEMENTS:
        text = f"no chunk has {gradient.count} elements from element {gradient.offset} on"
        return Refusal(Reason.INVALID_MESSAGE, text)
    if gradient.slice is None and gradient.payload.nbytes > max_payload_bytes:
        text = (
            f"a payload of {gradient.payload.nbytes} bytes is above the limit of "
            f"{max_payload_bytes}: send smaller chunks"
        )
        return Refusal(Reason.TOO_LARGE, text)
    return None


def _not_for_memory(gradient: BlockGradient) -> Refusal | None:
    """Whether a slice holds what shared memory is not for."""
    if gradient.slice is None:
        return None
    if (
        gradient.operation is Operation.WEIGHTED_MEAN
        and gradient.group == 0
        and gradient.encoding is Encoding.FLOAT32
        and gradient.answer_encoding in (None, Encoding.FLOAT32)
    ):
        return None
    text = "slices of shared memory are for means of float32 of the whole roster: send bytes"
    return Refusal(Reason.NOT_OFFERED, text)


def _off_grid(gradient: BlockGradient, chunk_elements: int | None) -> Refusal | None:
    """Whether a chunk is not one into which every worker of the line cuts its blocks.

    A slice may hold several of them, one after the other.
    """
    if chunk_elements is None:
        return None
    if gradient.slice is None and gradient.count > chunk_elements:
        text = f"{gradient.count} elements are more than a chunk of this line, {chunk_elements}"
        return Refusal(Reason.INVALID_MESSAGE, text)
    if gradient.offset % chunk_elements:
        text = f"no chunk starts at element {gradient.offset}, but at multiples of {chunk_elements}"
        return Refusal(Reason.INVALID_MESSAGE, text)
    return None
