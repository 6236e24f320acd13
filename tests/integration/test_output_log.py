"""A worker's log on a disk that is temporarily full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from andon_cli.launching.output import OutputLog
from integration.fixtures.disk import small_disk_at

pytestmark = pytest.mark.integration


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with small_disk_at(tmp_path / "disk", "64k") as disk:
        yield disk


def test_what_a_full_disk_had_no_room_for_is_said_once_and_named_in_the_log(
    small_disk: Path,
) -> None:
    filler, path, told = small_disk / "filler", small_disk / "worker-0.log", list[str]()
    log = OutputLog(path, told.append)
    log.write(b"first\n")

    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2**17))
    log.write(bytes(4096 - len("first\n")))  # the rest of the log's last page
    log.write(b"lost\n")
    log.write(b"lost too\n")
    filler.unlink()
    log.write(b"last\n")
    log.close()

    assert told == [f"{path} can't be written (No space left on device): it lacks output"]
    kept = path.read_bytes()
    assert kept[:6] == b"first\n"
    assert kept[4096:] == b"\n[andon: 14 bytes are missing here]\nlast\n"
