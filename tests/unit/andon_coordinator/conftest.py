"""What the coordinator's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a journal is made, in folders that are not there yet."""
    return tmp_path / "runs" / "7f3a" / "journal.sqlite"
