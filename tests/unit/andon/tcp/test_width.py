"""The number of connections of a lane: it grows while another one raises the rate."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from andon.tcp.kernel import LaneFlow, sum_of
from andon.tcp.width import LaneWidth

MBIT = 125_000


class Link:
    """A network as a sender's kernel sees it, which sends whenever it is looked at."""

    def __init__(self, rate: Callable[[int], float], width: LaneWidth, round_trip_s: float) -> None:
        self.rate, self.width, self.round_trip_s = rate, width, round_trip_s
        self.now, self.acked, self.busy_s, self.shut = 0.0, 0.0, 0.0, False

    def send(self, seconds: float) -> int:
        """Sends for so long, and returns the number of connections at the end."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.busy_s += 0.25
            self.acked += self.rate(self.width.wanted) * 0.25
            flow = LaneFlow(int(self.acked), self.busy_s, self.round_trip_s, 0, shut=self.shut)
            self.width.look(flow, self.width.wanted, self.now)
        return self.width.wanted


def capped(flow: float, link: float) -> Callable[[int], float]:
    return lambda connections: min(connections * flow, link)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (capped(1000 * MBIT, 1000 * MBIT), 1),
        (capped(500 * MBIT, 1000 * MBIT), 2),
        (capped(200 * MBIT, 1000 * MBIT), 8),
        (capped(5 * MBIT, 1000 * MBIT), 16),
    ],
)
@pytest.mark.parametrize("round_trip_s", [0.0002, 0.1])
def test_it_doubles_while_that_raises_the_rate_and_goes_back_if_not(
    rate: Callable[[int], float], wanted: int, round_trip_s: float
) -> None:
    link = Link(rate, LaneWidth(16), round_trip_s)

    assert link.send(20) == wanted


def test_what_came_to_nothing_is_tried_again_ever_more_rarely() -> None:
    link = Link(capped(1000 * MBIT, 1000 * MBIT), LaneWidth(16), 0.001)

    tries = [at for at in range(1800) if link.send(1) == 2]

    pairs = itertools.pairwise(tries)
    gaps = [after - before for before, after in pairs if after > before + 3]
    assert 3 <= len(gaps) <= 6
    assert gaps == sorted(gaps)


def test_a_network_that_begins_to_cap_flows_is_found_at_the_next_try() -> None:
    link = Link(capped(1000 * MBIT, 1000 * MBIT), LaneWidth(16), 0.001)
    link.send(10)

    link.rate = capped(250 * MBIT, 1000 * MBIT)

    assert link.send(80) == 4


def test_a_receiver_that_holds_back_says_nothing_of_the_network() -> None:
    link = Link(capped(5 * MBIT, 1000 * MBIT), LaneWidth(16), 0.001)
    link.shut = True

    assert link.send(30) == 1


def test_what_the_other_end_opened_is_used_and_measured_like_any_other() -> None:
    link = Link(capped(250 * MBIT, 1000 * MBIT), LaneWidth(16), 0.001)

    link.width.opened(8)

    assert link.width.wanted == 8
    assert link.send(20) == 8


def test_it_waits_with_what_there_is_when_no_more_can_be_opened() -> None:
    link = Link(capped(5 * MBIT, 1000 * MBIT), LaneWidth(16), 0.001)
    link.send(1)

    link.width.could_not_open(1, link.now)

    assert link.send(30) == 1


def test_connections_count_together_and_the_busiest_says_how_long() -> None:
    flows = [LaneFlow(10, 2.0, 0.1, 1, shut=False), LaneFlow(5, 1.0, 0.2, 2, shut=True)]

    assert sum_of(flows) == LaneFlow(15, 2.0, 0.2, 3, shut=True)
    assert sum_of([*flows, None]) is None
