"""Arenas: where gradients lie in memory that a worker and a reducer share (docs/shared-memory.md).

Both ends compute the same places from the sizes of the blocks, so that a slice can be checked
against what it claims to be, and open the same file by name, inside a folder that each is
configured with.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from andon.protocol.limits import MAX_ELEMENTS
from andon.protocol.messages import SharedMemoryOffer

__all__ = [
    "CAPABILITY",
    "HEADER_BYTES",
    "ITEM_BYTES",
    "NONCE_BYTES",
    "NONCE_OFFSET",
    "ArenaLayout",
    "SharedMemoryUnavailable",
    "folder_identity",
    "map_offer",
]

CAPABILITY = "shared-memory.v1"

HEADER_BYTES = 4096
"""Before the first block; it holds the nonce."""

NONCE_OFFSET, NONCE_BYTES = 0, 16

ITEM_BYTES = 4
"""Numbers in shared memory are float32."""

_ALIGNMENT = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedMemoryUnavailable(Exception):
    """Memory can't be shared: why, and what to do, without the name of any file."""


@dataclass(frozen=True)
class ArenaLayout:
    """Where each block's elements lie in an arena: one after the other, each at 64 bytes."""

    elements: tuple[int, ...]
    """Of each block."""
    starts: tuple[int, ...] = field(init=False)
    """The first byte of each block."""
    size_bytes: int = field(init=False)
    """Of the whole arena, in whole pages."""

    def __post_init__(self) -> None:
        """Lays the blocks out.

        Raises:
            ValueError: there are no elements, or more than any model has.
        """
        if not 0 < sum(self.elements) <= MAX_ELEMENTS:
            raise ValueError(f"a layout of {sum(self.elements)} elements has no place in memory")
        sizes = (-(-count * ITEM_BYTES // _ALIGNMENT) * _ALIGNMENT for count in self.elements)
        *starts, end = itertools.accumulate(sizes, initial=HEADER_BYTES)
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "size_bytes", -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)

    def offset_of(self, block: int, offset: int, count: int) -> int | None:
        """The first byte of `count` elements of a block; None if the layout has no such ones.

        The sums can't wrap, and nothing that is inside lies beyond `size_bytes`.
        """
        if not 0 <= block < len(self.elements):
            return None
        elements = self.elements[block]
        if not 0 < count <= elements or not 0 <= offset <= elements - count:
            return None
        return self.starts[block] + offset * ITEM_BYTES


def folder_identity(folder: Path) -> bytes:
    """Sixteen bytes that are the same for two processes if they see the same folder.

    Raises:
        SharedMemoryUnavailable: there is no such folder, or this host can't say who it is.
    """
    try:
        found = os.stat(folder)
        boot = _BOOT_ID.read_bytes().strip()
    except OSError as error:
        raise SharedMemoryUnavailable(
            f"{folder} can't be shared ({error.strerror}): set ANDON_SHARED_DIR to a folder on "
            "tmpfs"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise SharedMemoryUnavailable(
            f"{folder} is no folder: set ANDON_SHARED_DIR to a folder on tmpfs"
        )
    text = b"andon.shared-folder.v1\n%b\n%d\n%d\n" % (boot, found.st_dev, found.st_ino)
    return hashlib.sha256(text).digest()[:16]


def map_offer(
    folder: Path, offer: SharedMemoryOffer, places: ArenaLayout, *, writable: bool
) -> tuple[mmap.mmap, bytes]:
    """The memory of an offer, and the nonce in it.

    Raises:
        SharedMemoryUnavailable: it is not what it must be, or can't be opened.
    """
    if not offer.name or "/" in offer.name or "\0" in offer.name or offer.name in (".", ".."):
        raise SharedMemoryUnavailable(
            "the reducer offered a name that is no file's: is it an Andon reducer?"
        )
    if offer.size_bytes != places.size_bytes or offer.nonce_offset != NONCE_OFFSET:
        raise SharedMemoryUnavailable(
            "the reducer offered memory of another size: use one version of Andon"
        )
    access = os.O_RDWR if writable else os.O_RDONLY
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(folder / offer.name, flags)
    except OSError as error:
        raise SharedMemoryUnavailable(
            f"the reducer's memory can't be opened ({error.strerror}): run workers and reducer as "
            "one user, with one ANDON_SHARED_DIR"
        ) from None
    try:
        _require_ours(os.fstat(descriptor), places.size_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(
            descriptor, places.size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection
        )
    except (OSError, ValueError) as error:
        raise SharedMemoryUnavailable(f"the reducer's memory can't be mapped ({error})") from None
    finally:
        os.close(descriptor)
    return mapping, mapping[NONCE_OFFSET : NONCE_OFFSET + NONCE_BYTES]


def _require_ours(found: os.stat_result, size_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
        raise SharedMemoryUnavailable("the reducer's memory is no file of the size that it says")
    if found.st_uid != os.geteuid():
        raise SharedMemoryUnavailable(
            "the reducer runs as another user: run workers and reducer as one"
        )
    if stat.S_IMODE(found.st_mode) != 0o600:
        raise SharedMemoryUnavailable(
            "others may open the reducer's memory: is its folder on tmpfs?"
        )
