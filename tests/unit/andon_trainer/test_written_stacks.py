"""What a process writes of its own threads, and whom it is asked of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from andon_trainer.exchange.control import written_stacks
from andon_trainer.exchange.control.lock_watch import _Alarm
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

    assert stacks_written_at(number, "another") is None
    assert stacks_of([os.getpid()]) == {}
    signal.signal(number, signal.SIG_DFL)


def test_a_python_without_files_in_memory_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_stacks, "_MAKES_FILES", False)

    assert stacks_written_at(int(signal.SIGRTMAX) - 4, "none") is None
    assert stacks_of([os.getpid()]) == {}


def interrupt_often(seconds: float) -> None:
    """Has this thread write its stack down again and again, while it calls and returns."""
    over, script = threading.Event(), threading.get_ident()

    def ask() -> None:
        alarm, until = _Alarm.of(script), time.monotonic() + seconds
        assert alarm is not None
        while time.monotonic() < until:
            alarm.set(0.0001)
            time.sleep(0.0003)
        assert "called" in alarm.taken()
        over.set()

    def called(depth: int) -> None:
        if depth:
            called(depth - 1)

    threading.Thread(target=ask).start()
    while not over.is_set():
        for depth in range(60):
            called(depth)


def test_a_stack_that_is_written_while_its_thread_runs_on_ends_no_process() -> None:
    code = "from unit.andon_trainer.test_written_stacks import interrupt_often; interrupt_often(2)"
    tests = Path(__file__).parents[2]

    done = subprocess.run([sys.executable, "-c", code], cwd=tests, check=False)

    assert done.returncode == 0
