"""Files of scalars: a table that is continued, and records as TensorBoard reads them."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from google_crc32c import value as crc32c_of_bytes

from andon.host.scalar_files import CsvFile, TensorBoardFile, crc32c
from andon.protocol.scalars import Scalar


def test_a_table_is_continued_and_its_numbers_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "run" / "scalars.csv"
    for step, value in ((3, 0.1), (4, math.nan)):
        with CsvFile(path) as file:
            file.write(Scalar("val/loss", step, value), 1, 100.0)

    assert path.read_text() == ("step,name,worker,value\n3,val/loss,1,0.1\n4,val/loss,1,nan\n")


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256))])
def test_the_checksum_is_crc32c(data: bytes) -> None:
    assert crc32c(data) == crc32c_of_bytes(data)


def records(path: Path) -> list[bytes]:
    """The messages of an event file, as TensorBoard checks them."""
    found, data = [], path.read_bytes()
    while data:
        length = data[:8]
        (size,) = struct.unpack("<Q", length)
        message, rest = data[12 : 12 + size], data[12 + size :]
        for part, checksum in ((length, data[8:12]), (message, rest[:4])):
            crc = crc32c_of_bytes(part)
            rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
            assert checksum == struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
        found.append(message)
        data = rest[4:]
    return found


def test_an_event_file_has_its_version_and_a_message_for_each_scalar(tmp_path: Path) -> None:
    with TensorBoardFile(tmp_path / "tensorboard", at_unix_s=100.0) as file:
        file.write(Scalar("val", 300, 0.5), 0, 101.0)
        file.write(Scalar("far", 1, -1e300), 0, 102.0)

    (path,) = (tmp_path / "tensorboard").iterdir()
    version, val, far = records(path)
    # Tags and lengths as tensorflow.Event, Summary and Summary.Value have them.
    assert version == b"\x09" + struct.pack("<d", 100.0) + b"\x10\x00\x1a\x0dbrain.Event:2"
    point = b"\x0a\x03val\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(point)]) + point
    event = b"\x09" + struct.pack("<d", 101.0) + b"\x10\xac\x02\x2a" + bytes([len(summary)])
    assert val == event + summary
    # Beyond float32 it is what it would be rounded to.
    assert far.endswith(struct.pack("<f", -math.inf))


def test_two_event_files_of_one_second_do_not_meet(tmp_path: Path) -> None:
    for _ in range(2):
        with TensorBoardFile(tmp_path, at_unix_s=100.0) as file:
            file.write(Scalar("val", 1, 0.5), 0, 100.0)

    assert [len(records(path)) for path in sorted(tmp_path.iterdir())] == [2, 2]
