"""How long a window waits for workers that have not computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.records import PositionRange
from andon_coordinator.core.quorum import (
    OpenWindow,
    Pace,
    Working,
    done_in_s,
    late_workers,
    needed,
)

WINDOW = OpenWindow(workers=4, done=3, positions=64, usual_s=10.0, reached_at=100.0)
SLOW = Working(worker=3, positions=16, expected_at=None, may_be_late=True)
WORTH_S = 0.1 * 10.0 * (16 / 64) * 4 / 3


def share(start: int, stop: int) -> tuple[PositionRange, ...]:
    return (PositionRange(start, stop),)


@pytest.mark.parametrize(
    ("part", "workers", "most"), [(0.75, 4, 3), (0.75, 3, 3), (0.1, 10, 1), (1e-6, 3, 1), (1, 3, 3)]
)
def test_a_quorum_is_a_part_of_the_workers_rounded_up(part: float, workers: int, most: int) -> None:
    assert needed(part, workers) == most


@pytest.mark.parametrize(
    ("grace_s", "expected_at", "waits_until"),
    [
        (0.0, None, 100.0),
        (2.0, None, 102.0),
        (None, None, 100.0 + WORTH_S),
        (None, 100.0 + 0.9 * WORTH_S, 100.0 + WORTH_S),
        (None, 100.0 + 1.1 * WORTH_S, 100.0),
    ],
)
def test_a_window_waits_for_what_a_change_is_worth_and_not_in_vain(
    grace_s: float | None, expected_at: float | None, waits_until: float
) -> None:
    slow = replace(SLOW, expected_at=expected_at)

    assert late_workers(WINDOW, [slow], grace_s, waits_until) == (3,)
    assert waits_until == 100.0 or late_workers(WINDOW, [slow], grace_s, waits_until - 0.01) == ()


def test_a_worker_that_may_not_be_late_is_waited_for() -> None:
    bound = replace(SLOW, worker=2, may_be_late=False)

    assert late_workers(WINDOW, [SLOW, bound], 0.0, 1000.0) == ()


def test_what_is_expected_of_a_worker_follows_from_its_own_shares() -> None:
    pace = Pace()
    pace.assigned(share(0, 16), 0.0)
    assert pace.expected_at is None

    pace.computed(share(0, 16), 8.0)
    pace.assigned(share(0, 16), 9.0)  # The same again: it is computed already.
    assert pace.expected_at is None
    pace.recorded()
    pace.assigned(share(64, 72), 20.0)

    assert pace.took_s == 8.0
    assert pace.expected_at == 20.0 + 4.0


def paced(position_s: float, *, working: int = 0, at: float = 100.0) -> Pace:
    """A worker of this speed, that has begun with so many positions."""
    pace = Pace()
    pace.assigned(share(0, 8), 0.0)
    pace.computed(share(0, 8), 8 * position_s)
    pace.recorded()
    if working:
        pace.assigned(share(8, 8 + working), at)
    return pace


def test_all_are_done_once_what_is_left_is_computed_by_all_as_fast_as_each_can() -> None:
    fast, slow = paced(0.25), paced(1.0, working=4, at=98.0)

    # The slow one has 2 of its 4 positions left. With the 3 that are free that is one second.
    assert done_in_s(3, [fast, slow], 100.0) == pytest.approx(1.0)
    assert done_in_s(3, [fast, paced(1.0)], 100.0) == pytest.approx(3 / 5)
    # One that should be done has nothing left.
    assert done_in_s(5, [fast, slow], 110.0) == pytest.approx(1.0)


def test_nobody_knows_when_all_are_done_as_long_as_a_pace_is_unknown() -> None:
    assert done_in_s(8, [paced(0.25), Pace()], 100.0) is None
    assert done_in_s(8, [], 100.0) is None
