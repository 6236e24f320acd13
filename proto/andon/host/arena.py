"""Arenas: memory that a worker and a reducer share, and where each block lies in it.

Both ends compute the places from the sizes of the blocks, so that a slice can be checked against
the elements that it claims to hold. Both open the same file by its name, inside a folder that each
of them is configured with: a name from a peer can't lead outside. See docs/shared-memory.md.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from andon.protocol.limits import MAX_ELEMENTS
from andon.protocol.messages import SharedMemoryOffer

__all__ = [
    "CAPABILITY",
    "FILE_PREFIX",
    "HEADER_BYTES",
    "ITEM_BYTES",
    "MAX_AREAS",
    "NONCE_BYTES",
    "NONCE_OFFSET",
    "SOCKET_CAPABILITY",
    "ArenaLayout",
    "SharedMemoryUnavailable",
    "folder_identity",
    "map_file",
    "map_offer",
    "short_path",
    "socket_of",
]

CAPABILITY = "shared-memory.v1"
SOCKET_CAPABILITY = "shared-memory-socket.v1"
"""A socket beside the memory carries the stream's messages in place of gRPC."""

FILE_PREFIX = "andon-"
"""All files in a shared folder begin with it. A reducer that starts removes those that no living
process has locked."""

HEADER_BYTES = 4096
"""The bytes before the first block, which hold the nonce."""

NONCE_OFFSET, NONCE_BYTES = 0, 16

ITEM_BYTES = 4
"""Numbers in shared memory are float32."""

MAX_AREAS = 16
"""How many contributions to one exchange a worker may have in memory at once."""

_ALIGNMENT = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedMemoryUnavailable(Exception):
    """Memory can't be shared: why, and the remedy. Peers read it, so it names no file of theirs."""


@dataclass(frozen=True)
class ArenaLayout:
    """Where the blocks lie in an arena: one after the other, each at a multiple of 64 bytes."""

    elements: tuple[int, ...]
    """How many elements each block has."""
    starts: tuple[int, ...] = field(init=False)
    """The first byte of each block."""
    size_bytes: int = field(init=False)
    """The size of the whole arena, in whole pages."""

    def __post_init__(self) -> None:
        """Computes the places.

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
        """The first byte of `count` elements of a block; None if the block has no such elements.

        Arguments come from a peer. Whatever they are, the bytes of a result are inside the arena.
        """
        if not 0 <= block < len(self.elements):
            return None
        elements = self.elements[block]
        if not 0 < count <= elements or not 0 <= offset <= elements - count:
            return None
        return self.starts[block] + offset * ITEM_BYTES

    def area_of(self, claimed: int, block: int, offset: int, count: int) -> int | None:
        """In which area of a file of several the elements begin at byte `claimed`; None: in none.

        Arguments come from a peer. Whether the file has such an area is not checked here.
        """
        at = self.offset_of(block, offset, count)
        if at is None or claimed < at:
            return None
        area, rest = divmod(claimed - at, self.size_bytes)
        return None if rest else area


def socket_of(memory: Path) -> Path:
    """Where the socket is that belongs to a stream's memory for contributions."""
    return memory.with_name(f"{memory.name}.socket")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name for a file, which a Unix socket can have however deep its folder is.

    Raises:
        OSError: there is no such folder.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def folder_identity(folder: Path) -> bytes:
    """Sixteen bytes that are the same for two processes exactly if they see the same folder.

    Raises:
        SharedMemoryUnavailable: there is no such folder, or this host has no boot id.
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
    # Device and inode name the folder on one running kernel; the boot id names the kernel. A
    # container that mounts another folder at the same path gets another identity.
    text = b"andon.shared-folder.v1\n%b\n%d\n%d\n" % (boot, found.st_dev, found.st_ino)
    return hashlib.sha256(text).digest()[:16]


def map_offer(
    folder: Path, offer: SharedMemoryOffer, places: ArenaLayout, *, writable: bool, areas: int = 1
) -> tuple[mmap.mmap, bytes]:
    """Maps the memory that a reducer offers, of so many areas; returns it with the nonce in it.

    Raises:
        SharedMemoryUnavailable: the file is not as it must be, or can't be opened.
    """
    if not offer.name or "/" in offer.name or "\0" in offer.name or offer.name in (".", ".."):
        raise SharedMemoryUnavailable(
            "the reducer offered a name that no file can have: is it an Andon reducer?"
        )
    size_bytes = areas * places.size_bytes
    if offer.size_bytes != size_bytes or offer.nonce_offset != NONCE_OFFSET:
        raise SharedMemoryUnavailable(
            "the reducer offered memory of another size: use one version of Andon"
        )
    try:
        mapping = map_file(folder, offer.name, offer.size_bytes, "the reducer", writable=writable)
    except FileNotFoundError as error:
        raise SharedMemoryUnavailable(_unopened("the reducer", error)) from None
    return mapping, mapping[NONCE_OFFSET : NONCE_OFFSET + NONCE_BYTES]


def map_file(folder: Path, name: str, size_bytes: int, owner: str, *, writable: bool) -> mmap.mmap:
    """Maps another process's file of the folder.

    Args:
        folder: where the file is.
        name: its name there, without a separator.
        size_bytes: the size that it must have.
        owner: who made it, for people: `the reducer`.
        writable: whether it may be written to.

    Raises:
        FileNotFoundError: there is no such file.
        SharedMemoryUnavailable: the file is not as it must be, or can't be opened.
    """
    access = os.O_RDWR if writable else os.O_RDONLY
    # A link could lead outside the folder, and opening a FIFO would wait for its other end.
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(folder / name, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SharedMemoryUnavailable(_unopened(owner, error)) from None
    try:
        # Of the open file, not of its name, which could be given to another file meanwhile.
        _require_ours(os.fstat(descriptor), size_bytes, owner)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
    except (OSError, ValueError) as error:
        raise SharedMemoryUnavailable(f"{owner}'s memory can't be mapped ({error})") from None
    finally:
        os.close(descriptor)


def _unopened(owner: str, error: OSError) -> str:
    return (
        f"{owner}'s memory can't be opened ({error.strerror}): run both processes as one user, "
        "with one ANDON_SHARED_DIR"
    )


def _require_ours(found: os.stat_result, size_bytes: int, owner: str) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
        raise SharedMemoryUnavailable(f"{owner}'s memory is not a file of the size that it must be")
    # Whoever may write to the file may truncate it, and touching a mapping behind the file's end
    # kills the process. So it must be this user's, and nobody else's.
    if found.st_uid != os.geteuid():
        raise SharedMemoryUnavailable(
            f"{owner} runs as another user: run both processes as one user"
        )
    if stat.S_IMODE(found.st_mode) != 0o600:
        raise SharedMemoryUnavailable(f"others may open {owner}'s memory: is its folder on tmpfs?")
