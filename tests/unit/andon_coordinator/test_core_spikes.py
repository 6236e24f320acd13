"""What a line does about a spike by itself: the least that fits, and never more than its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from andon_coordinator.core.spikes import (
    BUDGETS,
    IN_A_ROW,
    SPAN,
    STANDS_OUT,
    Spike,
    SpikeAction,
    SpikeBook,
    SpikeDecision,
)

HALT, LIMIT, SKIP, BACK, DROP = SpikeAction


def of_norm(step: int) -> Spike:
    return Spike(step=step, what="a norm", norm=8.0, usual=2.0)


def of_loss(step: int) -> Spike:
    return Spike(step=step, what="a loss", norm=2.0)


def of_worker(step: int, worker: int = 1) -> Spike:
    return Spike(step=step, what="a worker", worker=worker)


def decided(
    book: SpikeBook, spike: Spike, *, limits: bool = True, drops: bool = True, backs: bool = False
) -> SpikeAction:
    return book.decide(spike, can_limit=limits, can_drop=drops, can_back=backs).action


@pytest.mark.parametrize(
    ("policy", "norm", "loss", "worker"),
    [(HALT, HALT, HALT, HALT), (LIMIT, LIMIT, HALT, HALT), (SKIP, LIMIT, SKIP, SKIP),
     (BACK, LIMIT, SKIP, SKIP), (DROP, LIMIT, SKIP, SKIP)],
)  # fmt: skip
def test_each_policy_includes_those_before_it_and_does_the_least_that_fits(
    policy: SpikeAction, norm: SpikeAction, loss: SpikeAction, worker: SpikeAction
) -> None:
    book = SpikeBook(policy)

    assert [decided(book, each(100)) for each in (of_norm, of_loss, of_worker)] == [
        norm,
        loss,
        worker,
    ]


def test_a_drift_is_no_matter_of_one_steps_samples() -> None:
    one = replace(of_worker(100), lasts=True)
    all_ = replace(of_norm(100), lasts=True)

    assert [decided(SpikeBook(SKIP), each) for each in (one, all_)] == [HALT, HALT]
    assert [decided(SpikeBook(DROP), each) for each in (one, all_)] == [DROP, HALT]
    assert decided(SpikeBook(DROP), one, drops=False, backs=True) is HALT
    assert decided(SpikeBook(BACK), all_, backs=True) is BACK


def test_a_gradient_is_scaled_to_the_usual_norm() -> None:
    made = SpikeBook(LIMIT).decide(of_norm(100), can_limit=True, can_drop=True)

    assert made.scale == 0.25
    assert made.what == "a norm; the averaged gradient was scaled by 0.25"


def test_where_a_worker_cannot_scale_the_samples_are_left_out() -> None:
    assert decided(SpikeBook(SKIP), of_norm(100), limits=False) is SKIP
    assert decided(SpikeBook(LIMIT), of_norm(100), limits=False) is HALT


def test_a_worker_that_stands_out_alone_again_and_again_is_dropped_and_no_other() -> None:
    book = SpikeBook(DROP)

    acts = [decided(book, of_worker(10 * step, step % 2)) for step in range(1, 7)]

    assert STANDS_OUT == 3
    assert acts == [SKIP, SKIP, SKIP, SKIP, DROP, DROP]
    assert decided(SpikeBook(DROP, [_skip(9, 1)] * 2), of_worker(10), drops=False) is SKIP


def test_a_spike_that_stays_takes_the_line_back_to_before_it_began() -> None:
    book = SpikeBook(BACK)
    steps = [*range(100, 100 + IN_A_ROW), *[100 + IN_A_ROW] * (IN_A_ROW + 1)]

    acts = [decided(book, of_norm(step), backs=True) for step in steps]

    assert acts == [*[LIMIT] * IN_A_ROW, *[SKIP] * IN_A_ROW, BACK]
    # What was done before it went back is of no step that the line still has.
    assert book.began(of_norm(103)) == 103
    assert decided(book, of_norm(103), backs=True) is LIMIT
    assert SpikeBook(BACK, book._made).began(of_norm(104)) == 103


def test_a_line_that_can_not_go_back_says_what_it_lacks() -> None:
    book = SpikeBook(BACK, [_skip(100, 1)] * IN_A_ROW)

    made = book.decide(of_loss(100), can_limit=True, can_drop=True)

    assert made.action is HALT
    assert made.what == (
        "a loss; the samples of 3 attempts at this step were left out already; nobody here can "
        "load a checkpoint from before step 100, to which the line could go back"
    )
    assert decided(SpikeBook(BACK, [_back(step) for step in (1, 2, 3)] + [_skip(9, 1)] * 3),
                   of_loss(9), backs=True) is HALT  # fmt: skip


def test_one_workers_gradient_is_not_in_the_weights_so_nobody_goes_back_for_it() -> None:
    book = SpikeBook(BACK, [_skip(100, 1)] * IN_A_ROW)

    assert decided(book, of_worker(100), backs=True) is HALT


@pytest.mark.parametrize(("action", "spike"), [(LIMIT, of_norm), (SKIP, of_loss)])
def test_a_budget_is_for_a_thousand_steps(
    action: SpikeAction, spike: Callable[[int], Spike]
) -> None:
    book = SpikeBook(action)
    budget = BUDGETS[action]

    acts = [decided(book, spike(step)) for step in range(1, budget + 2)]

    assert acts == [*([action] * budget), HALT]
    told = book.decide(spike(budget + 1), can_limit=True, can_drop=True).what
    assert f"{budget} times in {SPAN} steps" in told
    assert (book.left(budget + 1)[action], book.left(1 + SPAN)[action]) == (0, 1)
    assert decided(book, spike(1 + SPAN)) is action  # The first one is forgotten.


def test_what_a_line_may_still_do_is_told_of_what_its_policy_includes() -> None:
    book = SpikeBook(SKIP, [_skip(9, 1)] * 2)

    assert book.left(10) == {LIMIT: BUDGETS[LIMIT], SKIP: BUDGETS[SKIP] - 2}
    assert SpikeBook(HALT).left(10) == {}


def test_samples_of_one_step_are_left_out_so_often_at_most() -> None:
    book = SpikeBook(SKIP)

    acts = [decided(book, of_loss(100)) for _ in range(IN_A_ROW + 1)]

    assert acts == [*([SKIP] * IN_A_ROW), HALT]
    assert decided(book, of_loss(101)) is SKIP


def test_a_coordinator_that_starts_again_decides_as_the_one_before() -> None:
    spikes = [of_worker(step, step % 3) for step in range(1, 30)]
    one = SpikeBook(DROP)
    made = [one.decide(each, can_limit=True, can_drop=True) for each in spikes]

    again = SpikeBook(DROP, [each for each in made[:10] if each.action is not HALT])

    assert [again.decide(each, can_limit=True, can_drop=True) for each in spikes[10:]] == made[10:]


def _back(step: int) -> SpikeDecision:
    return SpikeDecision(step=step, action=BACK, what="")


def _skip(step: int, worker: int) -> SpikeDecision:
    return SpikeDecision(step=step, action=SKIP, what="", worker=worker)
