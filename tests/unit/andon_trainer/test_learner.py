"""What a worker that learns tells people, and when it gives up learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from andon.protocol.capabilities import LEARNING, NORMS
from andon.protocol.records import Key
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, Policy
from andon.protocol.scalars import Scalar
from andon_trainer.core.attending import Attending
from andon_trainer.core.events import LearningAsked, ListeningLost
from andon_trainer.core.habit import Habit
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.route import Route, RouteFailed
from andon_trainer.place.learner import Learner, advice_for, doing
from andon_trainer.place.talk import LineTalk
from unit.andon_trainer.assigned_work import HEAD, work

STREAM = 4
CAN = NORMS, LEARNING


@dataclass
class Streams:
    """In place of the listening streams."""

    shares: tuple[ReducerShare, ...] = ()
    traffic: Traffic = field(default_factory=lambda: Traffic.over("wire", 0, 5))
    closed: int = 0
    heard_at: float = 0.0
    chunk_s: float = 0.0

    def close(self) -> None:
        self.closed += 1

    def forget(self, head: Key) -> None:
        del head


class Bench:
    """A learner, and what it opens."""

    def __init__(self) -> None:
        self.opened: list[Streams] = []
        self.opened_early = 0
        self.refuses = ""
        self.inbox = Inbox()
        self.inbox.follow(STREAM)
        joined = SimpleNamespace(reducers=())
        self.link: Any = SimpleNamespace(
            joined=joined, address="a:1", number=STREAM, policy=Policy()
        )
        self.learner = Learner(cast(Connection, self.link), cast(Route, self), self.inbox)

    def listen(self, *_: Any) -> Streams:
        if self.refuses:
            raise RouteFailed("PROTOCOL", self.refuses)
        self.opened.append(Streams())
        return self.opened[-1]

    def open_early(self, *_: Any) -> None:
        self.opened_early += 1


def test_a_reducer_at_which_nobody_may_listen_is_told_of_once_and_learning_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    assert bench.learner.able(CAN) == CAN
    bench.refuses = "the reducer at a:1 lacks listening.v1"

    assert not bench.learner.listen(LearningAsked())

    assert bench.learner.able(CAN) == (NORMS,)
    assert "lacks listening.v1" in caplog.text
    assert "they will wait for it instead" in caplog.text


def test_learning_is_given_up_after_some_tries_without_an_arrival() -> None:
    bench = Bench()

    assert [bench.learner.listen(LearningAsked()) for _ in range(4)] == [True, True, True, False]
    assert bench.learner.able(CAN) == (NORMS,)


def test_averages_that_the_others_have_are_waited_for_as_long_as_a_lease() -> None:
    bench = Bench()
    bench.link.joined.liveness = Liveness(lease_s=3.0)
    assert bench.learner.patience_s(lacks=True, now=100.0) is None
    bench.learner.listen(LearningAsked())
    (streams,) = bench.opened
    streams.heard_at = 90.0

    assert bench.learner.patience_s(lacks=False, now=100.0) is None
    assert bench.learner.patience_s(lacks=True, now=101.0) == 3.0
    streams.heard_at = 102.0
    assert bench.learner.patience_s(lacks=True, now=103.0) == 2.0
    assert bench.learner.patience_s(lacks=True, now=106.0) == 0.0
    assert bench.learner.patience_s(lacks=False, now=107.0) is None
    assert bench.learner.patience_s(lacks=True, now=108.0) == 3.0
    streams.chunk_s = 20.0
    assert bench.learner.patience_s(lacks=True, now=108.0) == 23.0


def test_a_spare_that_caught_up_may_learn_anew_as_often_as_it_has_to() -> None:
    bench = Bench()

    for _ in range(9):
        assert bench.learner.listen(LearningAsked())
        bench.learner.made_up(HEAD, behind=0)

    assert bench.learner.able(CAN) == CAN


def test_who_has_arrived_listens_no_more_and_may_learn_again() -> None:
    bench = Bench()
    for _ in range(4):
        assert bench.learner.listen(LearningAsked())
        bench.learner.arrived()

    assert [each.closed for each in bench.opened] == [1] * 4
    assert bench.learner.exchange is None
    assert bench.learner.traffic.received["wire"] == 20


def test_another_map_of_reducers_makes_it_begin_anew() -> None:
    bench = Bench()
    bench.learner.listen(LearningAsked())
    other = ReducerShare("b:2", 0, 4)

    bench.learner.attend(work())
    assert bench.inbox.take(0) is None
    bench.link.joined.reducers = (other,)
    bench.learner.attend(work())

    assert isinstance(bench.inbox.take(0), ListeningLost)
    bench.learner.close()
    bench.learner.forget(HEAD)
    bench.learner.attend(work())
    assert bench.inbox.take(0) is None


def test_a_learner_tries_once_to_open_its_exchange_early_each_time_that_it_learns() -> None:
    bench = Bench()
    bench.learner.attend(work())
    assert bench.opened_early == 0

    for times in (1, 2):
        bench.learner.listen(LearningAsked())
        for _ in range(3):
            bench.learner.attend(work())
        assert bench.opened_early == times


def test_while_it_learns_others_see_how_far_it_is_behind_and_nothing_that_it_logs() -> None:
    shown: list[tuple[str, str]] = []
    logged: list[Scalar] = []
    attending = Attending()

    def put(scalars: Sequence[Scalar]) -> int:
        logged.extend(scalars)
        return 0

    link: Any = SimpleNamespace(
        control=SimpleNamespace(show=lambda *each: shown.append(each)),
        outbox=SimpleNamespace(put=put),
    )
    talk = LineTalk(link, Habit(), None, lambda: doing(attending))
    scalar = Scalar("loss", 3, 0.5)

    talk.show("COMPUTING")
    talk.log([scalar])
    attending.begin()
    talk.show("COMPUTING")
    talk.log([scalar])

    assert shown == [("COMPUTING", ""), ("SYNCING", "learning: 0 steps behind")]
    assert logged == [scalar]


def test_a_link_that_is_too_slow_for_the_line_is_told_with_its_rate_and_what_would_do() -> None:
    # 5.7 MB each 0.5 s, over 1.6 Mbit/s.
    advice = advice_for(5_700_000, 40, 4_000_000, 20.0)

    assert "0.20 MB/s came to it" in advice
    assert "5.7 MB each 0.50 s" in advice
    assert "28 s apart, or more" in advice
    assert "--local-steps 114 --overlap" in advice


@pytest.mark.parametrize(("steps", "came"), [(0, 10), (4, 0), (4, 3_000)])
def test_a_link_that_brings_the_averages_needs_no_advice(steps: int, came: int) -> None:
    assert not advice_for(1_000, steps, came, 1.0)


def test_streams_that_were_opened_for_a_round_that_goes_on_without_it_are_kept_for_that_round() -> (
    None
):
    bench = Bench()
    assert bench.learner.hear(work(), STREAM)
    bench.learner.hear_on()
    assert bench.learner.hear(work(), STREAM), "the others go on without it once more"

    bench.learner.arrived()  # In the round before, which it took up in the meantime.

    assert [each.closed for each in bench.opened] == [0]
    bench.learner.hear_on()
    bench.learner.arrived()
    assert [each.closed for each in bench.opened] == [1]


def test_a_late_worker_that_can_not_listen_does_not_say_that_it_does() -> None:
    bench = Bench()
    bench.link.policy = Policy(local_steps=2, quorum=0.5)
    assert not bench.learner.hear(work(), STREAM - 1), "an older stream's"
    bench.refuses = "no reducer at a:1"

    assert not bench.learner.hear(work(), STREAM)

    assert not bench.learner.listen(LearningAsked())
    assert bench.learner.able(CAN) == CAN, "the line would not take it otherwise"
