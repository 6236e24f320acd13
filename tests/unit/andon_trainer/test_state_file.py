"""What a sender writes to, and what a receiver reads, whatever the other one says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from andon.host.arena import SharedMemoryUnavailable, folder_identity
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.control.state_file import FileWriter, StateFile

NAME = "andon-state-" + "0" * 32


def opened(folder: Path, name: str = NAME, size_bytes: int = 8) -> FileWriter:
    return FileWriter(folder, folder_identity(folder), name, size_bytes)


def test_what_one_end_writes_the_other_one_reads(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    writer = opened(tmp_path, file.name)
    file.unlink()
    assert list(tmp_path.iterdir()) == []

    assert writer.write(memoryview(b"ab"))
    assert writer.write(memoryview(b"cde"))

    assert [bytes(each) for each in file.read(3)] == [b"abc"]
    assert [bytes(each) for each in file.read(2)] == [b"de"]
    with pytest.raises(StateCorrupt, match="ends 1 bytes early"):
        list(file.read(1))
    writer.close()
    file.close()


@pytest.mark.parametrize(
    "name",
    ["", ".", "../" + NAME, "/" + NAME, NAME[:-1], NAME + "\n", "andon-" + "0" * 32, NAME + "\0"],
)
def test_no_name_leads_to_anything_else_than_a_state(tmp_path: Path, name: str) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="holds no state"):
        opened(tmp_path, name)


@pytest.mark.parametrize(
    "case", ["not empty", "readable by all", "a link", "a pipe", "two names", "a folder", "nothing"]
)
def test_a_sender_writes_to_nothing_but_an_empty_file_of_its_own(tmp_path: Path, case: str) -> None:
    path, other = tmp_path / NAME, tmp_path / "other"
    other.write_bytes(b"")
    other.chmod(0o600)
    match case:
        case "a link":
            path.symlink_to(other)
        case "a pipe":
            os.mkfifo(path, 0o600)
        case "two names":
            path.hardlink_to(other)
        case "a folder":
            path.mkdir(0o600)
        case "not empty" | "readable by all":
            path.write_bytes(b"gradients" if case == "not empty" else b"")
            path.chmod(0o600 if case == "not empty" else 0o644)

    with pytest.raises(SharedMemoryUnavailable):
        opened(tmp_path)

    assert other.read_bytes() == b""


def test_a_state_for_which_there_is_no_room_is_not_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path)

    with pytest.raises(SharedMemoryUnavailable, match="no room"):
        opened(tmp_path, file.name, 2**62)

    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_used_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryUnavailable):
        StateFile(tmp_path / "none")
