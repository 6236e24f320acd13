"""Whether another process of this host is stopped, or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from andon.host.process import Process, ProcessState, own_process, state_of

RUNS = ProcessState.RUNS

pytestmark = pytest.mark.skipif(not own_process().host, reason="/proc is not Linux's, or hidden")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    # It says when it runs: before that it may be seen in any state.
    code = "import sys; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read()"
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.read(1) == b"."
        yield started
        started.kill()


def test_a_process_is_stopped_from_sigstop_to_sigcont(child: subprocess.Popen[bytes]) -> None:
    process = Process(own_process().host, child.pid)
    before = state_of(process)

    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # Returns once the kernel has stopped it.
    during = state_of(process)
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    after = state_of(process)

    assert (before, during, after) == (RUNS, ProcessState.STOPPED, RUNS)


def test_a_process_that_was_killed_ends_as_long_as_it_is_in_the_process_table(
    child: subprocess.Popen[bytes],
) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It stays in the table.

    assert state_of(Process(own_process().host, child.pid)) is ProcessState.ENDS


@pytest.mark.parametrize(
    "process",
    [
        Process(b"", os.getpid()),
        Process(b"elsewhere" + bytes(7), os.getpid()),
        Process(own_process().host, 2**22 + 1),
    ],
    ids=["host unknown", "another host", "no such process"],
)
def test_a_process_that_can_not_be_looked_up_is_not_known_to_stand_still(process: Process) -> None:
    assert state_of(process) is RUNS


def test_this_process_runs() -> None:
    assert own_process().id == os.getpid()
    assert state_of(own_process()) is RUNS
