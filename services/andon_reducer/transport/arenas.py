"""Arenas: the memory that this reducer shares with workers of its host (docs/shared-memory.md).

Theory of operation. Each stream of a worker that asks for it gets memory for contributions of its
own, which the worker writes and the reducer only reads. All streams of a run share one memory for
averages, which the reducer writes. Its name has to live until everybody is there: it goes when the
first average is written, which takes a contribution from every rank. Who comes after that gets
another one, and averages are written to both, until streams are opened anew.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from andon.host.arena import CAPABILITY, ArenaLayout, SharedMemoryUnavailable, folder_identity
from andon.protocol.messages import BlockGradient, OpenRound, RoundOpened, SharedMemoryMapped, Slice
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.jobs import Job
from andon_reducer.transport.arena_file import ArenaFile, sweep
from andon_reducer.transport.status import Refused

__all__ = ["Arenas", "AveragesMemory", "Session"]

_log = logging.getLogger(__name__)


class AveragesMemory:
    """Averages of one run, for all sessions that came before the first was written."""

    def __init__(self, folder: Path, places: ArenaLayout) -> None:
        """Makes the memory.

        Raises:
            SharedMemoryUnavailable: there is no room for it.
        """
        self.places = places
        self.file = ArenaFile(folder, places.size_bytes)
        self.sessions: set[Session] = set()
        self.used = False
        """Whether an average was written."""
        self._view = memoryview(self.file.memory)
        self._last: tuple[Key, int] | None = None
        self._generation = 0

    def place(self, job: Job) -> tuple[memoryview, Slice] | None:
        """Where a job's average goes, and what workers are told; None if there is no place."""
        at = self.places.offset_of(job.block, job.offset, job.count)
        if at is None:
            return None
        if self._last is None or (job.key, job.sequence) > self._last:
            self._last = job.key, job.sequence
            self._generation += 1
        self.used = True
        self.forget_name()
        length = job.count * job.encoding.itemsize
        return self._view[at : at + length], Slice(at, length, self._generation)

    def forget_name(self) -> None:
        """Takes the name away once nobody is to come: all who were offered it have mapped it."""
        if self.file.named and self.used and all(each.mapped for each in self.sessions):
            self.file.unlink()


class Session:
    """What one stream shares with the reducer. `prove` comes first, then slices."""

    def __init__(self, contributions: ArenaFile, averages: AveragesMemory) -> None:
        """Both have names that the worker is told."""
        self.averages = averages
        self.mapped = False
        """Whether the worker has proved that it has mapped both."""
        self._contributions = contributions
        self._view = memoryview(contributions.memory).toreadonly()
        self._generation = 0
        averages.sessions.add(self)

    def offered(self, opened: RoundOpened) -> RoundOpened:
        """The answer to OpenRound, with the offer."""
        return replace(
            opened,
            capabilities=(*opened.capabilities, CAPABILITY),
            contributions=self._contributions.offer,
            averages=self.averages.file.offer,
        )

    def prove(self, proof: SharedMemoryMapped) -> None:
        """Takes the worker's proof, and the name away.

        Raises:
            Refused: it is none, or came before.
        """
        given = proof.contributions_nonce + proof.averages_nonce
        if self.mapped or not hmac.compare_digest(
            given, self._contributions.nonce + self.averages.file.nonce
        ):
            text = "this is no proof that the shared memory is mapped: do not map it, send bytes"
            raise Refused(Reason.INVALID_MESSAGE, text)
        self.mapped = True
        self._contributions.unlink()
        self.averages.forget_name()

    def resolve(self, gradient: BlockGradient) -> BlockGradient:
        """A contribution with the bytes of its slice as its payload.

        Raises:
            Refused: the slice is not what it must be.
        """
        claimed = gradient.slice
        assert claimed is not None
        at = self.averages.places.offset_of(gradient.block, gradient.offset, gradient.count)
        where = f"block {gradient.block}, element {gradient.offset}"
        if not self.mapped:
            text = f"{where} is a slice of shared memory that was not mapped"
        elif at is None or claimed.offset != at:
            text = f"{where} does not lie at byte {claimed.offset} of the shared memory"
        elif claimed.generation < max(1, self._generation):
            text = f"{where} is a slice of an older exchange ({claimed.generation})"
        else:
            self._generation = claimed.generation
            return replace(gradient, payload=self._view[at : at + claimed.length])
        raise Refused(Reason.INVALID_MESSAGE, text)

    def close(self) -> None:
        """Takes the names away that nobody needs; memory goes with the last job that reads it."""
        self._contributions.unlink()
        self.averages.sessions.discard(self)
        if not self.averages.sessions:
            self.averages.file.unlink()
        else:
            self.averages.forget_name()


class Arenas:
    """All memory that is shared. Belongs to one event loop."""

    def __init__(self, folder: Path | None) -> None:
        """Removes from the folder what dead reducers left there; None: nothing is shared."""
        self._folder = folder
        self._lock = asyncio.Lock()
        self._averages: WeakValueDictionary[str, AveragesMemory] = WeakValueDictionary()
        """By run, the newest; held by its sessions."""
        if folder is not None and (swept := sweep(folder)):
            _log.info("removed %d files of dead processes from %s", swept, folder)

    async def open(self, opening: OpenRound) -> Session | str:
        """Memory for a stream that asks for it; or why it gets none, for people."""
        folder = self._folder
        if folder is None:
            return "the reducer shares no memory: set ANDON_SHARED_DIR where it runs"
        try:
            if opening.shared_folder != folder_identity(folder):
                return (
                    f"the reducer's {folder} is not the worker's folder: share one between "
                    "containers (ipc), and set ANDON_SHARED_DIR alike; on another host, this is "
                    "as it must be"
                )
            places = ArenaLayout(opening.block_elements)
            async with self._lock:
                # In threads: as much memory is cleared as the model has.
                mine = await asyncio.to_thread(ArenaFile, folder, places.size_bytes)
                averages = self._averages.get(opening.run_id)
                if averages is None or not averages.file.named or averages.places != places:
                    averages = await asyncio.to_thread(AveragesMemory, folder, places)
                    self._averages[opening.run_id] = averages
                return Session(mine, averages)
        except (SharedMemoryUnavailable, ValueError) as error:
            return str(error)
