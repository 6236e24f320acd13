"""What a process writes of its own threads, and whom it is asked of."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from andon_trainer.exchange.control import written_stacks
from andon_trainer.exchange.control.written_stacks import stacks_of, stacks_written_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: files in memory")


def test_a_process_that_writes_nothing_is_sent_no_signal() -> None:
    # The signal would end this very process.
    assert stacks_of([os.getpid()]) == {}


def test_a_signal_of_the_script_stays_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    number = int(signal.SIGRTMAX) - 3
    signal.signal(number, lambda *_: None)
    monkeypatch.setattr(written_stacks, "_SIGNALS_BELOW_LAST", 3)

    written_stacks.write_when_asked()

    assert stacks_written_at(number, "another", all_threads=True) is None
    assert stacks_of([os.getpid()]) == {}
    signal.signal(number, signal.SIG_DFL)


def test_a_python_without_files_in_memory_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_stacks, "_MAKES_FILES", False)

    assert stacks_written_at(int(signal.SIGRTMAX) - 4, "none", all_threads=True) is None
    assert stacks_of([os.getpid()]) == {}
