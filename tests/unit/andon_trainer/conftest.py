"""What the tests of the worker share: they run on no line."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a launcher's variables away: these tests are solo."""
    for name in ("ANDON_ADDRESS", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "ANDON_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
