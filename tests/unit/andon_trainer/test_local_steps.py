"""Local steps: what a worker computes of a window, sends of it, and keeps when a round is void."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon.protocol.records import Key
from andon.protocol.schedules import NESTEROV
from andon_trainer.gradients.model_layout import plan_model
from unit.andon_trainer.local_bench import LocalBench


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
    bench.assign((0, 8), end="commit")

    bench.run()

    # A batch of 12 for 3 workers: each local step takes 4 positions.
    assert [len(samples) for samples in bench.computed] == [4, 4]
    trained = by_hand(plain, bench.computed)
    torch.testing.assert_close(bench.change_of(bench.sent[0]), difference(start, trained, bench))
    # This worker is alone, so the mean of all changes is its own.
    torch.testing.assert_close(bench.weights, [p.detach() for p in trained.parameters()])
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.correct) == (8, 8.0, 8)


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

    assert bench.member.step == 3
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


def test_c_commit_001_the_model_holds_the_lines_weights_in_every_wait_for_work() -> None:
    bench = LocalBench()
    start = bench.weights
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="void late", attempt=1)
    bench.assign((0, 8), end="commit", attempt=2)

    bench.run()

    for seen in bench.seen[:3]:
        assert all(torch.equal(a, b) for a, b in zip(seen, start, strict=True))
    assert not torch.equal(bench.seen[3][0], start[0])


@pytest.mark.parametrize("why", ["doubt", "another head"])
def test_a_window_that_is_doubted_or_of_another_head_is_computed_from_the_lines_weights(
    why: str,
) -> None:
    bench, calm = LocalBench(), LocalBench()
    calm.assign((0, 8), end="commit")
    calm.run()
    bench.assign((0, 8), end="void")
    later = {"parent": Key(1, 1)} if why == "another head" else {}
    bench.assign((0, 8), end="commit", attempt=1, **later)
    for body in bench.bodies():
        if body == 1 and why == "doubt":
            bench.member.doubts += 1

    assert bench.computed == [*calm.computed, *calm.computed]
    # Momentum too is what it was at the window's start.
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, calm.weights, strict=True))


def test_f_dp_003_a_local_gradient_that_is_not_finite_moves_nothing() -> None:
    bench = LocalBench()
    start = bench.weights
    bench.assign((0, 8), end="void")
    bench.assign((0, 8), end="commit", attempt=1)
    bench.spoil = lambda body, loss: (
        loss
        + (
            (bench.model[0].weight[1, 2] * float("inf")).clamp(-1, 1) * 0 if body == 1 else 0  # type: ignore[index]
        )
    )

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
    assert bench.member.exchange.weights == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, start, strict=True))
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (0, 0.0)


def test_local_gradients_are_clipped_to_the_lines_norm() -> None:
    bench = LocalBench(max_grad_norm=1e-3, momentum=0.0)
    start = bench.weights
    bench.assign((0, 8), end="commit")

    bench.run()

    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(start, bench.weights, strict=True)])
    # Two steps at the rate 0.05, each along a gradient of norm 1e-3.
    assert 0.05 * 1e-3 <= float(moved.norm()) <= 2 * 0.05 * 1e-3 * 1.001


def test_the_script_sees_a_commit_at_a_windows_end_only() -> None:
    bench = LocalBench()
    bench.assign((0, 8), end="commit")
    bench.assign((8, 16), end="commit")

    seen = [(bench.stepper.committed, bench.stepper.moved) for _body in bench.bodies()]

    assert seen == [(False, True), (True, True)] * 2
