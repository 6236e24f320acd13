"""Tickets: asking a rank 0 that lives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it by a star

from andon_trainer.errors import LineLost
from andon_trainer.process.tickets import Answering, ask, tell_late

PATIENT = 60


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_everybody_who_asks_before_or_after_gets_the_answer(pool: ThreadPoolExecutor) -> None:
    store = HashStore()

    early = pool.submit(ask, store, "line", PATIENT)
    answering = Answering(store, "line", {"port": 7070})
    late = [pool.submit(ask, store, "line", PATIENT) for _ in range(3)]

    assert [each.result() for each in (early, *late)] == [{"port": 7070}] * 4
    answering.close()
    answering.close()


def test_the_answer_of_an_earlier_start_is_not_taken(pool: ThreadPoolExecutor) -> None:
    store = HashStore()
    earlier = Answering(store, "line", {"port": 1})
    assert ask(store, "line", PATIENT) == {"port": 1}
    earlier.close()

    asked = pool.submit(ask, store, "line", PATIENT)
    later = Answering(store, "line", {"port": 2})

    assert asked.result() == {"port": 2}
    later.close()


def test_a_rank_0_whose_launch_has_another_one_falls_silent(pool: ThreadPoolExecutor) -> None:
    store = HashStore()
    orphan = Answering(store, "line", {"port": 1})

    current = Answering(store, "line", {"port": 2})
    orphan.await_tickets(1, PATIENT)  # ends as it falls silent, though nobody asks
    asked = pool.submit(ask, store, "line", PATIENT)

    assert asked.result() == {"port": 2}
    orphan.close()
    current.close()


def test_lines_of_one_launch_do_not_hear_each_other(pool: ThreadPoolExecutor) -> None:
    store = HashStore()
    first, second = (Answering(store, f"line/{n}", {"port": n}) for n in (1, 2))

    assert ask(store, "line/2", PATIENT) == {"port": 2}
    assert ask(store, "line/1", PATIENT) == {"port": 1}
    first.close()
    second.close()


def test_a_rank_0_that_serves_nothing_waits_until_the_others_know(pool: ThreadPoolExecutor) -> None:
    store = HashStore()
    store.add("line/tickets", 1)  # of an earlier start
    answering = Answering(store, "line", {"refused": "no port"})

    asked = [pool.submit(ask, store, "line", PATIENT) for _ in range(2)]
    answering.await_tickets(2, PATIENT)
    answering.close()

    assert [each.result() for each in asked] == [{"refused": "no port"}] * 2


def test_nobody_waits_for_ever_for_a_rank_0_that_does_not_come() -> None:
    with pytest.raises(LineLost, match=r"rank 0 of this launch did not call line.prepare"):
        ask(HashStore(), "line", 0)


def test_who_comes_after_the_end_is_told_and_whoever_was_answered_is_not() -> None:
    store = HashStore()
    answering = Answering(store, "line", {"port": 1})
    assert ask(store, "line", PATIENT) == {"port": 1}
    answering.close()

    tell_late(store, "line", {"refused": "it is over"})

    assert ask(store, "line", PATIENT) == {"refused": "it is over"}


class GoneStore(HashStore):
    """A store whose host is gone."""

    def add(self, key: str, amount: int) -> int:
        if key.endswith("tickets"):
            raise RuntimeError("Connection reset by peer")
        return super().add(key, amount)


def test_a_store_that_is_gone_ends_the_answering_and_is_an_error_for_who_asks() -> None:
    with pytest.raises(RuntimeError, match="Connection reset"):
        ask(GoneStore(), "line", PATIENT)
    with pytest.raises(RuntimeError, match="Connection reset"):
        Answering(GoneStore(), "line", {})
