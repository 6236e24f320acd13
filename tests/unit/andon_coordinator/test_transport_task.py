"""The line's clock counts only time in which the process could listen."""

from __future__ import annotations

from andon_coordinator.transport.task import LineClock


class Hand:
    """A monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 50.0

    def __call__(self) -> float:
        return self.at


def test_the_clock_follows_monotonic_time() -> None:
    hand = Hand()
    clock = LineClock(hand, 1.0)
    start = clock.now()

    for _ in range(10):
        hand.at += 0.5
        clock.tick()

    assert clock.now() - start == 5.0


def test_a_long_gap_counts_as_the_longest_gap_allowed() -> None:
    hand = Hand()
    clock = LineClock(hand, 1.0)
    start = clock.now()

    hand.at += 3600.0

    assert clock.now() - start == 1.0
    clock.tick()
    assert clock.now() - start == 1.0
    hand.at += 0.25
    assert clock.now() - start == 1.25


def test_a_tick_says_how_much_later_than_due_it_comes() -> None:
    hand = Hand()
    clock = LineClock(hand, 1.0)
    late = []

    for pause in (0.25, 0.125, 0.75, 5.0):
        hand.at += pause
        late.append(clock.tick(0.25))

    # Of the last one, the line's time has one second only.
    assert late == [0.0, 0.0, 0.5, 0.75]


def test_clock_never_goes_back() -> None:
    hand = Hand()
    clock = LineClock(hand, 1.0)
    times = []

    for pause in (0.1, 5.0, 0.0, 0.9, 1.1, 30.0, 0.2):
        hand.at += pause
        times.append(clock.now())
        clock.tick()
        times.append(clock.now())

    assert times == sorted(times)
