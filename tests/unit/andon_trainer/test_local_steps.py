"""Local steps: what a worker computes of a window, sends of it, and keeps when a round is void."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from andon.protocol.records import PositionRange
from andon.protocol.schedules import NESTEROV
from andon_trainer.core.reports import NO_DIGEST
from andon_trainer.model.layout import plan_model
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import ranges


def by_hand(bench: LocalBench, batches: list[list[int]], momentum: float = 0.9) -> nn.Module:
    """A model that plain PyTorch trained on these samples, from the bench's first weights."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model.load_state_dict(bench.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for batch in batches:
        optimizer.zero_grad()
        model(bench.inputs[batch]).square().mean().backward()
        optimizer.step()
    return model


def difference(before: list[torch.Tensor], after: nn.Module, bench: LocalBench) -> torch.Tensor:
    """`before - after`, as one vector in the layout's order."""
    names = [name for name, _ in bench.model.named_parameters()]
    first = dict(zip(names, before, strict=True))
    last = dict(after.named_parameters())
    of = {id(part): name for name, part in bench.model.named_parameters()}
    return torch.cat(
        [
            (first[of[id(part)]] - last[of[id(part)]].detach()).reshape(-1)
            for block in plan_model([bench.model]).parameters
            for part in block
        ]
    )


def test_a_window_is_made_of_the_workers_own_optimizer_steps() -> None:
    bench = LocalBench()
    start, plain = bench.weights, LocalBench()
    bench.assign((0, 8), end="commit", wants_digest=True)

    bench.run()

    # A batch of 12 for 3 workers: each local step takes 4 positions.
    assert [len(samples) for samples in bench.computed] == [4, 4]
    assert bench.member.local_steps == 2, "as many as are counted"
    trained = by_hand(plain, bench.computed)
    torch.testing.assert_close(bench.change_of(bench.sent[0]), difference(start, trained, bench))
    # This worker is alone, so the mean of all changes is its own.
    torch.testing.assert_close(bench.weights, [p.detach() for p in trained.parameters()])
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.correct) == (8, 8.0, 8)
    assert len(report.digest.sha256) == 32, "of the window's start"


def test_a_digest_that_is_wanted_within_a_window_is_of_its_start() -> None:
    bench, calm = LocalBench(), LocalBench()
    calm.assign((0, 8), end="commit", wants_digest=True)
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="commit", attempt=1, wants_digest=True)

    for each in (bench, calm):
        each.run()

    assert bench.member.reports[-1].digest == calm.member.reports[-1].digest
    assert [len(samples) for samples in bench.computed] == [4, 4], "nothing is computed twice"
    torch.testing.assert_close(bench.weights, calm.weights, rtol=0, atol=0)


def test_micro_batches_of_a_local_step_are_one_gradient() -> None:
    bench, whole = LocalBench(micro=2), LocalBench()
    for each in (bench, whole):
        each.assign((0, 8), end="commit")

        each.run()

    assert [len(samples) for samples in bench.computed] == [2, 2, 2, 2]
    torch.testing.assert_close(bench.weights, whole.weights)


def test_the_outer_optimizer_moves_the_weights_of_the_windows_start() -> None:
    bench, model = LocalBench(outer=NESTEROV), LocalBench()
    expected = nn.ParameterList(model.weights)
    outer = torch.optim.SGD(expected, lr=0.7, momentum=0.9, nesterov=True)
    for start in (0, 8, 16):
        bench.assign((start, start + 8), end="commit")

    before = bench.weights
    for body in bench.bodies():
        if body % 2:  # A window ends with every second local step.
            sent = bench.change_of(bench.sent[-1])
            parts = iter(
                torch.split(
                    sent, [p.numel() for b in plan_model([bench.model]).parameters for p in b]
                )
            )
            named = {id(p): i for i, p in enumerate(bench.model.parameters())}
            for block in plan_model([bench.model]).parameters:
                for part in block:
                    target = expected[named[id(part)]]
                    target.grad = next(parts).reshape(target.shape)
            outer.step()
            torch.testing.assert_close(bench.weights, [p.detach() for p in expected])

    assert bench.member.position.step == 3
    assert any(not torch.equal(a, b) for a, b in zip(before, bench.weights, strict=True))


@pytest.mark.parametrize("end", ["void", "void late", "lost"])
def test_f_dp_006_a_void_window_is_not_computed_again(end: str) -> None:
    bench, calm = LocalBench(outer=NESTEROV), LocalBench(outer=NESTEROV)
    calm.assign((0, 8), end="commit")
    calm.run()
    bench.assign((0, 8), end=end)
    bench.assign((0, 8), end="commit", attempt=1)

    bench.run()

    assert bench.computed == calm.computed
    assert bench.sent[-1] == calm.sent[-1]
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, calm.weights, strict=True))
    # A change that was sent is sent again bit for bit.
    assert len({tuple(sorted(each.items())) for each in bench.sent}) == 1


def test_f_dp_006_positions_of_a_lost_worker_are_further_local_steps() -> None:
    bench = LocalBench()
    plain = LocalBench()
    bench.assign((0, 8), end="void")
    bench.assign((0, 12), end="commit", attempt=1)

    bench.run()

    assert [len(samples) for samples in bench.computed] == [4, 4, 4]
    assert bench.member.exchange.weights == [8.0, 12.0]
    trained = by_hand(plain, bench.computed)
    torch.testing.assert_close(bench.weights, [p.detach() for p in trained.parameters()])


def test_c_commit_001_what_must_not_count_is_computed_again_from_the_lines_weights() -> None:
    bench, calm = LocalBench(), LocalBench()
    start = bench.weights
    calm.assign((0, 8), end="commit")
    calm.run()
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="commit", attempt=1)
    for body in bench.bodies():
        if body == 1:
            bench.member.drop_computed("state moves to another worker")
            assert all(torch.equal(a, b) for a, b in zip(bench.weights, start, strict=True))

    assert bench.computed == [*calm.computed, *calm.computed]
    # Momentum too is what it was at the window's start.
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, calm.weights, strict=True))


def spoil_gradient(bench: LocalBench, at: int) -> None:
    """Makes the gradient of one loop body nan, though its loss is finite."""

    def spoilt(body: int, loss: torch.Tensor) -> torch.Tensor:
        element: torch.Tensor = bench.model[0].weight[1, 2]  # type: ignore[index]
        return loss + (element * float("inf")).clamp(-1, 1) * 0 if body == at else loss

    bench.spoil = spoilt


def test_f_dp_003_a_local_gradient_that_is_not_finite_moves_nothing() -> None:
    bench = LocalBench()
    start = bench.weights
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="commit", attempt=1)
    spoil_gradient(bench, at=1)

    for body in bench.bodies():
        if body == 1:
            break
    (refused,) = bench.member.refused

    assert refused[2] == "nan"
    bench.stepper.pause()
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, start, strict=True))


def test_an_epoch_that_is_left_in_a_window_leaves_the_lines_weights() -> None:
    bench = LocalBench()
    start = bench.weights
    bench.assign((0, 8), end="commit")
    for _body in bench.bodies():
        break

    bench.stepper.leave_epoch()

    assert all(torch.equal(a, b) for a, b in zip(bench.weights, start, strict=True))
    assert bench.member.reports == []


def test_a_rank_without_positions_abstains_and_moves_with_the_others() -> None:
    bench = LocalBench()
    start = bench.weights
    bench.assign(end="commit")

    bench.run()

    assert bench.computed == []
    # Its loop body runs all the same: it is there that the script sees the commit.
    assert len(bench.borrowed) == 1
    assert bench.stepper.committed
    assert not bench.stepper.moved
    assert bench.member.exchange.weights == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, start, strict=True))
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (0, 0.0)


@pytest.mark.parametrize("factor", [1.0, 1e25], ids=["", "whose squares float32 can't hold"])
def test_local_gradients_are_clipped_to_the_lines_norm_and_not_cleared(factor: float) -> None:
    bench = LocalBench(max_grad_norm=1e-3, momentum=0.0)
    bench.spoil = lambda _body, loss: loss * factor
    start = bench.weights
    bench.assign((0, 8), end="commit")

    bench.run()

    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(start, bench.weights, strict=True)])
    # Two steps at the rate 0.05, each along a gradient of norm 1e-3.
    assert 0.05 * 1e-3 <= float(moved.norm()) <= 2 * 0.05 * 1e-3 * 1.001


def test_the_lines_norm_is_that_of_gradients_without_a_scalers_factor() -> None:
    plain = LocalBench(max_grad_norm=1e-3, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = LocalBench(max_grad_norm=1e-3, momentum=0.0, scaler=scaler)
    for bench in (plain, scaled):
        bench.assign((0, 8), end="commit")

    for bench in (plain, scaled):
        bench.run()

    for ours, expected in zip(scaled.weights, plain.weights, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-9)


def test_the_script_sees_a_commit_at_a_windows_end_only() -> None:
    bench = LocalBench()
    bench.assign((0, 8), end="commit")
    bench.assign((8, 16), end="commit")

    seen = [(bench.stepper.committed, bench.stepper.moved) for _body in bench.bodies()]

    assert seen == [(False, True), (True, True)] * 2


def test_an_overlapped_window_is_sent_while_the_next_one_is_computed() -> None:
    bench = LocalBench(overlap=True)
    one = PositionRange(8, 16)
    bench.assign((0, 8), end="commit", ahead=ranges((8, 16)), ahead_batch=one)
    bench.assign((8, 16), end="commit")
    start, sent, own = bench.weights, [], []
    for _body in bench.bodies():
        sent.append(len(bench.sent))
        own.append(bench.weights)

    # The change of the first window leaves before the first sample of the second is computed.
    assert [len(samples) for samples in bench.computed] == [4, 4, 4, 4]
    assert sent == [0, 0, 1, 1, 2]
    assert len(bench.borrowed) == 1
    assert bench.stepper.last_commit is not None
    assert bench.member.position.step == 2
    # Nothing was lost: the two changes together are what plain training on all samples changes.
    trained = by_hand(LocalBench(), bench.computed)
    both = bench.change_of(bench.sent[0]) + bench.change_of(bench.sent[1])
    torch.testing.assert_close(both, difference(start, trained, bench), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        bench.weights, [p.detach() for p in trained.parameters()], atol=1e-6, rtol=1e-5
    )


def test_of_a_window_ahead_no_more_steps_are_made_than_the_line_wants() -> None:
    bench, calm = (LocalBench(overlap=True, ahead_steps=1) for _ in range(2))
    one, two = PositionRange(12, 24), PositionRange(24, 36)
    ahead: dict[str, Any] = {"ahead": ranges((12, 24)), "ahead_batch": one}
    bench.assign((0, 12), end="void", **ahead)
    bench.assign((0, 12), end="commit", attempt=1, **ahead)
    calm.assign((0, 12), end="commit", **ahead)
    for each in (bench, calm):
        each.assign((12, 24), end="commit", ahead=ranges((24, 36)), ahead_batch=two)
        each.assign((24, 36), end="commit")
    start, sent, beyond = bench.weights, [], []
    for _body in bench.bodies():
        sent.append(len(bench.sent))
        if bench.stepper.committed:
            beyond.append(bench.member.computed.due)
    calm.run()

    # Windows of three steps: a change leaves after the third, and the mean is there one later. Of
    # the first there is another attempt, when its step ahead is made already: no other one is.
    assert [len(samples) for samples in bench.computed] == [4] * 9
    assert sent == [0, 0, 0, 1, 2, 2, 2, 3, 3, 4]
    assert len(bench.borrowed) == 1
    assert beyond == [ranges((12, 16)), ranges((24, 28)), ()]
    assert bench.computed == calm.computed
    trained = by_hand(LocalBench(), bench.computed)
    together = torch.stack([bench.change_of(each) for each in bench.sent[1:]]).sum(0)
    torch.testing.assert_close(together, difference(start, trained, bench), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(bench.weights, calm.weights, atol=0, rtol=0)


def test_a_script_may_look_at_the_weights_that_all_workers_have_in_common() -> None:
    bench, alone = (
        LocalBench(overlap=True, middle=nn.BatchNorm1d(5), buffers=True),
        LocalBench(middle=nn.BatchNorm1d(5), buffers=True),
    )
    ahead: dict[str, Any] = {"ahead": ranges((8, 16)), "ahead_batch": PositionRange(8, 16)}
    bench.assign((0, 8), end="commit", **ahead)
    bench.assign((8, 16), end="commit")
    alone.assign((0, 8), end="commit")
    alone.run()
    looked, head = 0, [each.clone() for each in alone.model.state_dict().values()]

    for body in bench.bodies():
        own = [each.clone() for each in bench.model.state_dict().values()]
        # Entered twice, as by a script that evaluates within an evaluation.
        with bench.stepper.common_weights(), bench.stepper.common_weights():
            seen = [each.clone() for each in bench.model.state_dict().values()]
            bench.model(bench.inputs)  # It moves running statistics.
        if body == 3:
            looked += 1
            torch.testing.assert_close(seen, head, atol=1e-7, rtol=1e-5)
            assert not torch.equal(own[0], seen[0])
        if body < 4:
            assert all(map(torch.equal, own, bench.model.state_dict().values()))
    assert looked == 1


def test_weights_that_were_dropped_do_not_come_back_from_a_look() -> None:
    bench = LocalBench(overlap=True)
    ahead: dict[str, Any] = {"ahead": ranges((8, 16)), "ahead_batch": PositionRange(8, 16)}
    bench.assign((0, 8), end="commit", **ahead)
    bench.assign((8, 16), end="commit")
    for body in bench.bodies():
        if body == 3:
            with bench.stepper.common_weights():
                # A halt, for which this worker waits with the others in `line.mean`.
                bench.member.drop_computed("a halt casts doubt on it")
                head = bench.weights
            assert all(map(torch.equal, head, bench.weights))


def test_nothing_is_trained_while_the_models_hold_the_common_weights() -> None:
    bench = LocalBench()
    bench.assign((0, 8), end="commit")
    batches = bench.stepper.batches(lambda: None)
    next(batches)
    with pytest.raises(RuntimeError, match="enter it after optimizer"):
        bench.stepper.common_weights()
    bench.optimizer.zero_grad()
    bench.stepper.backward(bench.model(bench.inputs[:4]).square().mean(), None)
    bench.optimizer.step()
    with (
        bench.stepper.common_weights(),
        pytest.raises(RuntimeError, match="leave it before the next batch"),
    ):
        next(batches)


def test_no_optimizer_steps_while_the_models_hold_the_common_weights() -> None:
    bench, calm = LocalBench(), LocalBench()
    for each in (bench, calm):
        each.assign((0, 8), end="commit")
    calm.run()

    batches = bench.stepper.batches(lambda: None)
    for body, shard in enumerate(batches):
        bench.optimizer.zero_grad()
        bench.stepper.backward(bench.model(bench.inputs[shard.indices]).square().mean(), None)
        if body == 1:  # Its own weights are beyond the line's by now.
            with (
                bench.stepper.common_weights(),
                pytest.raises(RuntimeError, match="after optimizer"),
            ):
                bench.optimizer.step()
        bench.optimizer.step()

    assert len(bench.sent) == 1
    torch.testing.assert_close(bench.weights, calm.weights, atol=0, rtol=0)


def test_a_round_that_begins_within_a_look_leaves_a_workers_own_weights() -> None:
    bench = LocalBench(overlap=True)
    ahead: dict[str, Any] = {"ahead": ranges((8, 16)), "ahead_batch": PositionRange(8, 16)}
    bench.assign((0, 8), end="commit", **ahead)
    # All of it is computed already, and the line asks for the digest of its weights.
    bench.assign((8, 16), end="commit", wants_digest=True)
    bodies = bench.bodies()
    for _ in range(4):
        next(bodies)
    own = bench.weights

    with (
        bench.stepper.common_weights(),
        pytest.raises(RuntimeError, match="leave it before the next batch"),
    ):
        next(bodies)

    assert all(map(torch.equal, own, bench.weights))


def test_what_was_computed_ahead_is_on_top_of_the_lines_new_weights() -> None:
    bench = LocalBench(overlap=True)
    # The others' changes are such that the mean is half of what this worker sends.
    bench.member.exchange.halves = True
    one = PositionRange(8, 16)
    bench.assign((0, 8), end="commit", ahead=ranges((8, 16)), ahead_batch=one)
    bench.assign((8, 16), end="commit")
    start = bench.weights
    for _body in bench.bodies():
        pass

    first, second = (bench.change_of(each) for each in bench.sent)
    moved = torch.cat(
        [
            (a - b).reshape(-1)
            for a, b in zip(in_layout(bench, start), in_layout(bench, bench.weights), strict=True)
        ]
    )
    torch.testing.assert_close(moved, (first + second) / 2, atol=1e-6, rtol=1e-5)


def in_layout(bench: LocalBench, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Weights in the order of the layout."""
    at = {id(part): index for index, part in enumerate(bench.model.parameters())}
    return [
        weights[at[id(part)]] for block in plan_model([bench.model]).parameters for part in block
    ]


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_what_a_late_worker_owes_is_on_top_of_the_others_windows_until_it_is_sent(
    scale: float,
) -> None:
    bench = LocalBench(outer=NESTEROV)
    start, others = bench.weights, bench.member.exchange
    others.weight_of_others = 8.0
    for average in others.averages:
        average[:] = 0.25
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="commit", attends=True, rank=1, change_scale=scale, wants_digest=True)
    bench.assign((0, 8), end="commit")

    own = dict(zip(bench.bodies(), iter(lambda: bench.weights, None), strict=False))

    # Rate 0.7, and Nesterov's momentum of 0.9: the first step is 1.9 times the mean change.
    moved = 0.7 * 1.9 * 0.25 * float(np.float32(scale))
    line = [part - moved for part in start]
    beyond = [now - was for now, was in zip(own[1], start, strict=True)]
    torch.testing.assert_close(own[2], [a + b for a, b in zip(line, beyond, strict=True)])
    assert (len(bench.computed), len(bench.borrowed)) == (2, 2), "nothing is computed twice"
    # In the round that it attends it gives nothing, and compares nothing.
    made_up, report = bench.member.reports
    assert (made_up.weight, made_up.samples, made_up.digest) == (0.0, 0, NO_DIGEST)
    assert (report.weight, report.samples) == (8.0, 8)
    sent = bench.change_of(bench.sent[-1])
    torch.testing.assert_close(
        sent, torch.cat([-each.reshape(-1) for each in in_layout(bench, beyond)])
    )


def test_a_round_that_was_missed_is_made_up_after_a_local_step_and_needs_no_body_of_its_own() -> (
    None
):
    bench, plain = LocalBench(momentum=0.0), LocalBench(momentum=0.0)
    start, others = bench.weights, bench.member.exchange
    others.weight_of_others = 8.0
    for average in others.averages:
        average[:] = 0.25
    bench.miss((0, 8), after=1)
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="commit")

    own, committed, given = [], [], []
    for _ in bench.bodies():
        own.append(bench.weights)
        committed.append(bench.stepper.committed)
        given.append(bench.stepper.local_steps)

    one_step = by_hand(plain, bench.computed[:1], momentum=0.0)
    torch.testing.assert_close(own[0], [part.detach() - 0.25 for part in one_step.parameters()])
    assert committed == [True, False, True]
    assert given[::2] == [0, 2], "the first commit has nothing of this worker's"
    assert [len(samples) for samples in bench.computed] == [4, 4]
    assert len(bench.borrowed) == 1, "of the round that has its change"
    line = [part - 0.25 for part in start]
    beyond = [now - was for now, was in zip(own[1], line, strict=True)]
    torch.testing.assert_close(
        bench.change_of(bench.sent[-1]),
        torch.cat([-each.reshape(-1) for each in in_layout(bench, beyond)]),
    )


def test_a_late_share_is_exchanged_where_it_ends_and_compared_if_that_is_wanted() -> None:
    calm, bench = (LocalBench() for _ in range(2))
    calm.assign((0, 8), end="commit", wants_digest=True)
    bench.member.turns = 1
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="commit", wants_digest=True)

    calm.run()
    committed = [bench.stepper.committed for _ in bench.bodies()]

    assert committed == [False, True]
    assert not bench.borrowed, "it needs no loop body"
    assert bench.stepper.local_steps == 2
    assert bench.sent[-1] == calm.sent[-1]
    (report,), (expected,) = bench.member.reports, calm.member.reports
    assert (report.digest, report.samples) == (expected.digest, expected.samples)
    torch.testing.assert_close(bench.weights, calm.weights, rtol=0, atol=0)


def test_a_late_share_whose_round_is_void_is_sent_again_bit_for_bit() -> None:
    calm, bench = (LocalBench() for _ in range(2))
    calm.assign((0, 8), end="commit")
    bench.member.turns = 1
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="commit", attempt=1)

    for each in (calm, bench):
        each.run()

    assert (bench.computed, len(bench.borrowed)) == (calm.computed, 1)
    assert bench.sent[-2:] == [calm.sent[-1]] * 2
    torch.testing.assert_close(bench.weights, calm.weights, rtol=0, atol=0)


def test_a_late_share_is_exchanged_after_a_round_that_was_made_void_for_it() -> None:
    calm, bench = (LocalBench() for _ in range(2))
    calm.assign((0, 8), end="commit")
    bench.member.turns = 2
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="void", attends=True, rank=1)
    bench.assign((0, 8), end="commit")

    for each in (calm, bench):
        each.run()

    assert (bench.computed, bench.borrowed) == (calm.computed, [])
    assert bench.sent[-1] == calm.sent[-1]
    torch.testing.assert_close(bench.weights, calm.weights, rtol=0, atol=0)


@pytest.mark.parametrize("end", ["void early", "void"])
def test_a_missed_round_that_can_not_be_made_up_leaves_what_is_computed(end: str) -> None:
    calm, bench = (LocalBench() for _ in range(2))
    calm.assign((0, 8), end="commit")
    bench.miss((0, 8), after=1, end=end)
    bench.member.void_at_look = 1  # What ended that round, ended its own.
    bench.assign((0, 8), end="unused")
    bench.member.ends.remove("unused")
    bench.assign((0, 8), end="commit")

    for each in (calm, bench):
        each.run()

    assert bench.computed == calm.computed, "nothing is computed twice"
    assert bench.sent[-1] == calm.sent[-1]
    torch.testing.assert_close(bench.weights, calm.weights, rtol=0, atol=0)


def test_what_a_late_worker_owes_is_dropped_to_what_the_others_have_made() -> None:
    bench = LocalBench()
    start, others = bench.weights, bench.member.exchange
    others.weight_of_others = 8.0
    for average in others.averages:
        average[:] = 0.25
    bench.assign((0, 8), end="lost")
    bench.assign((0, 8), end="commit", attends=True, rank=1)

    bench.run()
    bench.stepper.pause()

    torch.testing.assert_close(bench.weights, [part - 0.25 for part in start])
    assert not bench.optimizer.state_dict()["state"], "the momentum is that of the window's start"


@pytest.mark.parametrize("end", ["void", "void late", "lost"])
def test_f_dp_006_a_void_round_keeps_what_was_sent_and_what_is_ahead(end: str) -> None:
    one = PositionRange(8, 16)
    calm, bench = (LocalBench(overlap=True, outer=NESTEROV) for _ in range(2))
    ahead: dict[str, Any] = {"ahead": ranges((8, 16)), "ahead_batch": one}
    calm.assign((0, 8), end="commit", **ahead)
    calm.assign((8, 16), end="commit")
    bench.assign((0, 8), end=end, **ahead)
    bench.assign((0, 8), end="commit", attempt=1, **ahead)
    bench.assign((8, 16), end="commit")
    for each in (calm, bench):
        each.run()

    assert bench.computed == calm.computed
    assert bench.sent[-2:] == calm.sent
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, calm.weights, strict=True))


def test_f_dp_006_a_lost_workers_positions_join_what_is_sent_though_more_is_ahead() -> None:
    bench = LocalBench(overlap=True, momentum=0.0)
    one = PositionRange(12, 20)
    ahead: dict[str, Any] = {"ahead": ranges((12, 20)), "ahead_batch": one}
    bench.assign((0, 8), end="void", **ahead)
    bench.assign((0, 12), end="commit", attempt=1, **ahead)
    bench.assign((12, 20), end="commit")
    start = bench.weights

    bench.run()

    # Two steps, two ahead, and then the lost worker's as one more step.
    assert [len(samples) for samples in bench.computed] == [4, 4, 4, 4, 4]
    assert bench.member.exchange.weights == [8.0, 12.0, 8.0]
    trained = by_hand(LocalBench(), bench.computed, momentum=0.0)
    both = bench.change_of(bench.sent[1]) + bench.change_of(bench.sent[2])
    torch.testing.assert_close(both, difference(start, trained, bench), atol=1e-6, rtol=1e-5)


def test_f_dp_002_a_local_step_that_was_not_made_adds_nothing_to_what_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = LocalBench(overlap=True, momentum=0.0)
    one = PositionRange(12, 20)
    bench.assign((0, 8), end="void", ahead=ranges((12, 16)), ahead_batch=one)
    bench.assign((0, 12), end="void", attempt=1, ahead=ranges((12, 16)), ahead_batch=one)
    # The lost worker is here again: what is missing now is ahead.
    bench.assign((0, 8), end="commit", attempt=2, ahead=ranges((12, 20)), ahead_batch=one)
    bench.assign((12, 20), end="commit")
    # The halt names a worker that sent a bad value at the same time, so no pile here is in doubt.
    monkeypatch.setattr(bench.member, "refuse_gradient", lambda *_: bench.member.ends.pop(0))
    spoil_gradient(bench, at=3)
    start = bench.weights

    bench.run()

    first, again, ahead = (bench.change_of(each) for each in bench.sent)
    assert torch.equal(first, again)
    made = [samples for body, samples in enumerate(bench.computed) if body != 3]
    trained = by_hand(LocalBench(), made, momentum=0.0)
    both = again + ahead
    torch.testing.assert_close(both, difference(start, trained, bench), atol=1e-6, rtol=1e-5)


def test_a_factor_keeps_a_part_of_what_an_overlapped_window_changed_and_sends_it_later() -> None:
    bench, plain = LocalBench(overlap=True, mix=0.5), LocalBench(overlap=True)
    start = bench.weights
    for each in (bench, plain):
        each.member.exchange.halves = True  # Somebody else is here, whose weights stand still.
        each.assign((0, 4), end="commit", ahead=ranges((4, 8)), ahead_batch=PositionRange(4, 8))
        each.assign((4, 8), end="commit")

        each.run()

    (first, second), (_, without) = (map(each.change_of, each.sent) for each in (bench, plain))
    # The average takes half of the first change back, and half of that is kept.
    torch.testing.assert_close(second - without, first / 4, atol=1e-6, rtol=1e-5)
    # Nothing is ahead of the last window, so after its commit the weights are the line's.
    moved = difference(start, bench.model, bench)
    torch.testing.assert_close(moved, (first + second) / 2, atol=1e-6, rtol=1e-5)


def test_an_overlapped_pipe_that_is_dropped_leaves_the_lines_weights_and_momentum() -> None:
    bench, calm = (LocalBench(overlap=True) for _ in range(2))
    one, two = PositionRange(8, 16), PositionRange(16, 24)
    for each in (calm, bench):
        each.assign((0, 8), end="commit", ahead=ranges((8, 16)), ahead_batch=one)
    calm.assign((8, 16), end="commit")
    bench.assign((8, 16), end="void", ahead=ranges((16, 24)), ahead_batch=two)
    again = bench.assign((8, 16), end="commit", attempt=1)
    bench.member.drop_before = again.key
    for each in (calm, bench):
        each.run()

    # The second window was computed again, by the same steps from the same state.
    assert bench.computed[-2:] == calm.computed[-2:]
    torch.testing.assert_close(bench.weights, calm.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_that_is_void_between_two_local_steps_is_left_at_once(*, overlap: bool) -> None:
    bench, calm = (LocalBench(overlap=overlap) for _ in range(2))
    one = PositionRange(16, 24)
    ahead: dict[str, Any] = {"ahead": ranges((16, 24)), "ahead_batch": one} if overlap else {}
    bench.member.void_at_look = 4 if overlap else 2
    bench.assign((0, 16), end="commit", **ahead)
    bench.assign((0, 16), end="commit", attempt=1, **ahead)
    calm.assign((0, 16), end="commit", **ahead)
    bench.member.ends.pop(0)  # Nothing is waited for in the round that is left.

    for each in (bench, calm):
        each.run()

    # What was made stays; the rest is made under the next assignment.
    assert bench.computed == calm.computed
    assert bench.member.position.step == 1
    assert bench.sent[-1] == calm.sent[-1]


def test_local_steps_average_no_gradients_that_could_be_accumulated() -> None:
    bench = LocalBench()

    with pytest.raises(RuntimeError, match="this line makes local steps"):
        bench.stepper.accumulate(2)


def test_a_local_step_makes_a_sparse_gradient_dense_as_an_average_is() -> None:
    bench = LocalBench(max_grad_norm=1.0)
    weight = bench.model.get_parameter("0.weight")
    dense = torch.zeros_like(weight)
    dense[1] = 3.0
    weight.grad = dense.to_sparse()

    assert bench.stepper._averager.settle(0.5, 1.0)

    norm = torch.linalg.vector_norm(dense * 0.5)
    assert weight.grad is not None
    assert not weight.grad.is_sparse
    assert torch.allclose(weight.grad, dense * 0.5 / norm)
