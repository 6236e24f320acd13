"""Shared memory, the worker's end: what was offered, mapped and laid out."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from andon.host.arena import ArenaLayout, SharedMemoryUnavailable, map_offer
from andon.protocol.messages import AveragedBlock, RoundOpened, SharedMemoryMapped
from andon_trainer.core.calls import Bytes, Floats

__all__ = ["SharedMemory"]


class _Window:
    """Numbers of a mapping, as numpy takes them; an array made of it keeps the mapping."""

    def __init__(self, mapping: mmap.mmap, start: int, count: int) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        # PyTorch takes no array that says it is read-only without a warning. The pages of averages
        # are: to write there is a defect that ends the process.
        self.__array_interface__: dict[str, Any] = {
            "data": (address + start, False),
            "shape": (count,),
            "typestr": "<f4",
            "version": 3,
        }


class SharedMemory:
    """What one stream shares with the reducer.

    Attributes:
        contributions: float32, one vector a block; the worker writes them.
        averages: float32, one vector a block; only to be read.
        memory: all bytes of which `contributions` are a part.
        generation: counts the exchanges that this worker has begun in it.
    """

    def __init__(self, folder: Path, opened: RoundOpened, places: ArenaLayout) -> None:
        """Maps what was offered.

        Raises:
            SharedMemoryUnavailable: nothing was, or it can't be mapped.
        """
        if opened.contributions is None or opened.averages is None:
            raise SharedMemoryUnavailable(
                opened.shared_memory_refused or "the reducer shares no memory: use one version"
            )
        mine, my_nonce = map_offer(folder, opened.contributions, places, writable=True)
        theirs, their_nonce = map_offer(folder, opened.averages, places, writable=False)
        self.proof = SharedMemoryMapped(my_nonce, their_nonce)
        self.memory: Bytes = np.frombuffer(mine, np.uint8)
        self.contributions = _vectors(mine, places)
        self.averages = _vectors(theirs, places)
        self.generation = 0
        self._places = places
        self._theirs = 0

    def holds(self, average: AveragedBlock) -> bool:
        """Whether an average lies where it must, and is not older than what was read before."""
        at = self._places.offset_of(average.block, average.offset, average.count)
        found = average.slice
        if found is None or found.offset != at or found.generation < max(1, self._theirs):
            return False
        self._theirs = found.generation
        return True


def _vectors(mapping: mmap.mmap, places: ArenaLayout) -> list[Floats]:
    return [
        np.asarray(_Window(mapping, start, count))
        for start, count in zip(places.starts, places.elements, strict=True)
    ]
