"""The inbox: what streams brought, in order, and of control streams the present one's alone."""

from __future__ import annotations

from andon.protocol.records import Key
from andon_trainer.core.events import AveragesComplete, Resumed, Voided
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
