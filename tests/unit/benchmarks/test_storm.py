"""The storm's pure parts: the plan of faults, and what is counted of samples and of time."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from storm_ledger import (
    Commit,
    Counts,
    commits_of,
    computed_of,
    count,
    history_of,
    longest_pause_s,
    passed_by,
    read_ledger,
    samples_per_s,
)
from storm_plan import FREEZE, KILL, KILL_SERVICE, Fault, ideal_share, planned, victim_of

sys.path.pop()  # benchmarks/gpu.py would hide tests/gpu

Event = dict[str, Any]


def computes(positions: Sequence[int], commit: str = "", at: float = 0.0) -> Event:
    return {"event": "computes", "at": at, "positions": list(positions), "commit": commit}


def kept(commit: str, parent: str = "", at: float = 0.0, step: int = 1) -> Event:
    return {"event": "kept", "at": at, "step": step, "commit": commit, "parent": parent}


# The plan


def test_the_same_seed_gives_the_same_faults() -> None:
    assert planned(7, 15.0, 600.0, 4) == planned(7, 15.0, 600.0, 4)
    assert planned(7, 15.0, 600.0, 4) != planned(8, 15.0, 600.0, 4)


def test_faults_come_at_even_times_and_the_last_one_leaves_time_to_see_what_follows() -> None:
    faults = planned(1, 15.0, 60.0, 4)

    assert [fault.at_s for fault in faults] == [15.0, 30.0, 45.0]


@pytest.mark.parametrize("seed", range(5))
def test_each_ten_faults_are_of_every_kind(seed: int) -> None:
    faults = planned(seed, 1.0, 21.0, 3)

    for ten in (faults[:10], faults[10:]):
        assert Counter(each.kind for each in ten) == {KILL: 6, FREEZE: 2, KILL_SERVICE: 2}
    assert {each.slot for each in faults} <= {0, 1, 2}


@pytest.mark.parametrize(
    ("running", "victim"), [([0, 1, 2, 3], 2), ([0, 3], 3), ([0, 1], 0), ([], None)]
)
def test_a_fault_whose_slot_is_empty_strikes_the_next_one(
    running: list[int], victim: int | None
) -> None:
    assert victim_of(Fault(1.0, KILL, 2), running) == victim


def test_an_ideal_system_loses_what_frozen_workers_would_have_computed() -> None:
    plan = [
        Fault(10.0, FREEZE, 0),
        Fault(12.0, FREEZE, 1),
        Fault(14.0, FREEZE, 0),  # It is frozen: four seconds more.
        Fault(50.0, KILL, 1),
        Fault(60.0, KILL_SERVICE, 0),
        Fault(97.0, FREEZE, 3),  # The end comes first.
    ]

    share = ideal_share(plan, 8.0, 100.0, 4)

    assert share == pytest.approx(1 - (12 + 8 + 3) / 400)


# What workers wrote


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger-0.jsonl"
    ledger.write_text(json.dumps(kept("a")) + "\n" + '{"event": "kep')

    assert [event["commit"] for event in read_ledger(ledger)] == ["a"]


def test_a_worker_that_wrote_nothing_has_an_empty_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger-0.jsonl") == []


def test_a_worker_that_died_between_sending_and_keeping_is_part_of_what_others_kept() -> None:
    survivor = [computes([0, 1], "a"), kept("a", at=5.0)]
    dead = [computes([2, 3], "a")]

    commits = commits_of([survivor, dead])

    assert commits == {"a": Commit("a", "", 5.0, (0, 1, 2, 3))}


def test_what_nobody_kept_is_no_commit() -> None:
    assert commits_of([[computes([0, 1], "a")], [computes([2, 3], "a")]]) == {}


def test_what_is_computed_again_for_the_same_commit_counts_once_in_it() -> None:
    ledger = [computes([0, 1], "a"), computes([4, 5], "a"), kept("a")]

    assert commits_of([ledger])["a"].positions == (4, 5)


def test_a_commit_is_as_old_as_the_first_who_kept_it() -> None:
    commits = commits_of([[kept("a", at=3.0)], [kept("a", at=2.0)]])

    assert commits["a"].at == 2.0


def test_steps_that_were_rolled_back_to_a_checkpoint_are_not_in_the_history() -> None:
    ledger = [
        *(computes([0], "1.0"), kept("1.0")),
        *(computes([1], "1.1"), kept("1.1", "1.0")),
        *(computes([1], "2.1"), kept("2.1", "1.0")),  # after a restart from the first step
    ]
    commits = commits_of([ledger])

    assert [each.name for each in history_of(commits, "2.1")] == ["1.0", "2.1"]


def test_a_history_that_goes_in_a_circle_is_refused() -> None:
    commits = commits_of([[kept("a", "b"), kept("b", "a")]])

    with pytest.raises(ValueError, match="its own ancestor"):
        history_of(commits, "a")


# What is counted


def test_a_run_in_which_nothing_happened_has_nothing_to_count() -> None:
    ledgers = [[computes([0, 2], "a"), kept("a")], [computes([1, 3], "a"), kept("a")]]
    history = history_of(commits_of(ledgers), "a")

    counts = count(history[0].positions, passed_by(ledgers), computed_of(ledgers))

    assert counts == Counts(kept=4, lost=0, doubled=0, recomputed=0, wasted=0)


def test_samples_of_a_step_that_was_not_committed_are_lost_if_the_worker_goes_on() -> None:
    ledgers = [
        [computes([0, 2], ""), computes([4, 6], "b"), kept("b")],
        [computes([1, 3], ""), computes([5, 7], "b"), kept("b")],
    ]

    counts = count([4, 6, 5, 7], passed_by(ledgers), computed_of(ledgers))

    assert (counts.lost, counts.recomputed, counts.wasted) == (4, 0, 4)


def test_a_worker_that_comes_back_before_where_it_was_loses_nothing_by_that() -> None:
    ledgers = [[computes([0, 1, 2]), computes([3, 4, 5]), computes([0, 1, 2])]]

    assert passed_by(ledgers) == {0, 1, 2}


def test_samples_that_two_steps_of_the_history_have_are_doubled() -> None:
    counts = count([0, 1, 0, 1, 2], range(3), Counter({0: 2, 1: 3, 2: 1}))

    assert counts == Counts(kept=5, lost=0, doubled=2, recomputed=3, wasted=1)


def test_only_commits_within_the_time_count_for_the_speed() -> None:
    history = [Commit(str(at), "", at, (0, 1)) for at in (0.5, 1.5, 2.5, 3.5)]

    assert samples_per_s(history, 1.0, 3.0) == 2.0


def test_the_longest_pause_may_be_before_the_first_commit_or_after_the_last_one() -> None:
    commits = [Commit(str(at), "", at, ()) for at in (3.0, 2.0, 4.0)]

    assert longest_pause_s(commits, 1.5, 9.0) == 5.0
    assert longest_pause_s(commits, -8.0, 4.5) == 10.0
    assert longest_pause_s([], 1.0, 5.0) == 4.0


def test_a_pause_that_began_within_the_time_counts_to_its_end() -> None:
    commits = [Commit(str(at), "", at, ()) for at in (1.0, 2.0, 9.0, 30.0)]

    assert longest_pause_s(commits, 0.0, 3.0) == 7.0
