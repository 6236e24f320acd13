"""Logs of the service, on a disk that is full."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from andon_server.process import logging_to


def test_a_log_that_can_not_be_written_is_told_of_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.log"
    path.symlink_to("/dev/full")

    with logging_to(path, quiet=True):
        for _ in range(3):
            logging.getLogger("andon").info("an event")

    assert capsys.readouterr().err == (
        f"{path} can't be written (No space left on device): it lacks records\n"
    )
