"""The watch over workers' processes: how long each has been stopped."""

from __future__ import annotations

from andon.host.process import Process
from andon_coordinator.transport.process_watch import STOPPED_S, ProcessWatch

ONE, OTHER = Process(b"h", 1), Process(b"h", 2)


def test_a_process_counts_as_stopped_once_every_look_for_a_while_found_it_so() -> None:
    watch = ProcessWatch(lambda process: process == ONE)
    processes = [(7, ONE), (8, OTHER), (9, None)]

    first = watch.look(processes, 0.0)
    soon = watch.look(processes, STOPPED_S / 2)
    then = watch.look(processes, STOPPED_S)

    assert (first, soon) == ([], [])
    assert [stream for stream, _ in then] == [7]


def test_a_process_that_went_on_in_between_begins_anew() -> None:
    stopped = {ONE}
    watch = ProcessWatch(lambda process: process in stopped)

    watch.look([(7, ONE)], 0.0)
    stopped.clear()
    watch.look([(7, ONE)], STOPPED_S)
    stopped.add(ONE)
    again = watch.look([(7, ONE)], 2 * STOPPED_S)

    assert again == []


def test_the_next_stream_of_a_process_begins_anew() -> None:
    watch = ProcessWatch(lambda process: True)
    watch.look([(7, ONE)], 0.0)

    assert watch.look([(8, ONE)], STOPPED_S) == []


def test_of_many_processes_each_is_looked_at_in_turn() -> None:
    looked: list[int] = []

    def stopped(process: Process) -> bool:
        looked.append(process.id)
        return False

    watch = ProcessWatch(stopped)
    processes = [(each, Process(b"h", each)) for each in range(100)]

    for tick in range(2):
        watch.look(processes, float(tick))

    assert set(looked) == set(range(100))
    assert len(looked) == 128
