"""The inbox: what streams brought, in order, and of control streams the present one's alone."""

from __future__ import annotations

import signal
import sys
import threading

from andon.protocol.records import Key
from andon_trainer.core.events import AveragesComplete, LeaveWanted, Resumed, Voided
from andon_trainer.exchange.path import Inbox

KEY = Key(7, 2)


def test_events_are_taken_in_the_order_in_which_they_came() -> None:
    inbox = Inbox()
    inbox.follow(1)
    inbox.put(Voided(KEY, "lost"), 1)
    inbox.put(AveragesComplete(KEY, 4.0, 2))
    inbox.put(Resumed(3), 1)

    taken = [inbox.take(0.0) for _ in range(4)]

    assert taken == [Voided(KEY, "lost"), AveragesComplete(KEY, 4.0, 2), Resumed(3), None]


def test_what_an_older_control_stream_brought_is_dropped() -> None:
    inbox = Inbox()
    inbox.follow(1)
    inbox.put(Voided(KEY, "lost"), 1)
    inbox.follow(2)
    inbox.put(Resumed(2), 1)
    inbox.put(Resumed(3), 2)

    taken = [inbox.take(0.0) for _ in range(2)]

    assert taken == [Resumed(3), None]


def test_a_signal_that_does_not_interrupt_the_wait_is_heard_all_the_same() -> None:
    # It came just before the wait began, or to another thread: the system ends no wait for it.
    inbox, waiting = Inbox(), threading.get_ident()
    heard = threading.Event()

    def signal_another_thread() -> None:
        while sys._current_frames()[waiting].f_code is not Inbox.take.__code__:
            heard.wait(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not heard.wait(10.0):
            inbox.put(Resumed(1))

    before = signal.signal(signal.SIGUSR1, lambda number, frame: inbox.put(LeaveWanted()))
    other = threading.Thread(target=signal_another_thread)
    other.start()
    try:
        taken = inbox.take()
    finally:
        heard.set()
        other.join()
        signal.signal(signal.SIGUSR1, before)

    assert taken == LeaveWanted()
