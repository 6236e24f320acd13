"""Arenas: the memory that this reducer shares with workers of its host (docs/shared-memory.md).

Theory of operation. Each stream of a worker that asks for it gets memory for contributions of its
own, which the worker writes and the reducer only reads. All streams of a run share one memory for
averages, which the reducer writes.

Each memory is a file, which a worker opens by name and maps. The names go as early as possible, so
that a crash leaves nothing behind. The name of a stream's memory goes when the worker has mapped
it. That of the averages has to live until all are there: it goes when the first average is written,
which takes a contribution from every rank. A stream that comes later gets another memory, and
averages are written to both, until streams are opened anew.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import weakref
from dataclasses import replace
from pathlib import Path

from andon.host.arena import (
    CAPABILITY,
    MAX_AREAS,
    ArenaLayout,
    SharedMemoryUnavailable,
    folder_identity,
    socket_of,
)
from andon.host.arena_file import ArenaFile, sweep
from andon.host.logs import LogEvent
from andon.protocol.messages import (
    BlockGradient,
    OpenRound,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
)
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.jobs import Job
from andon_reducer.transport.admission import CallRefused
from andon_reducer.transport.memory_socket import MemorySocket

__all__ = ["Arenas", "AveragesMemory", "StreamMemory"]

_log = logging.getLogger(__name__)


class Arenas:
    """All memory that is shared. Belongs to one event loop."""

    def __init__(self, folder: Path | None) -> None:
        """Removes from the folder what dead reducers left there; None: nothing is shared."""
        self._folder = folder
        self._lock = asyncio.Lock()
        self._averages: weakref.WeakValueDictionary[str, AveragesMemory] = (
            weakref.WeakValueDictionary()
        )
        """By run, the newest; the memories of its streams keep it alive."""
        if folder is not None and (swept := sweep(folder)):
            _log.info(LogEvent("shared_files_removed", count=swept, folder=str(folder)))

    async def open(self, opening: OpenRound) -> StreamMemory | str:
        """Memory for a stream that asks for it; or why it gets none, for people."""
        folder = self._folder
        if folder is None:
            return "the reducer shares no memory: set ANDON_SHARED_DIR where it runs"
        try:
            if opening.shared_folder != folder_identity(folder):
                return (
                    f"the reducer's {folder} is not the worker's folder: mount one volume there "
                    "in both containers, or set ANDON_SHARED_DIR alike; if the worker is on "
                    "another host, nothing is wrong"
                )
            layout = ArenaLayout(opening.block_elements)
            areas = opening.contribution_areas or 1
            if areas > MAX_AREAS:
                return f"{areas} areas for contributions are more than {MAX_AREAS}: ask for fewer"
            # One at a time: two streams of a run that come together must find one memory for
            # averages, and making it takes a while.
            async with self._lock:
                # In threads: the kernel clears as much memory as the model has.
                mine = await asyncio.to_thread(ArenaFile, folder, areas * layout.size_bytes)
                averages = self._averages.get(opening.run_id)
                if averages is None or not averages.file.named or averages.layout != layout:
                    averages = await asyncio.to_thread(AveragesMemory, folder, layout)
                    self._averages[opening.run_id] = averages
                return StreamMemory(mine, averages, areas)
        except (SharedMemoryUnavailable, ValueError) as error:
            return str(error)


class AveragesMemory:
    """Averages of one run, for all streams that came before the first was written."""

    def __init__(self, folder: Path, layout: ArenaLayout) -> None:
        """Makes the memory.

        Raises:
            SharedMemoryUnavailable: there is no room for it.
        """
        self.layout = layout
        self.file = ArenaFile(folder, layout.size_bytes)
        self.streams: set[StreamMemory] = set()
        self.used = False
        """Whether an average was written."""
        self._view = memoryview(self.file.memory)
        self._last: tuple[Key, int] | None = None
        self._generation = 0

    def place(self, job: Job) -> tuple[memoryview, Slice] | None:
        """Where a job's average goes, and the slice for workers; None if there is no place."""
        at = self.layout.offset_of(job.block, job.offset, job.count)
        if at is None:
            return None
        # Jobs that write to shared memory begin in the order of their exchanges, so a greater one
        # is a new one: see `OutgoingChunks`.
        if self._last is None or (job.key, job.sequence) > self._last:
            self._last = job.key, job.sequence
            self._generation += 1
        self.used = True
        self.unlink_if_mapped()
        length = job.encoding.payload_bytes(job.count)
        return self._view[at : at + length], Slice(at, length, self._generation)

    def unlink_if_mapped(self) -> None:
        """Unlinks the file once it is in use and all streams that were offered it have mapped it.

        From then on a new stream gets another memory.
        """
        if self.file.named and self.used and all(each.mapped for each in self.streams):
            self.file.unlink()


class StreamMemory:
    """What one stream shares with the reducer. The worker proves it with `prove`, then slices."""

    def __init__(self, contributions: ArenaFile, averages: AveragesMemory, areas: int = 1) -> None:
        """Both files still have the names that the worker opens them by.

        That of the contributions has so many areas, each laid out like the averages.
        """
        self.averages = averages
        self._areas = areas
        self.mapped = False
        """Whether the worker has proved that it has mapped both."""
        self._contributions = contributions
        self._view = memoryview(contributions.memory).toreadonly()
        self._generation = 0
        averages.streams.add(self)

    def offered(self, opened: RoundOpened) -> RoundOpened:
        """The answer to OpenRound, with the offer."""
        return replace(
            opened,
            capabilities=(*opened.capabilities, CAPABILITY),
            contributions=self._contributions.offer,
            averages=self.averages.file.offer,
        )

    def listen(self) -> MemorySocket | None:
        """A socket for the stream's messages, as long as its memory is named; None: there is none.

        To be closed by whoever asked.
        """
        try:
            return MemorySocket(socket_of(self._contributions.path))
        except OSError as error:
            _log.debug("no socket beside the shared memory: %s", error)
            return None

    def prove(self, proof: SharedMemoryMapped) -> None:
        """Takes the worker's proof that it has mapped both files, and unlinks its own.

        Raises:
            CallRefused: it proves nothing, or came before.
        """
        given = proof.contributions_nonce + proof.averages_nonce
        if self.mapped or not hmac.compare_digest(
            given, self._contributions.nonce + self.averages.file.nonce
        ):
            text = "this does not prove that the shared memory is mapped: do not map it, send bytes"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        # From here on slices come. The names have done their work, and go at once, that of the
        # socket too: the worker has connected before it sent its proof, or never will.
        self.mapped = True
        self._contributions.unlink()
        self.averages.unlink_if_mapped()

    def resolve(self, gradient: BlockGradient) -> BlockGradient:
        """A contribution with the bytes of its slice as its payload.

        Raises:
            CallRefused: the slice is not where its block lies, or is older than one before it.
        """
        claimed = gradient.slice
        assert claimed is not None, "only slices are resolved"
        area = self.averages.layout.area_of(
            claimed.offset, gradient.block, gradient.offset, gradient.count
        )
        # One contribution without a node is all that a rank has of an exchange.
        areas = 1 if gradient.node is None else self._areas
        where = f"block {gradient.block}, element {gradient.offset}"
        if not self.mapped:
            text = f"{where} is a slice of shared memory that was not mapped"
        elif area is None or area >= areas:
            text = f"{where} does not lie at byte {claimed.offset} of the shared memory"
        elif claimed.generation < max(1, self._generation):
            text = f"{where} is a slice of an older exchange ({claimed.generation})"
        else:
            self._generation = claimed.generation
            # A slice has no checksum: shared memory leaves the host by no wire.
            payload = self._view[claimed.offset : claimed.offset + claimed.length]
            return gradient.resolved(payload)
        raise CallRefused(Reason.INVALID_MESSAGE, text)

    def close(self) -> None:
        """Unlinks what no other stream needs.

        The memory itself stays until the last job that reads or writes it is done: their views keep
        the mapping alive.
        """
        self._contributions.unlink()
        self.averages.streams.discard(self)
        if not self.averages.streams:
            self.averages.file.unlink()
        else:
            # This stream may have been the last one that had not mapped it.
            self.averages.unlink_if_mapped()
