"""Private files: what a run writes is its owner's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.host.private_files import make_folder, open_private
from andon.host.scalar_files import CsvFile, TensorBoardFile
from andon.host.trace import PartHeader, PartWriter
from andon_cli.app import main
from andon_cli.launching.output import OutputLog
from andon_coordinator.transport.journal import Journal
from andon_server.runs import JOURNAL, ServiceAddress, make_run_dir, worker_log


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs, under a umask that hides nothing."""
    before = os.umask(0)
    try:
        yield tmp_path / "runs"
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """The mode of a folder and of everything in it, by name."""
    return {
        str(each.relative_to(folder.parent)): oct(stat.S_IMODE(each.stat().st_mode))
        for each in (folder, *folder.rglob("*"))
    }


def test_what_a_service_and_its_launcher_write_is_their_users_alone(runs: Path) -> None:
    run_dir = runs / "7f3a"
    make_run_dir(run_dir)
    journal = Journal.open(run_dir / JOURNAL, "7f3a")
    journal.begin_term(2**32)
    ServiceAddress(
        address="127.0.0.1:7070", metrics_url="", run_id="7f3a", journal=JOURNAL, pid=1
    ).write(run_dir)
    OutputLog(worker_log(run_dir, 0), print).close()
    CsvFile(run_dir / "scalars.csv").close()
    TensorBoardFile(run_dir / "tensorboard").close()
    PartWriter(
        run_dir / "t.parts",
        PartHeader(run_id="7f3a", host="alpha", process=1, clock="", at_us=1, unix_us=1),
    ).close()

    found = modes(run_dir)
    journal.close()

    assert {f"7f3a/{JOURNAL}{end}" for end in ("", "-wal", "-shm", ".lock")} <= found.keys()
    assert len(found) == 12
    for name, mode in found.items():
        is_folder = (runs / name).is_dir() or name == "7f3a/t.parts"
        assert mode == ("0o700" if is_folder else "0o600"), name


def test_an_export_is_its_users_alone(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    make_run_dir(runs / "7f3a")
    Journal.open(runs / "7f3a" / JOURNAL, "7f3a").close()

    assert main(["export", "7f3a", "--output", "steps.csv"]) == 0

    assert stat.S_IMODE(Path("steps.csv").stat().st_mode) == 0o600


def test_in_a_folder_of_a_group_its_members_may_read_and_nobody_else(runs: Path) -> None:
    runs.mkdir()
    runs.chmod(0o2750)

    make_folder(runs / "7f3a")
    with open(runs / "7f3a" / "log", "w", opener=open_private) as file:
        file.write("hello")

    assert modes(runs / "7f3a") == {"7f3a": "0o2750", "7f3a/log": "0o640"}


def test_what_is_there_keeps_its_mode(runs: Path) -> None:
    runs.mkdir(mode=0o755)
    (runs / "log").touch(0o644)

    make_folder(runs)
    os.close(open_private(runs / "log", os.O_WRONLY | os.O_CREAT))

    assert modes(runs) == {"runs": "0o755", "runs/log": "0o644"}
