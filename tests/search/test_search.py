"""Every state of small worlds: the real cores, with streams, processes and journals that fail.

`docs/verification.md` says what a world is. `make soak` searches the larger ones much further.
"""

from __future__ import annotations

import os
import sys

import pytest

from search.search import Report, search
from search.state import ALL_FAULTS, Bounds
from search.transcript import transcript
from search.world import World

_STATES = int(os.environ.get("ANDON_SEARCH_STATES", "1500"))
"""How many states of each world that is too large to be searched whole."""

# Work that takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(600 + _STATES // 50)

LARGE = {
    "two faults": Bounds(faults=2, steps=1),
    "two steps": Bounds(faults=1, steps=2),
    "two means": Bounds(faults=2, steps=1, means=2),
    "two chunks": Bounds(faults=1, steps=1, chunks=2),
    "both workers needed": Bounds(faults=1, steps=1, min_workers=2),
    "three workers": Bounds(workers=3, faults=1, steps=1),
}


def _searched(bounds: Bounds, states: int = 10**9) -> Report:
    world = World(bounds)
    report = search(world, states=states)
    sys.stdout.write(f"\n{report}\n")
    if report.found is not None:
        pytest.fail(f"{report.found.message}\n{transcript(world, report.found.way)}")
    if report.stuck:
        pytest.fail(f"the goal is out of reach after\n{transcript(world, report.stuck[0])}")
    return report


@pytest.mark.parametrize("kind", sorted(ALL_FAULTS))
def test_c_commit_001_nothing_goes_wrong_or_gets_stuck_in_any_state_after(kind: str) -> None:
    report = _searched(Bounds(faults=1, steps=1, means=1, kinds=frozenset({kind})))

    assert report.complete
    assert report.goals


def test_a_line_of_three_reaches_its_goal_from_every_state_without_faults() -> None:
    report = _searched(Bounds(workers=3, faults=0, steps=1))

    assert report.complete
    assert report.goals
    assert not report.lost


@pytest.mark.parametrize("name", LARGE)
def test_c_commit_001_nothing_goes_wrong_in_the_nearest_states_of(name: str) -> None:
    report = _searched(LARGE[name], _STATES)

    assert report.complete or report.states >= _STATES
