"""Files of shared memory: what is made, renamed, and swept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon.host.arena import SharedMemoryUnavailable
from andon.host.arena_file import ArenaFile, sweep


def test_what_a_killed_process_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from andon.host.arena_file import ArenaFile\n"
        "file = ArenaFile(Path(sys.argv[1]), 8192)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    living = ArenaFile(tmp_path, 8192)
    (tmp_path / "another").touch()

    swept = sweep(tmp_path)

    assert swept == 1
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"another", living.offer.name}


def test_a_link_in_the_folder_is_not_followed_when_swept(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.touch()
    (tmp_path / "andon-link").symlink_to(target)

    assert sweep(tmp_path) == 0
    assert target.exists()


def test_a_name_goes_with_its_owner(tmp_path: Path) -> None:
    file = ArenaFile(tmp_path, 8192)
    assert file.named

    del file

    assert os.listdir(tmp_path) == []


def test_a_file_may_have_another_name_for_each_who_opens_it(tmp_path: Path) -> None:
    file = ArenaFile(tmp_path, 8192, nonce=b"sixteen bytes...")

    file.rename(["andon-one", "andon-other"])

    assert {path.name for path in tmp_path.iterdir()} == {"andon-one", "andon-other"}
    assert (tmp_path / "andon-other").read_bytes()[:16] == b"sixteen bytes..."
    file.unlink()
    assert os.listdir(tmp_path) == []


def test_no_file_is_replaced_by_one_that_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "andon-other").write_text("precious")
    file = ArenaFile(tmp_path, 8192)

    with pytest.raises(SharedMemoryUnavailable, match="can't be named \\(File exists\\)"):
        file.rename(["andon-one", "andon-other"])

    assert os.listdir(tmp_path) == ["andon-other"]
    assert (tmp_path / "andon-other").read_text() == "precious"
