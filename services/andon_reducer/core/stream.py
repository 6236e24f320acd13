"""Streams: what the core remembers of each, and which messages it refuses at once.

The checks here need one message, its stream and the limits. Checks against other ranks are in
`core.exchange`: they void a round, while a refusal ends one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol import sparse
from andon.protocol.encoding import Encoding, answers_defect
from andon.protocol.limits import MAX_ELEMENTS
from andon.protocol.messages import Abstain, BlockGradient, Operation
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.wire.checksums import is_intact
from andon_reducer.core.effects import CallRefusal
from andon_reducer.core.exchange import Place, answer_encoding_of, last_place_of, place_of
from andon_reducer.core.mean import MEAN_ENCODINGS, TRIMMED_ENCODINGS

__all__ = ["BRINGS_NOTHING", "ChunkLimits", "StreamState"]

BRINGS_NOTHING = CallRefusal(
    Reason.INVALID_MESSAGE,
    "the stream was opened to listen, and brought a message of a round: send nothing on it",
)
"""Refuses whatever comes on a listening stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """Limits on chunks, and on what all of them together may hold."""

    max_payload_bytes: int
    max_held_bytes: int = 2**62
    """Of all runs together."""
    chunk_elements: int | None = None
    """Chunks start at multiples of it and are no longer; None: anywhere, and of any length."""

    def __post_init__(self) -> None:
        """Refuses limits below one byte or one element."""
        elements = 1 if self.chunk_elements is None else self.chunk_elements
        if self.max_payload_bytes < 1 or elements < 1:
            raise ValueError("a chunk has at least one element, and its payload one byte")


@dataclass(slots=True, eq=False)
class StreamState:
    """One stream of one worker."""

    number: int
    worker: int
    latest_term: int = 2**64 - 1
    """Greater terms are refused: a made-up key above all others would block every real round."""
    shared: bool = False
    """Whether its worker shares memory with the reducer."""
    listens: bool = False
    """Whether it only listens; see `core.listeners`."""
    last: tuple[Key, Place] | None = None
    """The last chunk that it brought; of a slice, the place of its last element."""
    last_node: tuple[Key, Place, int] | None = None
    """Where the last node that it brought begins, and its first grain; None: it was no node."""
    parked: BlockGradient | None = None
    """A contribution that waits for room in the window."""
    paused: bool = False
    """Whether the adapter was asked to stop reading, because of what is parked."""
    stale: Key | None = None
    """The last key that was answered as stale."""

    def refusal(self, message: BlockGradient | Abstain, limits: ChunkLimits) -> CallRefusal | None:
        """Why this message must end the stream; None if it may be processed."""
        if self.listens:
            return BRINGS_NOTHING
        if message.key.term > self.latest_term:
            text = (
                f"the term {message.key.term} is too far ahead of the clock: no coordinator can "
                "have issued it"
            )
            return CallRefusal(Reason.INVALID_MESSAGE, text)
        if message.rank >= message.world_size:
            text = f"rank {message.rank} is not below the world size {message.world_size}"
            return CallRefusal(Reason.INVALID_MESSAGE, text)
        if isinstance(message, Abstain):
            return None
        return (
            _not_offered(message)
            or _not_by_node(message)
            or _wrong_size(message, limits.max_payload_bytes)
            or _unsound(message)
            or _not_for_memory(message)
            or _off_grid(message, limits.chunk_elements)
            or self._out_of_order(message)
        )

    def brought(self, gradient: BlockGradient) -> None:
        """Notes a contribution that was not refused: the next one must come after it."""
        last, node = (gradient.key, last_place_of(gradient)), gradient.node
        self.last = last if self.last is None else max(self.last, last)
        self.last_node = None if node is None else (gradient.key, place_of(gradient), node.first)

    def _out_of_order(self, gradient: BlockGradient) -> CallRefusal | None:
        # The window cannot deadlock only because places rise on every stream; see `core.run`.
        if self.last is None or gradient.key < self.last[0]:
            # An older key is answered with StaleRound later, which says more.
            return None
        if (gradient.key, place_of(gradient)) > self.last:
            return None
        node, before = gradient.node, self.last_node
        if node is not None and before is not None:
            # Nodes of one chunk follow each other, by their grains.
            here = gradient.key, place_of(gradient)
            if before[:2] == here and before[2] < node.first:
                return None
        place = f"block {gradient.block}, element {gradient.offset}"
        order = (
            "sequence, block, element and first grain" if node else "sequence, block and element"
        )
        text = f"{place} is out of order: send chunks by {order} on each stream"
        return CallRefusal(Reason.INVALID_MESSAGE, text)


def _not_offered(gradient: BlockGradient) -> CallRefusal | None:
    if gradient.operation is Operation.BROADCAST:
        if gradient.answer_encoding in (None, gradient.encoding):
            return None
        text = "a broadcast comes back as it was sent: leave answer_encoding out"
        return CallRefusal(Reason.NOT_OFFERED, text)
    if not gradient.operation.is_mean:
        text = f"{gradient.operation.name.lower()} is not offered by this reducer"
        return CallRefusal(Reason.NOT_OFFERED, text)
    answer = answer_encoding_of(gradient)
    trims = gradient.operation is Operation.TRIMMED_MEAN
    for encoding in (gradient.encoding, answer):
        if encoding not in (TRIMMED_ENCODINGS if trims else MEAN_ENCODINGS):
            means = "trimmed means" if trims else "means"
            text = f"{means} of {encoding.label} are not offered by this reducer"
            return CallRefusal(Reason.NOT_OFFERED, text)
    if text := answers_defect(gradient.encoding, answer):
        return CallRefusal(Reason.NOT_OFFERED, text)
    return None


def _not_by_node(gradient: BlockGradient) -> CallRefusal | None:
    """Refuses a node of what is not added along the tree."""
    if gradient.node is None or (
        gradient.operation is Operation.WEIGHTED_MEAN
        and gradient.group == 0
        and gradient.encoding is Encoding.FLOAT32
    ):
        return None
    text = "a node is a sum of float32, for the weighted mean of the whole roster"
    return CallRefusal(Reason.INVALID_MESSAGE, text)


def _wrong_size(gradient: BlockGradient, max_payload_bytes: int) -> CallRefusal | None:
    if gradient.count == 0 or gradient.offset + gradient.count > MAX_ELEMENTS:
        text = (
            f"a chunk of {gradient.count} elements at element {gradient.offset}: it must have at "
            f"least one, and end at or before {MAX_ELEMENTS}"
        )
        return CallRefusal(Reason.INVALID_MESSAGE, text)
    size = gradient.payload.nbytes
    if gradient.encoding is Encoding.TOPK:
        # A short list may be of very many elements, and its mean is made of all of them.
        size = max(size, gradient.encoding.payload_bytes(gradient.count))
    if gradient.slice is None and size > max_payload_bytes:
        text = (
            f"a payload of {size} bytes is above the limit of "
            f"{max_payload_bytes}: send smaller chunks"
        )
        return CallRefusal(Reason.TOO_LARGE, text)
    return None


def _unsound(gradient: BlockGradient) -> CallRefusal | None:
    """Refuses a list of elements that contradicts itself. Other encodings can't."""
    if gradient.encoding is not Encoding.TOPK or gradient.operation is not Operation.WEIGHTED_MEAN:
        return None
    defect = sparse.defect_of(gradient.payload, gradient.count)
    # What the network changed is no fault of the worker's: `core.jobs` says so.
    if not defect or (gradient.crc32c is not None and not is_intact(gradient)):
        return None
    return CallRefusal(Reason.INVALID_MESSAGE, f"a payload of topk: {defect}")


def _not_for_memory(gradient: BlockGradient) -> CallRefusal | None:
    """Refuses a slice of anything but what arenas have a place for."""
    if gradient.slice is None:
        return None
    if (
        gradient.operation.is_mean
        and gradient.group == 0
        and gradient.encoding is Encoding.FLOAT32
        and gradient.answer_encoding in (None, Encoding.FLOAT32)
    ):
        return None
    text = "slices of shared memory are for means of float32 of the whole roster: send bytes"
    return CallRefusal(Reason.NOT_OFFERED, text)


def _off_grid(gradient: BlockGradient, chunk_elements: int | None) -> CallRefusal | None:
    """Refuses a chunk that is not one into which every worker of the line cuts its blocks.

    A slice may hold several of them, one after the other.
    """
    # Chunks are matched by where they begin. One off the grid would wait for partners that never
    # come, and hold a part of the window until its stream ends.
    if chunk_elements is None:
        return None
    if gradient.slice is None and gradient.count > chunk_elements:
        text = f"{gradient.count} elements are more than a chunk of this line, {chunk_elements}"
        return CallRefusal(Reason.INVALID_MESSAGE, text)
    if gradient.offset % chunk_elements:
        text = (
            f"a chunk starts at element {gradient.offset}, but chunks of this line start at "
            f"multiples of {chunk_elements}"
        )
        return CallRefusal(Reason.INVALID_MESSAGE, text)
    return None
