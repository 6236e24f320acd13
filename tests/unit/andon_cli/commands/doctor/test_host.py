"""Host: folders and clocks of this machine, and what is said of bad ones."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from andon_cli.commands.doctor.host import (
    check_clock,
    check_folder,
    check_privacy,
    check_shared_memory,
    check_windows,
)
from andon_server.runs import JOURNAL

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()


def test_a_folder_that_keeps_journals_is_left_as_it_was(tmp_path: Path) -> None:
    [finding] = check_folder(tmp_path / "runs")

    assert "can be written and keeps journals" in finding.fact
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_fails_with_the_remedy() -> None:
    [finding] = check_folder(Path("/proc/self/runs"))

    assert finding.level == "fail"
    assert "--run-dir" in finding.remedy


@pytest.mark.parametrize(
    ("runs", "run", "journal", "warns"),
    [
        (0o755, 0o755, 0o644, True),
        (0o700, 0o755, 0o644, False),
        (0o755, 0o700, 0o644, False),
        (0o755, 0o755, 0o600, False),
    ],
)
def test_a_run_that_every_user_may_read_is_a_warning(
    tmp_path: Path, runs: int, run: int, journal: int, *, warns: bool
) -> None:
    made = tmp_path / "runs" / "7f3a" / JOURNAL
    made.parent.mkdir(parents=True)
    made.touch()
    for path, mode in ((made, journal), (made.parent, run), (made.parent.parent, runs)):
        path.chmod(mode)

    findings = check_privacy(tmp_path / "runs")

    assert [each.level for each in findings] == ["warn"] * warns
    assert all("chmod -R o=" in each.remedy for each in findings)


def test_a_shared_folder_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    [finding] = check_shared_memory(tmp_path / "missing")

    assert finding.level == "warn"
    assert "ANDON_SHARED_DIR" in finding.remedy


def test_a_clock_that_was_never_set_fails(tmp_path: Path) -> None:
    [finding] = check_clock(tmp_path, now=100.0)

    assert finding.level == "fail"
    assert "1970-01-01" in finding.fact


def test_a_clock_behind_a_run_that_is_kept_here_is_a_warning(tmp_path: Path) -> None:
    journal = tmp_path / "7f3a" / JOURNAL
    journal.parent.mkdir()
    journal.touch()
    os.utime(journal, (NOON + 3600, NOON + 3600))

    [finding] = check_clock(tmp_path, now=NOON)

    assert finding.level == "warn"
    assert "3600 s before a run here was written" in finding.fact


@pytest.mark.parametrize(("setting", "level"), [("1\n", "warn"), ("0\n", "ok")])
def test_connections_that_forget_their_windows_are_a_warning(
    setting: str, level: str, tmp_path: Path
) -> None:
    kernel = tmp_path / "tcp_slow_start_after_idle"
    kernel.write_text(setting)

    [finding] = check_windows(kernel)

    assert finding.level == level


def test_a_kernel_that_does_not_say_what_becomes_of_windows_is_no_finding(tmp_path: Path) -> None:
    assert check_windows(tmp_path / "missing") == []
