"""Every state of small worlds: the real cores, with streams, processes and journals that fail.

`docs/verification.md` says what a world is. `make soak` searches the larger ones much further.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from search.search import Report, search
from search.state import (
    ALL_FAULTS,
    FOR_GOOD,
    LEARNING_FAULTS,
    NOTICE,
    OVERLAP_FAULTS,
    RAISED,
    RELAYED,
    WRONG_ARITHMETIC,
    Bounds,
)
from search.transcript import transcript
from search.world import World

_STATES = int(os.environ.get("ANDON_SEARCH_STATES", "1500"))
"""How many states of each world that is too large to be searched whole."""

# Work that takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(600 + _STATES // 50)

LARGE = {
    "two faults": Bounds(faults=2, steps=1),
    "two steps": Bounds(faults=1, steps=2),
    "standing requests": Bounds(faults=1, standing=True),
    "standing requests, two faults": Bounds(faults=2, standing=True),
    "standing requests, means": Bounds(faults=1, standing=True, means=1),
    "standing requests, overlap": Bounds(
        faults=1, standing=True, overlap=True, kinds=OVERLAP_FAULTS
    ),
    "two means": Bounds(faults=2, steps=1, means=2),
    "two chunks": Bounds(faults=1, steps=1, chunks=2),
    "both workers needed": Bounds(faults=1, steps=1, min_workers=2),
    "three workers": Bounds(workers=3, faults=1, steps=1),
    "grains": Bounds(faults=2, steps=2, grains=True),
    "grains, three workers, two chunks": Bounds(
        workers=3, faults=1, steps=1, chunks=2, grains=True, kinds=frozenset({"crash", "data"})
    ),
    "local steps": Bounds(faults=1, local=True, kinds=OVERLAP_FAULTS),
    "overlap": Bounds(faults=1, overlap=True, kinds=OVERLAP_FAULTS),
    "overlap, both workers needed": Bounds(
        faults=1, overlap=True, min_workers=2, kinds=OVERLAP_FAULTS
    ),
    "overlap, epochs of two windows": Bounds(
        faults=1, steps=3, overlap=True, windows=2, kinds=OVERLAP_FAULTS
    ),
    "overlap, two faults": Bounds(faults=2, overlap=True, kinds=OVERLAP_FAULTS),
    "overlap, two chunks": Bounds(faults=1, chunks=2, overlap=True, kinds=OVERLAP_FAULTS),
    "overlap, three workers": Bounds(workers=3, faults=1, overlap=True, kinds=OVERLAP_FAULTS),
}

# Worker 0 begins alone, so the other learns whenever it comes.
NEWCOMER = Bounds(faults=1, expect=1, learns=True, kinds=LEARNING_FAULTS)
LARGE |= {
    "a learner": replace(NEWCOMER, ends=True),
    "a learner, standing requests": replace(NEWCOMER, standing=True),
    "a learner, means": replace(NEWCOMER, means=1, ends=True),
    "a learner, two chunks": replace(NEWCOMER, chunks=2),
    "a learner, two faults": replace(NEWCOMER, faults=2),
    "two learners": replace(NEWCOMER, workers=3),
    "a spare": replace(NEWCOMER, spares=True, kinds=frozenset({"kept"})),
    "a spare, a crash": replace(
        NEWCOMER, faults=2, spares=True, kinds=frozenset({"kept", "crash"})
    ),
    "a learner, local steps": replace(NEWCOMER, local=True),
    "a learner, overlap": replace(NEWCOMER, overlap=True),
    "a learner, overlap, standing requests": replace(NEWCOMER, overlap=True, standing=True),
    "a worker that comes back learns": Bounds(
        faults=2, learns=True, standing=True, kinds=LEARNING_FAULTS
    ),
}

# A whole cluster may lose power, and comes back with the checkpoint of step 0, or without.
CHECKPOINTED = Bounds(faults=1, steps=1, checkpoint=0, kinds=frozenset({"power"}))
LARGE |= {
    "a checkpoint of step 1": replace(CHECKPOINTED, steps=2, checkpoint=1),
    "a checkpoint, means": replace(CHECKPOINTED, means=1),
    "a checkpoint, local steps": replace(CHECKPOINTED, local=True),
    "a checkpoint, overlap": replace(CHECKPOINTED, overlap=True),
    "a checkpoint, one worker is enough": replace(CHECKPOINTED, expect=1),
    "a checkpoint, two faults": replace(
        CHECKPOINTED, faults=2, kinds=frozenset({"power", "crash", "cord", "break"})
    ),
}

# Two rounds exchange a part of the model each, and an epoch has three.
FRAGMENTS = Bounds(faults=1, local=True, fragments=2, windows=3, kinds=OVERLAP_FAULTS)
LARGE |= {
    "fragments": FRAGMENTS,
    "fragments, overlap": replace(FRAGMENTS, overlap=True),
    "fragments, a journal is lost": replace(FRAGMENTS, kinds=frozenset({"lost"})),
}

# A window goes on once one of its workers has computed, and nobody is left out of two in a row.
QUORUM = Bounds(faults=0, steps=1, local=True, quorum=True)
LARGE |= {
    "a quorum": replace(QUORUM, steps=2),
    "a quorum, one fault": replace(QUORUM, faults=1, kinds=OVERLAP_FAULTS),
    "a quorum, epochs of two windows": replace(QUORUM, steps=3, windows=2),
}

# A worker finds a NaN in what it computes, before its exchange has begun or, with overlapped
# windows, in what it computes ahead. After a loss both may be in one round.
COMPUTING = Bounds(faults=1, computes=True, kinds=frozenset({"nan"}))
LARGE |= {
    "overlap, a NaN": replace(COMPUTING, overlap=True),
    "overlap, a NaN and a crash": replace(
        COMPUTING, faults=2, overlap=True, windows=2, kinds=frozenset({"nan", "crash"})
    ),
    "overlap, computing takes time": Bounds(
        faults=1, overlap=True, computes=True, kinds=OVERLAP_FAULTS
    ),
}

# With local steps these worlds are searched whole in every run; the others by `make soak`.
OVERLAPPED = ["crash", "data", "lease", "leaves", "reducer", "transfer"]


# With standing requests these are. Their scripts average a number after each step, when the next
# one may be assigned already.
STANDING = ["cord", "crash", "data", "leaves", "transfer"]


# While a worker learns, these are.
LEARNING = ["stopped", "transfer"]


# With grains, these are.
GRAINS = ["break", "crash", "data", "reducer"]


# Each step is verified, and a worker computes a grain wrong, of its own or of the other's.
VERIFIED = Bounds(
    faults=1, steps=1, grains=True, verifies=True, kinds=frozenset({WRONG_ARITHMETIC})
)
LARGE |= {
    "a wrong result, and a loss in the inquest": replace(
        VERIFIED, faults=2, kinds=frozenset({WRONG_ARITHMETIC, "crash", "cord", "kept"})
    ),
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


def _whole(bounds: Bounds) -> Report:
    """A search of all states: nothing goes wrong, and the goal can be reached from each."""
    report = _searched(bounds)
    assert report.complete
    assert report.goals
    return report


@pytest.mark.parametrize("kind", sorted({*ALL_FAULTS, RAISED}))
def test_c_commit_001_nothing_goes_wrong_or_gets_stuck_in_any_state_after(kind: str) -> None:
    _whole(Bounds(faults=1, steps=1, means=1, kinds=frozenset({kind})))


@pytest.mark.parametrize("kind", OVERLAPPED)
def test_f_dp_002_with_local_steps_every_position_is_in_one_record_in_any_state_after(
    kind: str,
) -> None:
    _whole(Bounds(faults=1, steps=1, local=True, kinds=frozenset({kind})))


@pytest.mark.parametrize("kind", GRAINS)
def test_f_dp_002_with_grains_every_position_is_in_one_node_in_any_state_after(kind: str) -> None:
    _whole(Bounds(faults=1, steps=1, grains=True, kinds=frozenset({kind})))


@pytest.mark.parametrize(
    "bounds",
    # Of three workers one can be convicted.
    [
        replace(VERIFIED, faults=2),
        replace(VERIFIED, workers=3),
        replace(VERIFIED, workers=3, kinds=frozenset({RELAYED})),
    ],
    ids=["two wrong results", "three workers", "a sum that comes changed"],
)
def test_a_wrong_result_is_never_committed_nor_anybody_convicted_who_was_right(
    bounds: Bounds,
) -> None:
    _whole(bounds)


@pytest.mark.parametrize("kind", [*OVERLAPPED, RAISED])
def test_f_dp_002_with_overlap_every_position_is_in_one_record_in_any_state_after(
    kind: str,
) -> None:
    _whole(Bounds(faults=1, overlap=True, kinds=frozenset({kind})))


@pytest.mark.parametrize(
    "bounds",
    [
        replace(COMPUTING, steps=1, means=1),
        replace(COMPUTING, steps=1, local=True),
        replace(COMPUTING, overlap=True, windows=2),
    ],
    ids=["plain", "local steps", "overlap"],
)
def test_a_nan_found_at_any_moment_of_a_step_leaves_the_goal_in_reach(bounds: Bounds) -> None:
    _whole(bounds)


@pytest.mark.parametrize("kind", STANDING)
def test_c_commit_001_with_standing_requests_nothing_goes_wrong_or_gets_stuck_after(
    kind: str,
) -> None:
    _whole(Bounds(faults=1, standing=True, means=1, kinds=frozenset({kind})))


@pytest.mark.parametrize("kind", LEARNING)
def test_c_learn_001_a_learner_arrives_with_the_others_weights_from_every_state_after(
    kind: str,
) -> None:
    _whole(replace(NEWCOMER, kinds=frozenset({kind})))


@pytest.mark.parametrize(
    "bounds",
    [
        replace(NEWCOMER, faults=0, patient=True),
        replace(NEWCOMER, means=1, kinds=frozenset({FOR_GOOD})),
    ],
    ids=["nothing fails", "a worker is gone for good"],
)
def test_a_run_that_ends_at_any_moment_while_a_worker_learns_ends_for_everybody(
    bounds: Bounds,
) -> None:
    _whole(replace(bounds, ends=True))


def test_c_learn_001_with_overlap_a_learner_arrives_and_its_donor_drops_nothing() -> None:
    _whole(replace(NEWCOMER, overlap=True, kinds=frozenset({"lease"})))


@pytest.mark.parametrize("schedule", [{"standing": True}, {"overlap": True}], ids=str)
def test_a_worker_that_gives_notice_at_any_moment_voids_no_round_and_is_dealt_nothing_more(
    schedule: dict[str, bool],
) -> None:
    _whole(Bounds(faults=1, kinds=frozenset({NOTICE}), **schedule))


def test_fragments_leave_nothing_over_where_state_is_needed_in_one_piece() -> None:
    _whole(replace(FRAGMENTS, kinds=frozenset({"crash"})))


def test_f_dp_002_with_a_quorum_late_workers_come_back_and_every_position_is_in_one_record() -> (
    None
):
    report = _whole(QUORUM)

    assert not report.lost


def test_c_learn_001_a_learner_and_a_worker_that_stand_average_the_same_numbers() -> None:
    report = _whole(replace(NEWCOMER, faults=0, standing=True, means=1))

    assert not report.lost


def test_c_commit_001_a_line_goes_on_from_a_checkpoint_in_any_state_after_a_loss_of_power() -> None:
    _whole(CHECKPOINTED)


@pytest.mark.parametrize("windows", [0, 2])
def test_overlapped_windows_reach_their_goal_from_every_state_without_faults(windows: int) -> None:
    report = _whole(Bounds(faults=0, steps=3, overlap=True, windows=windows))

    assert not report.lost


def test_a_line_of_three_reaches_its_goal_from_every_state_without_faults() -> None:
    report = _whole(Bounds(workers=3, faults=0, steps=1))

    assert not report.lost


@pytest.mark.parametrize("name", LARGE)
def test_c_commit_001_nothing_goes_wrong_in_the_nearest_states_of(name: str) -> None:
    report = _searched(LARGE[name], _STATES)

    assert report.complete or report.states >= _STATES
