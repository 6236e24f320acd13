"""Stepping: which epoch the script's loop is in, whatever becomes of the worker meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
import torch

from andon.protocol.order import Order
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.shards import Split
from andon_trainer.core.events import TransferAsked
from andon_trainer.core.reports import NO_DIGEST
from andon_trainer.data.feed import Share
from andon_trainer.model.graph import Graph
from unit.andon_trainer.step_bench import BATCH, StepBench


def state_of(epoch: int) -> TransferAsked:
    cursor = Cursor(epoch, 0)
    return TransferAsked(transfer_id=1, head=Key(1, 90), sends=False, step=8, cursor=cursor)


@pytest.mark.parametrize("later", [False, True])
def test_a_loop_goes_on_in_the_epoch_of_a_state_that_was_installed(*, later: bool) -> None:
    bench = StepBench()
    if later:
        bench.assign((0, 4), end="commit")
    first = bench.assign((0, 4), end="commit", epoch=3)
    bench.assign((4, 8), end="commit", epoch=3)
    bench.member.transfers[first.key] = state_of(3)

    bench.run()

    assert len(bench.computed) == 2 + later
    assert bench.stepper.epoch == 3
    assert bench.member.position.step == 10


def test_a_loop_ends_if_a_mark_ended_its_epoch_also_after_a_state_was_installed() -> None:
    bench = StepBench()
    first = bench.assign((0, 4), end="commit", epoch=4)
    bench.member.transfers[first.key] = state_of(3)

    bench.run()

    assert not bench.computed
    assert bench.stepper.epoch == 3


def test_the_digest_is_reported_in_a_round_that_asks_for_it_whatever_the_steps_number() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="commit")
    bench.assign((4, 8), end="commit", wants_digest=True)

    bench.run()

    assert [len(report.digest.sha256) for report in bench.member.reports] == [0, 32]


WINDOW: dict[str, Any] = {
    "batch": PositionRange(0, 2 * BATCH),
    "window": 2 * BATCH,
    "split": Split((3, 1, 2)),
}
"""A window of a cadence: the counts are 3, 1 and 2 micro-batches of a third of BATCH."""


def sizes(bench: StepBench) -> list[int]:
    return [len(each) for each in bench.computed]


@pytest.mark.parametrize(("micro", "expected"), [(None, [4, 4, 4]), (3, [2, 2, 2, 2, 2, 2])])
def test_f_dp_005_a_share_of_a_cadence_is_one_gradient_of_several_micro_batches(
    micro: int | None, expected: list[int]
) -> None:
    bench = StepBench(micro=micro)
    bench.assign((0, 12), end="commit", micro_batches=3, **WINDOW)

    bench.run()

    indices = [int(each) for each in Order(0, 0, 48).indices(0, 12)]
    assert sizes(bench) == expected
    assert sorted(chain.from_iterable(bench.computed)) == sorted(indices)
    (sent,) = bench.sent
    for block, mean in enumerate(bench.mean(indices)):
        got = torch.frombuffer(bytearray(sent[block]), dtype=torch.float32)
        assert torch.allclose(got, mean, rtol=1e-5, atol=1e-7)
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (12, 12.0)


def test_a_worker_makes_as_many_micro_batches_as_it_is_told_but_none_without_samples() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="commit", micro_batches=3)
    bench.assign((4, 6), end="commit", micro_batches=5, parent=Key(1, 101))

    bench.run()

    assert sizes(bench) == [2, 1, 1, 1, 1]


def test_positions_of_a_lost_worker_come_in_the_cadences_micro_batches() -> None:
    bench = StepBench()
    bench.assign((0, 12), end="void", micro_batches=3, **WINDOW)
    bench.assign((0, 18), end="commit", attempt=1, micro_batches=5, **WINDOW)

    bench.run()

    assert sizes(bench) == [4, 4, 4, 3, 3]


def test_a_newcomer_to_a_window_that_is_tried_again_computes_in_micro_batches_of_the_script() -> (
    None
):
    bench = StepBench()
    bench.assign((0, 12), end="commit", attempt=1, micro_batches=3, **WINDOW)

    bench.run()

    assert sizes(bench) == [4, 4, 4]


def test_the_windows_to_come_are_foreseen_in_the_micro_batches_in_which_they_come() -> None:
    bench = StepBench()
    assigned = bench.assign((0, 12), end="commit", micro_batches=3, **WINDOW)

    upcoming = list(islice(bench.stepper._shares.upcoming(assigned), 3))

    assert upcoming[0] == Share(0, (PositionRange(24, 36),), parts=3)
    assert upcoming[1] == Share(1, (PositionRange(0, 12),), parts=3)


def test_state_is_carried_only_to_the_same_rows_of_the_next_step() -> None:
    bench = StepBench()
    seen = []

    def assign(step: int, start: int, *rows: tuple[int, int], **other: Any) -> None:
        positions = [(start + first, start + stop) for first, stop in rows]
        batch = PositionRange(start, start + other.pop("size", BATCH))
        bench.assign(*positions, **{"end": "commit", "batch": batch, "step": step, **other})

    assign(1, 0, (0, 4))
    assign(2, 12, (0, 4))
    assign(3, 24, (0, 4), end="void")
    assign(3, 24, (0, 6), attempt=1)  # a worker was lost: the rows that are missing
    assign(4, 36, (0, 6))
    assign(5, 0, (0, 6))
    assign(6, 12, (6, 12))  # as many rows, and others
    assign(7, 24, (6, 12))
    assign(9, 36, (6, 12))  # step 8 went by without this worker
    assign(10, 0, (6, 12))
    assign(11, 12, (6, 12), size=24)  # a window of two batches
    assign(12, 36, (6, 12))
    assign(13, 0, end="commit")  # borrowed samples
    assign(14, 12, (6, 12))

    for _body in bench.bodies():
        seen.append(bench.stepper.rows.changed)

    changed = [True, False, False, True, True, False, True, False, True, False, True, True]
    assert seen == [*changed, True, True]


def test_micro_batches_of_a_step_have_other_rows_each() -> None:
    bench = StepBench(micro=2)
    bench.assign((0, 4), end="commit", step=1)
    bench.assign((0, 4), end="commit", step=2)

    assert [bench.stepper.rows.changed for _body in bench.bodies()] == [True] * 4


def test_a_share_without_samples_has_no_micro_batch() -> None:
    assert not list(Share(0, ()).pieces(4))
    few = Share(0, (PositionRange(0, 2),), parts=3)
    assert [sum(map(len, each)) for each in few.pieces(4)] == [1, 1]


def test_a_step_that_overflowed_on_another_worker_is_committed_and_moves_no_weight() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="commit overflow")
    bench.assign((4, 8), end="commit")

    moves = [(bench.stepper.committed, bench.stepper.try_commit()) for _body in bench.bodies()]

    assert moves == [(True, False), (True, True)]
    assert bench.member.position.step == 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_is_sent_is_the_same_if_backward_makes_a_graph() -> None:
    plain, graphed = StepBench(), StepBench()
    for bench in (plain, graphed):
        bench.assign((0, 6), end="commit")
    plain.run()

    for shard in graphed.stepper.batches(lambda: None):
        loss = graphed.model(graphed.inputs[shard.indices]).square().mean()
        graphed.stepper.backward(loss, None, graph=Graph(create=True))
        graphed.stepper.try_commit()

    assert graphed.sent == plain.sent


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_sees_no_mean_is_told_of_once_by_name(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = StepBench()
    getattr(bench.model.get_parameter("2.weight"), hook)(lambda _tensor: None)
    for start in (0, 4):
        bench.assign((start, start + 4), end="commit")

    bench.run()

    (told,) = caplog.messages
    assert f"2.weight has a hook ({hook})" in told


@pytest.mark.parametrize("case", ["no hook", "alone", "of its own micro-batches"])
def test_a_hook_is_told_of_only_if_its_gradient_is_a_part_of_the_batchs(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = StepBench(micro=2 if case == "of its own micro-batches" else None)
    if case != "no hook":
        bench.model.get_parameter("2.weight").register_hook(torch.neg)  # type: ignore[no-untyped-call]  # torch's own
    bench.assign((0, 4), end="commit", roster=tuple(range(3 if case == "no hook" else 1)))

    bench.run()

    assert len(caplog.messages) == int(case == "of its own micro-batches")


@pytest.mark.parametrize("end", ["void", "void late"])
@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda part: part.clamp_(-0.2, 0.2), False), (lambda part: part.mul_(0.9), True)],
    ids=["clip", "decay"],
)
def test_weights_that_a_script_changes_after_each_step_change_once_however_often_it_is_tried(
    caplog: pytest.LogCaptureFixture,
    end: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    told: bool,
) -> None:
    weights = []

    for ends in (["commit", "commit"], ["commit", end, "commit"]):
        bench = StepBench()
        for attempt, each in enumerate(ends):
            bench.assign((0, 4), end=each, attempt=int(attempt > 1))
        for _ in bench.bodies():
            with torch.no_grad():
                change(bench.model.get_parameter("0.weight"))
        weights.append(bench.model.get_parameter("0.weight"))

    assert torch.equal(*weights)
    assert ["0.weight was changed" in each.message for each in caplog.records] == [True] * told


def test_weights_that_a_script_changes_before_the_step_of_a_void_attempt_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="void", attempt=1)

    def change(_body: int, loss: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            bench.unused.mul_(0.9)
        return loss

    bench.spoil = change
    bench.run()

    assert ["unused was changed" in each.message for each in caplog.records] == [True]


def test_a_worker_that_only_attends_borrows_a_sample_and_guesses_no_share() -> None:
    bench = StepBench()
    who: dict[str, Any] = {
        "roster": (0,),
        "rank": 1,
        "attends": True,
        "attended": True,
        "wants_digest": True,
    }
    assigned = bench.assign(end="commit", **who)

    bench.run()

    assert bench.member.exchange.weights == [0.0]
    assert len(bench.computed) == 1
    (report,) = bench.member.reports
    assert (report.weight, report.samples, report.digest) == (0.0, 0, NO_DIGEST)
    assert list(bench.stepper._shares.upcoming(assigned)) == []
