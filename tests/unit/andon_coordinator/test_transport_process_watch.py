"""The watch over workers' processes: how long each has been stopped, or ending."""

from __future__ import annotations

from andon.host.process import Process, ProcessState
from andon_coordinator.transport.process_watch import SURE_S, ProcessWatch, Seen

ONE, OTHER = Process(b"h", 1), Process(b"h", 2)
STOPPED, RUNS, ENDS = ProcessState.STOPPED, ProcessState.RUNS, ProcessState.ENDS


def test_a_state_counts_once_every_look_for_a_while_found_it_so() -> None:
    watch = ProcessWatch(lambda process: {ONE: STOPPED, OTHER: RUNS}[process])
    processes = [(7, ONE), (8, OTHER), (9, None)]

    first = watch.look(processes, 0.0)
    soon = watch.look(processes, SURE_S / 2)
    then = watch.look(processes, SURE_S)

    assert (first, soon) == ([], [])
    assert then == [Seen(7, STOPPED, SURE_S)]


def test_a_process_that_was_in_another_state_in_between_begins_anew() -> None:
    now = STOPPED
    watch = ProcessWatch(lambda process: now)

    watch.look([(7, ONE)], 0.0)
    now = RUNS
    watch.look([(7, ONE)], 1.0)
    now = STOPPED
    again = watch.look([(7, ONE)], 2.0)
    now = ENDS
    killed = watch.look([(7, ONE)], 3.0)
    then = watch.look([(7, ONE)], 4.0)

    assert (again, killed) == ([], [])
    assert then == [Seen(7, ENDS, 1.0)]


def test_the_next_stream_of_a_process_begins_anew() -> None:
    watch = ProcessWatch(lambda process: STOPPED)
    watch.look([(7, ONE)], 0.0)

    assert watch.look([(8, ONE)], SURE_S) == []
