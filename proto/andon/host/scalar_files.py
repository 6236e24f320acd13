"""Files of scalars: CSV, and TensorBoard's event files.

Theory of operation. TensorBoard reads records: a length, its checksum, a message, its checksum.
Lengths are 64-bit and checksums 32-bit little-endian; a checksum is a CRC-32C, rotated and shifted.
The message is `tensorflow.Event`, of which three fields are enough, so that neither TensorFlow nor
tensorboard has to be installed to write it. The first record names the format.
"""

from __future__ import annotations

import csv
import os
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import IO, AnyStr, Generic, Protocol, Self

from andon.host.private_files import make_folder, open_private
from andon.protocol.scalars import Scalar

__all__ = ["CsvFile", "ScalarFile", "TensorBoardFile", "crc32c"]

_HEADER = ("step", "name", "worker", "value")


class ScalarFile(Protocol):
    """A file that scalars are appended to."""

    def write(self, scalar: Scalar, worker: int, at_unix_s: float) -> None:
        """Appends one; it is in the file at the latest after `flush`."""

    def flush(self) -> None:
        """Writes everything so far, for whoever reads along."""

    def close(self) -> None:
        """Ends the file."""


class _File(Generic[AnyStr]):
    _out: IO[AnyStr]

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def flush(self) -> None:
        """Writes everything so far."""
        self._out.flush()

    def close(self) -> None:
        """Ends the file."""
        self._out.close()


class CsvFile(_File[str]):
    """A table of step, name, worker and value. A file that is there already is continued."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes its folder.

        Raises:
            OSError: it can't be opened.
        """
        make_folder(path.parent)
        self._out = out = open(  # noqa: SIM115 - held
            path, "a", encoding="utf-8", newline="", opener=open_private
        )
        self._table = csv.writer(out, lineterminator="\n")
        if not out.tell():
            self._table.writerow(_HEADER)

    def write(self, scalar: Scalar, worker: int, at_unix_s: float) -> None:
        """Appends a row; a float is written so that it reads back exactly."""
        self._table.writerow((scalar.step, scalar.name, worker, repr(scalar.value)))


class TensorBoardFile(_File[bytes]):
    """A new event file in a folder, which `tensorboard --logdir` finds."""

    def __init__(self, folder: Path, *, at_unix_s: float | None = None) -> None:
        """Makes the folder and the file.

        Args:
            folder: TensorBoard shows one curve of each name for each folder.
            at_unix_s: when the file was begun; None: now.

        Raises:
            OSError: it can't be made.
        """
        make_folder(folder)
        began = time.time() if at_unix_s is None else at_unix_s
        # TensorBoard reads a folder's files in the order of their names. Two processes, and two
        # files of one second, must not meet.
        for number in range(1000):
            name = f"events.out.tfevents.{int(began):010d}.{os.getpid()}.{number:03d}"
            try:
                self._out = open(folder / name, "xb", opener=open_private)  # noqa: SIM115 - held
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(f"{folder} has 1000 event files of this second")
        self._append(_event(began, 0, _field(3, b"brain.Event:2")))

    def write(self, scalar: Scalar, worker: int, at_unix_s: float) -> None:
        """Appends a point; TensorBoard's values are float32. The worker is not in it."""
        # A number beyond float32 has no encoding there; infinity is what it would be rounded to.
        try:
            value = struct.pack("<f", scalar.value)
        except OverflowError:
            value = struct.pack("<f", float("inf") if scalar.value > 0 else float("-inf"))
        point = _field(1, scalar.name.encode()) + _tag(2, 5) + value
        self._append(_event(at_unix_s, scalar.step, _field(5, _field(1, point))))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._out.write(length + _masked(length) + event + _masked(event))


def _event(at_unix_s: float, step: int, content: bytes) -> bytes:
    """`tensorflow.Event`: wall_time, step, and one of file_version (3) and summary (5)."""
    return _tag(1, 1) + struct.pack("<d", at_unix_s) + _tag(2, 0) + _varint(step) + content


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, data: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of a few bytes. The checksums of chunks are made in C; see `andon.wire`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
