"""What comes over one lane of a peer, to where it belongs.

Theory of operation. A lane's thread reads a head, asks where its payload goes, reads it there, and
tells the group. A piece that is the last input of a reduction goes nowhere: it is added as it
comes, while it is in the processor's cache. What is of a group that this rank has not made is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from andon.protocol.peer_calls import MAX_PIECE_BYTES
from andon.protocol.peer_frames import Begin, LaneEnd, Piece
from andon.tcp.receiving import FrameReader
from andon.wire.checksums import extended
from andon.wire.fields import FrameError
from andon.wire.peer_frames import PeerHead, crc32c_of, parse_head
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_flow import PeerViolation
from andon_trainer.core.send_calls import SendCalls
from andon_trainer.peers.collective import PeerGroup
from andon_trainer.peers.lane_calls import Landing

__all__ = ["Core", "Groups", "rank_in", "reader_of"]

_SOME_BYTES = 2**18
"""What is received before it is worked on: so much stays in a core's cache."""

Core = GroupCalls | SendCalls


class Groups(Protocol):
    """Knows whose frames come."""

    @property
    def checksums(self) -> bool:
        """Whether all ranks have `crc32c.v1`."""

    def found(self, number: int) -> tuple[PeerGroup, Core] | None:
        """The group whose frames have a number; None: it is not made yet."""

    def claim(self, peer: int, frame: Begin | Piece) -> bool:
        """Makes room for a frame of a group that is not made; False: it was made meanwhile.

        Raises:
            PeerViolation: it may not come yet.
        """

    def keep(self, peer: int, frame: Begin | Piece, kept: memoryview | None) -> None:
        """Keeps a frame of a group that is not made; hands it over if it was made meanwhile."""

    def end_of(self, peer: int) -> None:
        """A peer's LaneEnd came."""


def reader_of(groups: Groups, peer: int) -> FrameReader[PeerHead]:
    """What is done with the frames of a peer, a rank of the session."""
    reading = _Reading(groups, peer)
    return FrameReader(
        parse=reading.parse,
        place=reading.place,
        received=reading.received,
        ended=lambda error: None,
        max_payload_bytes=MAX_PIECE_BYTES,
    )


def rank_in(group: PeerGroup, peer: int) -> int:
    """The rank in a group of a rank of the session.

    Raises:
        PeerViolation: it is not one of it.
    """
    if peer not in group.ranks:
        raise PeerViolation(f"rank {peer} is not one of group {group.name}")
    return group.ranks.index(peer)


class _Reading:
    """What is done with one peer's frames, on the thread that reads its lane."""

    def __init__(self, groups: Groups, peer: int) -> None:
        self._groups, self._peer = groups, peer
        self._landed: Landing | memoryview | None = None
        """Where the payload of the present frame goes, or all of it, if it came too early."""
        self._crc32c: int | None = None
        """Of the present frame, as far as it came."""
        self._room: memoryview | None = None
        """For what is reduced on its way."""
        self._strange = False
        """Whether it is of a group that is not made."""

    def parse(self, head: memoryview, payload_bytes: int) -> PeerHead:
        return parse_head(head, payload_bytes, checksums=self._groups.checksums)

    def place(self, head: PeerHead, size: int) -> memoryview | Iterable[memoryview]:
        piece = head.frame
        assert isinstance(piece, Piece), "only a Piece has a payload"
        landing = None
        try:
            found = self._found(piece)
            if found is not None:
                group, core = found
                landing = group.lanes.landing(core, rank_in(group, self._peer), piece)
        except PeerViolation as violation:
            raise FrameError(str(violation)) from None
        self._strange = found is None
        self._crc32c = None if head.crc32c is None else crc32c_of(piece)
        if landing is None:
            self._landed = kept = memoryview(bytearray(size))
            return self._whole([kept])
        self._landed = landing
        if landing.some is None:
            return self._whole(landing.views)
        assert found is not None
        return self._added(found, landing, size)

    def _whole(self, views: Sequence[memoryview]) -> Iterator[memoryview]:
        for view in views:
            for start in range(0, view.nbytes, _SOME_BYTES):
                some = view[start : start + _SOME_BYTES]
                yield some
                # Whoever receives asks for the next one, or for the end, once this one is full.
                if self._crc32c is not None:
                    self._crc32c = extended(self._crc32c, some)

    def _added(
        self, found: tuple[PeerGroup, Core], landing: Landing, size: int
    ) -> Iterator[memoryview]:
        group, core = found
        if self._room is None:
            self._room = memoryview(bytearray(_SOME_BYTES))
        for start in range(0, size, _SOME_BYTES):
            some = self._room[: min(_SOME_BYTES, size - start)]
            yield some
            if self._crc32c is not None:
                self._crc32c = extended(self._crc32c, some)
            # The room is used again for the next ones.
            group.lanes.add(core, landing, some)

    def received(self, head: PeerHead, payload: memoryview, size: int) -> None:
        del payload, size
        landed, self._landed = self._landed, None
        frame = head.frame
        if isinstance(frame, LaneEnd):
            self._groups.end_of(self._peer)
            return
        try:
            found = None
            if isinstance(frame, Begin):
                found = self._found(frame)
            else:
                if self._crc32c != head.crc32c:
                    raise FrameError(
                        f"a piece of {frame.length} bytes does not match its checksum: the "
                        "network, or a machine's memory, changed it on its way"
                    )
                if not self._strange:
                    found = self._groups.found(frame.group)
            if found is None:
                self._groups.keep(
                    self._peer, frame, landed if isinstance(landed, memoryview) else None
                )
                return
            group, core = found
            place = rank_in(group, self._peer)
            if isinstance(frame, Begin):
                group.lanes.begun(core, place, frame)
            else:
                assert landed is not None, "a piece lies somewhere"
                group.lanes.landed(core, place, frame, landed)
        except PeerViolation as violation:
            raise FrameError(str(violation)) from None

    def _found(self, frame: Begin | Piece) -> tuple[PeerGroup, Core] | None:
        """The group of a frame; None: it is not made yet, and there is room for the frame.

        Raises:
            PeerViolation: it may not come yet.
        """
        found = self._groups.found(frame.group)
        if found is None and not self._groups.claim(self._peer, frame):
            found = self._groups.found(frame.group)
        return found
