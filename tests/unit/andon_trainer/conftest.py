"""What the tests of the worker share: they run on no line, and leave this process as it was."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from andon_trainer import Line


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a launcher's variables away: these tests are solo."""
    for name in ("ANDON_ADDRESS", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "ANDON_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _signal_handler() -> Iterator[None]:
    """Puts back what a line with a run's folder replaces."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def line() -> Iterator[Line]:
    """A script's line, alone."""
    from andon_trainer import Line  # Here, since it loads PyTorch, which some tests run without.

    line = Line(seed=3, device="cpu")
    yield line
    line.close()
