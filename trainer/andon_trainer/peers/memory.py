"""Memory that the ranks of one host share: its files, its words, and how they are waited for.

Theory of operation. Each rank of a group makes one file, which all its neighbours map. It alone
writes there: its words, what it is about to do, and two slots for the parts that it gives. A
word says how many parts its owner has given, or has taken of all others; so nobody needs a lock,
and a part may be written over once all have taken it. Waiting is the kernel's: whoever changes a
word wakes those who sleep on it. No sleep is longer than a tenth of a second without a look
whether the session is over.

A file has a name of its own for each neighbour, which only the two know: it follows from the token
of the lane from its owner to that neighbour. Whoever has mapped a file removes the name it used.
A rank that can't share memory leaves empty files at these names, so all give up, and use lanes.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.arena import NONCE_BYTES, SharedMemoryUnavailable, map_file
from andon.host.arena_file import ArenaFile, EmptyFile, sweep
from andon.protocol.encoding import fused
from andon.protocol.records import Key
from andon_trainer.core.announcement import ANNOUNCEMENT_BYTES, MAX_NEIGHBOURS, Announcement

__all__ = [
    "MEMORY_CAPABILITY",
    "SLOT_BYTES",
    "CallDiffers",
    "Neighbour",
    "NeighbourLeft",
    "NeighbourMemory",
    "Still",
    "can_share",
]

MEMORY_CAPABILITY = "session-memory.v1"
"""What a rank lists in Attend if it can share memory in this way."""
SLOT_BYTES = 2**20
"""The length of a slot, unless the session says otherwise."""

_MAPPED, _GIVEN, _TAKEN, _OVER = 64, 128, 192, 256
"""Where the words are."""
_ANNOUNCED, _SLOTS = 1024, 4096
_ALL_MAPPED, _REFUSED = 1, 2
_ENDED, _LEFT = 1, 2
_LOOK_S = 0.1
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.01
_U32 = 2**32

Still = Callable[[tuple[int, ...]], None]
"""Called at least every tenth of a second while ranks of the session are waited for, with these.

It raises to end the call, and must if the session is over."""


class CallDiffers(Exception):
    """A neighbour made another call, or gives another number of bytes than is expected."""

    def __init__(self, rank: int, mine: Announcement, theirs: Announcement | None) -> None:
        """`theirs` is None if it can't be read; `rank` is one of the session."""
        super().__init__(f"rank {rank} made another call")
        self.rank = rank
        self.mine = mine
        self.theirs = theirs


class NeighbourLeft(Exception):
    """A neighbour that a call needs has left the session."""

    def __init__(self, rank: int) -> None:
        """`rank` is one of the session."""
        super().__init__(f"rank {rank} has left")
        self.rank = rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A rank that shares memory."""

    rank: int
    """Its rank in the session."""
    token_to: bytes = b""
    """The token of the lane to it; see `Peer`."""
    token_from: bytes = b""
    """The token of the lane from it. Both are empty for this rank itself."""


def can_share() -> bool:
    """Whether this process can share memory with others: on Linux, with the compiled part."""
    return fused is not None and hasattr(fused, "wait_word")


class NeighbourMemory:
    """The memory that this rank shares with its neighbours in one group.

    One thread makes its calls; `end` and `leave` may be called by any.
    """

    def __init__(
        self,
        folder: Path,
        key: Key,
        group: int,
        neighbours: Sequence[Neighbour],
        rank: int,
        *,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Nothing is made before `open`.

        Args:
            folder: where the files are made.
            key: the session.
            group: the group's number.
            neighbours: all that share memory, this rank too, in the order of the group.
            rank: this rank.
            slot_bytes: the length of a slot; a multiple of 64, and the same for all.
        """
        self.ranks = tuple(each.rank for each in neighbours)
        self.me = self.ranks.index(rank)
        self.slot_bytes = slot_bytes
        self.part = 0
        """The number of the next part."""
        self.missing: tuple[int, ...] = ()
        """Ranks that are waited for."""
        self.files: tuple[mmap.mmap, ...] = ()
        """All neighbours' files, once they are mapped."""
        self.opened = False
        """Whether all neighbours share memory."""
        self._folder = folder
        self._key = key
        self._group = group
        self._neighbours = tuple(neighbours)
        self._announced = 0
        self._file: ArenaFile | None = None
        self._empty: EmptyFile | None = None
        self._slots: tuple[tuple[memoryview, memoryview], ...] = ()
        self._still: Still = lambda _: None
        self._over = 0

    def open(self, still: Still) -> None:
        """Makes the own file, and waits until all neighbours have mapped each other's.

        Raises:
            SharedMemoryUnavailable: one of them can't. All get this error, and use lanes.
            Exception: what `still` raised.
        """
        self._still = still
        mine: ArenaFile | None = None
        try:
            if len(self.ranks) > MAX_NEIGHBOURS:
                raise SharedMemoryUnavailable(f"more than {MAX_NEIGHBOURS} ranks are on one host")
            sweep(self._folder)
            size = _SLOTS + 2 * self.slot_bytes
            mine = ArenaFile(self._folder, size, nonce=self._nonce(self.ranks[self.me]))
            self._file = mine
            self._tell_over()
            mine.rename(self._names_for_others())
            self.files = tuple(
                mine.memory if each.rank == self.ranks[self.me] else self._map(each, size)
                for each in self._neighbours
            )
        except SharedMemoryUnavailable:
            self._refuse(mine)
            raise
        assert fused is not None
        fused.set_word(mine.memory, _MAPPED, _ALL_MAPPED)
        self._wait(_MAPPED, _ALL_MAPPED)
        for rank, file in zip(self.ranks, self.files, strict=True):
            if _word(file, _MAPPED) != _ALL_MAPPED:
                raise SharedMemoryUnavailable(f"rank {rank} could not map the others' memory")
        self._slots = tuple(self._slots_of(file) for file in self.files)
        self.opened = True

    def end(self) -> None:
        """The session is over: nobody waits any longer, here or in a neighbour."""
        self._over = self._over or _ENDED
        self._tell_over()

    def leave(self) -> None:
        """This rank makes no more calls: a neighbour that waits for one gets NeighbourLeft."""
        self._over = self._over or _LEFT
        self._tell_over()

    def close(self) -> None:
        """Removes all names, of dead neighbours' files too. The memory goes when nobody maps it."""
        for mine in (self._file, self._empty):
            if mine is not None:
                mine.unlink()
        for each in self._neighbours:
            if each.rank != self.ranks[self.me]:
                # A file of another user at that name stays.
                with suppress(OSError):
                    (self._folder / self._name(each.token_from)).unlink()
        # A neighbour that was killed may have left names that only it and another dead one knew.
        sweep(self._folder)

    # Words and slots, for the calls.

    def announce(self, still: Still, announcement: Announcement) -> tuple[int, int]:
        """Writes what comes next. Returns where it is, and how many bytes of it are compared."""
        self._still = still
        at = _ANNOUNCED * (1 + self._announced % 2)
        # The one of two announcements ago was read by all: each has given a part since.
        self._announced += 1
        data = announcement.packed()
        self.files[self.me][at : at + len(data)] = data
        return at, len(announcement.compared())

    def announcements(self, at: int, mine: Announcement) -> list[Announcement]:
        """All neighbours' announcements.

        Raises:
            CallDiffers: one is not of the same call.
        """
        found = []
        for rank, file in zip(self.ranks, self.files, strict=True):
            data = file[at : at + ANNOUNCEMENT_BYTES]
            try:
                theirs = Announcement.unpack(data, len(self.ranks))
            except ValueError:
                raise CallDiffers(rank, mine, None) from None
            if not data.startswith(mine.compared()):
                raise CallDiffers(rank, mine, theirs)
            found.append(theirs)
        return found

    def slot(self, place: int, part: int) -> memoryview:
        """Where a part of a neighbour is."""
        return self._slots[place][part % 2]

    def room(self, part: int) -> memoryview:
        """Waits until a part of this rank's may be written, and returns where.

        Raises:
            NeighbourLeft: a neighbour will never make room.
            Exception: what `still` raised.
        """
        self._wait(_TAKEN, part - 1)
        return self.slot(self.me, part)

    def give(self, part: int) -> None:
        """The part was written: neighbours may read it."""
        assert fused is not None
        fused.set_word(self.files[self.me], _GIVEN, (part + 1) % _U32)

    def given(self, part: int) -> None:
        """Waits until all neighbours have given a part. Raises as `room`."""
        self._wait(_GIVEN, part + 1)

    def take(self, part: int) -> None:
        """The parts of all neighbours were read: they may be written over."""
        assert fused is not None
        fused.set_word(self.files[self.me], _TAKEN, (part + 1) % _U32)

    def still(self, place: int) -> None:
        """What to do while a neighbour is waited for; called at least every tenth of a second.

        Raises:
            NeighbourLeft: it left, and gives nothing any more.
            Exception: what the call's `still` raised.
        """
        self.missing = (self.ranks[place],)
        self._still(self.missing)
        if _word(self.files[place], _OVER) == _LEFT:
            raise NeighbourLeft(self.ranks[place])

    def _wait(self, word: int, value: int) -> None:
        assert fused is not None
        fused.wait_word(self.files, self.me, self.still, word, value % _U32)

    # The files.

    def _names_for_others(self) -> Sequence[str]:
        return [self._name(each.token_to) for each in self._neighbours if each.token_to]

    def _name(self, token: bytes) -> str:
        text = b"andon.memory.v1\0" + struct.pack("<Q", self._group)
        return "andon-" + hmac.digest(token, text, "sha256")[:16].hex()

    def _nonce(self, rank: int) -> bytes:
        numbers = struct.pack("<QQQI", self._key.term, self._key.round, self._group, rank)
        return hashlib.sha256(b"andon.memory.nonce.v1\0" + numbers).digest()[:NONCE_BYTES]

    def _map(self, neighbour: Neighbour, size: int) -> mmap.mmap:
        """Waits for a neighbour's file, maps it, and removes the name.

        There is nothing to sleep on before the file is there, so this looks again and again.
        """
        path = self._folder / self._name(neighbour.token_from)
        poll_s, told = _FIRST_POLL_S, time.monotonic()
        self.missing = (neighbour.rank,)
        while True:
            try:
                owner = f"rank {neighbour.rank}"
                file = map_file(self._folder, path.name, size, owner, writable=True)
                break
            except FileNotFoundError:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LAST_POLL_S)
            if self._over or time.monotonic() - told > _LOOK_S:
                told = time.monotonic()
                self._still(self.missing)
        path.unlink(missing_ok=True)
        if not hmac.compare_digest(file[:NONCE_BYTES], self._nonce(neighbour.rank)):
            raise SharedMemoryUnavailable(
                f"{owner}'s memory is not that of this session: does another program make files in "
                f"{self._folder}?"
            )
        return file

    def _refuse(self, mine: ArenaFile | None) -> None:
        """Tells neighbours, wherever they wait, that this rank uses lanes."""
        assert fused is not None
        # Who finds no file of this rank would wait for one.
        if mine is not None and mine.named:
            fused.set_word(mine.memory, _MAPPED, _REFUSED)
        else:
            self._leave_empty()

    def _leave_empty(self) -> None:
        with suppress(SharedMemoryUnavailable):
            self._empty = EmptyFile(self._folder, self._names_for_others())

    def _slots_of(self, file: mmap.mmap) -> tuple[memoryview, memoryview]:
        middle = _SLOTS + self.slot_bytes
        view = memoryview(file)
        return view[_SLOTS:middle], view[middle : middle + self.slot_bytes]

    def _tell_over(self) -> None:
        file, over = self._file, self._over
        if file is None or not over:
            return
        assert fused is not None
        fused.set_word(file.memory, _OVER, over)
        for each in (file.memory, *self.files):
            for word in (_MAPPED, _GIVEN, _TAKEN):
                fused.set_word(each, word, None)


def _word(file: mmap.mmap, at: int) -> int:
    (value,) = struct.unpack_from("<I", file, at)
    return int(value)
