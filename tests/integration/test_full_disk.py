"""A journal on a disk that is full at the end of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon_cli.commands.run import read_report
from andon_coordinator.core.events import LeaveReason
from integration.fixtures.disk import fill, small_disk_at
from unit.andon_cli.books import DIGESTS, Book

pytestmark = pytest.mark.integration


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for the run on a file system of 2 MiB."""
    with small_disk_at(tmp_path / "7f3a", "2m") as disk:
        yield disk


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_a_disk_that_is_full_at_the_end_hides_no_step(small_disk: Path, *, closed: bool) -> None:
    journal = small_disk / "journal.sqlite"
    service = os.fork()
    if service == 0:
        book = Book(journal)
        book.found()
        for step in range(1, 21):
            book.step(step, 2.0)
        for worker, digest in DIGESTS.items():
            book.leave(worker, LeaveReason.COMPLETE, digest)
        if closed:
            book.close()
        os._exit(0)
    os.waitpid(service, 0)
    journal.with_name("journal.sqlite-shm").unlink(missing_ok=closed)
    fill(small_disk)

    report = read_report(
        journal, run_id="7f3a", seconds=1.0, metrics_url="", verdict=ExitCode.COMPLETE
    )

    assert (report.exit_code, report.steps, report.complete) == (0, 20, True)
