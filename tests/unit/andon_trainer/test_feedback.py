"""Error feedback: what an encoding loses of a gradient is sent later, and only once."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from andon.protocol.encoding import Encoding
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Cursor, Key
from andon.protocol.ring import segment_elements, segments_of
from andon.protocol.run_settings import Policy
from andon_trainer.averaging.collectives import LineCollectives
from andon_trainer.averaging.feedback import Residuals
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import AveragesComplete, TransferAsked
from andon_trainer.core.values import encode_own
from andon_trainer.model.layout import plan_model
from andon_trainer.place.membership import Membership
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.ring_bench import Ring
from unit.andon_trainer.step_bench import RoundsBench, ScriptedSeat, StepBench, decoded

NARROW = [Encoding.INT8_BLOCK, Encoding.INT2_BLOCK, Encoding.TOPK]
narrow = pytest.mark.parametrize("encoding", NARROW)


def layout(*sizes: int) -> Layout:
    """One block of some parameters."""
    parts = tuple(Component(f"part{index}", (size,)) for index, size in enumerate(sizes))
    return Layout((Block(BlockKind.OTHER, "block", parts),))


def gradients(size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def exchanged(residuals: Residuals, flat: Floats, encoding: Encoding) -> Floats:
    """Sends a block as an exchange does; returns what the others decode."""
    return decoded(residuals.add(0, flat), encoding, keeps_loss=True)


def lost_of(numbers: Floats, encoding: Encoding) -> Floats:
    return numbers - decoded(numbers, encoding)


# ---------------------------------------------------------------------- residuals


@narrow
def test_the_gradient_itself_is_not_changed(encoding: Encoding) -> None:
    residuals, flat = Residuals(layout(40)), gradients(40)
    for _ in range(3):
        exchanged(residuals, flat, encoding)
        residuals.commit()

    np.testing.assert_array_equal(flat, gradients(40))


@pytest.mark.parametrize("encoding", [*NARROW, Encoding.INT4_BLOCK])
@pytest.mark.parametrize("seed", range(4))
def test_f_dp_002_of_changes_that_come_late_nothing_is_lost_and_nothing_counts_twice(
    encoding: Encoding, seed: int
) -> None:
    chance, residuals = np.random.default_rng(seed), Residuals(layout(150, 106))
    given = arrived = np.zeros(256)
    for _ in range(12):
        change = chance.standard_normal(256).astype(np.float32)
        sent: list[Floats] = []
        for _ in range(chance.integers(3)):  # Rounds that go on without it, after it had sent.
            residuals.discard()
            sent.append(exchanged(residuals, change, encoding))
            for _ in range(chance.integers(3)):  # Others' rounds, which it attends.
                residuals.discard()
                residuals.commit()
        residuals.discard()
        sent.append(exchanged(residuals, change, encoding))
        residuals.commit()
        given, arrived = given + change, arrived + sent[-1]

        assert all(each.tobytes() == sent[0].tobytes() for each in sent), "bit for bit the same"
        lost = residuals.of(0)
        assert lost is not None
        np.testing.assert_allclose(arrived + lost, given, atol=1e-4)


def test_threads_of_a_void_round_write_nowhere_that_counts() -> None:
    residuals, flat = Residuals(layout(64)), gradients(64)
    exchanged(residuals, flat, Encoding.INT8_BLOCK)
    residuals.commit()
    late = residuals.add(0, flat)
    residuals.discard()
    sent = residuals.add(0, flat)
    expected = sent.copy()

    late.fill(np.nan)  # The sending thread of the void round comes to it only now.

    np.testing.assert_array_equal(sent, expected)
    encode_own(sent, Encoding.INT8_BLOCK, keeps_loss=True)
    late.fill(np.nan)
    residuals.commit()
    assert np.isfinite(residuals.add(0, flat)).all()


def test_a_parameter_without_a_gradient_has_none_and_its_residual_waits() -> None:
    encoding, missing = Encoding.INT4_BLOCK, slice(10, 30)
    residuals, first = Residuals(layout(10, 20, 10)), gradients(40, 1)
    exchanged(residuals, first, encoding)
    residuals.commit()
    kept = lost_of(first, encoding)
    second = gradients(40, 2)
    second[missing] = -0.0

    came = exchanged(residuals, second, encoding)
    residuals.commit()
    third = gradients(40, 3)
    sent = residuals.add(0, third)

    assert (came[missing].view(np.uint32) == 0x80000000).all()
    np.testing.assert_array_equal(sent[missing], (third + kept)[missing])


def test_a_parameter_that_never_had_a_gradient_stays_without_one() -> None:
    residuals, flat = Residuals(layout(20, 20)), gradients(40)
    flat[20:] = -0.0
    for _ in range(3):
        came = exchanged(residuals, flat, Encoding.INT8_BLOCK)
        residuals.commit()

        assert (came[20:].view(np.uint32) == 0x80000000).all()


def test_a_second_exchange_of_a_block_in_a_step_carries_what_the_first_one_lost() -> None:
    encoding, residuals = Encoding.INT8_BLOCK, Residuals(layout(50))
    first, second, third = (gradients(50, seed) for seed in (1, 2, 3))
    exchanged(residuals, first, encoding)
    chained = second + lost_of(first, encoding)

    came = exchanged(residuals, second, encoding)
    residuals.commit()

    np.testing.assert_array_equal(came, decoded(chained, encoding))
    np.testing.assert_array_equal(residuals.add(0, third), third + lost_of(chained, encoding))


def test_an_element_far_below_its_neighbours_arrives_in_time() -> None:
    flat = np.full(32, 1.0, np.float32)
    flat[5] = 0.01
    with_feedback, without = Residuals(layout(32)), 0.0
    arrived = 0.0
    for _ in range(200):
        arrived += float(exchanged(with_feedback, flat, Encoding.INT4_BLOCK)[5])
        with_feedback.commit()
        without += float(decoded(flat, Encoding.INT4_BLOCK)[5])

    assert without == 0.0
    assert arrived == pytest.approx(200 * 0.01, abs=0.2)


# ---------------------------------------------------------------------- around a ring


@pytest.mark.parametrize("encoding", NARROW[:2])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 0.5], [1.0, 0.0, 3.0], [0.0, 2.0, 0.0], [1.0]])
def test_every_rank_of_a_ring_keeps_what_each_segment_lost(
    encoding: Encoding, weights: list[float]
) -> None:
    sizes = [700, 5]
    policy = Policy(chunk_elements=256, encoding=encoding, answer_encoding=Encoding.INT4_BLOCK)
    blocks = [[gradients(size, 10 * rank + size) for size in sizes] for rank in range(len(weights))]
    before = [[flat.copy() for flat in mine] for mine in blocks]
    ring = Ring(sizes, weights, policy, keeps_loss=True)

    ring.run(blocks, seed=3)

    assert [[type(said) for said in each] for each in ring.said] == [[AveragesComplete]] * len(
        weights
    )
    for rank, weight in enumerate(weights):
        for block, size in enumerate(sizes):
            for segment in segments_of(block, size, len(weights), segment_elements(256)):
                place = slice(segment.offset, segment.offset + segment.count)
                numbers, left = before[rank][block][place], blocks[rank][block][place]
                expected = lost_of(numbers, encoding) if weight else numbers
                np.testing.assert_array_equal(left, expected)


def test_an_exact_call_around_a_ring_is_float32_whatever_the_line_encodes() -> None:
    policy = Policy(chunk_elements=256, encoding=Encoding.INT4_BLOCK)
    call = Call(name="running statistics", sequence=1, blocks=range(1), exact=True)
    blocks = [[gradients(300, rank)] for rank in range(2)]
    ring = Ring([300], [1.0, 1.0], policy, calls=[call, call])

    ring.run(blocks, seed=4)

    mean = blocks[0][0] * np.float32(0.5) + blocks[1][0] * np.float32(0.5)
    for round_ in ring.rounds:
        np.testing.assert_array_equal(round_.averages[0], mean)


# ---------------------------------------------------------------------- steps


def sent_in(seat: ScriptedSeat) -> list[Floats]:
    """Of each round, what was encoded: all blocks as one vector."""
    return [
        np.concatenate([np.frombuffer(sent[block], np.float32) for block in sorted(sent)])
        for sent in seat.exchange.rounds
        if sent
    ]


def sent_by(bench: RoundsBench) -> list[Floats]:
    """The same, of the rounds of a bench."""
    return sent_in(bench.member)


def replay(
    given_: list[Floats], ends: list[str], bench: StepBench | LocalBench, encoding: Encoding
) -> list[Floats]:
    """What is encoded in each round, by the definition; `given_` are the gradients."""
    blocks = plan_model([bench.model]).layout.blocks
    rows = layout_rows(blocks)
    residual, sent = np.zeros_like(given_[0]), []
    for flat, end in zip(given_, ends, strict=True):
        missing = flat.view(np.uint32) == 0x80000000
        numbers = np.where(missing, flat, flat + residual)
        sent.append(numbers)
        if end == "commit":
            lost = np.concatenate([lost_of(numbers[row], encoding) for row in rows])
            residual = np.where(missing, residual, lost)
    return sent


def layout_rows(blocks: tuple[Block, ...]) -> list[slice]:
    ends = list(accumulate(block.elements for block in blocks))
    return [slice(stop - block.elements, stop) for stop, block in zip(ends, blocks, strict=True)]


def run(bench: StepBench) -> None:
    """Runs the loop of a script that drops the gradients of each committed step."""
    for _body in bench.bodies():
        if bench.stepper.committed:
            bench.model.zero_grad()


def gradients_of(*rounds: tuple[tuple[int, int], str], **other: Any) -> list[Floats]:
    """What a line of float32 sends in these rounds."""
    bench = StepBench()
    for positions, end in rounds:
        bench.assign(positions, end=end, **other)
    run(bench)
    return sent_by(bench)


def stepping(
    encoding: Encoding, *rounds: tuple[tuple[int, int], str], attempts: tuple[int, ...] = ()
) -> StepBench:
    """A worker that made these steps."""
    bench = StepBench()
    bench.member.encode_as(encoding)
    for index, (positions, end) in enumerate(rounds):
        bench.assign(positions, end=end, attempt=attempts[index] if attempts else 0)
    run(bench)
    return bench


def same(found: list[Floats], expected: list[Floats]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@narrow
def test_steps_send_what_the_definition_says(encoding: Encoding) -> None:
    rounds = (((0, 4), "commit"), ((4, 8), "commit"), ((8, 12), "commit"))
    plain = gradients_of(*rounds)

    bench = stepping(encoding, *rounds)

    same(sent_by(bench), replay(plain, ["commit"] * 3, bench, encoding))
    assert bench.unused.grad is None, "it has no gradient on any worker"


@narrow
@pytest.mark.parametrize("end", ["void", "void late"])
def test_a_void_round_leaves_no_trace(encoding: Encoding, end: str) -> None:
    rounds = (((0, 4), "commit"), ((4, 8), end), ((4, 8), "commit"), ((8, 12), "commit"))
    bench = stepping(encoding, *rounds, attempts=(0, 0, 1, 0))
    undisturbed = stepping(encoding, rounds[0], rounds[2], rounds[3])

    first, void, again, last = sent_by(bench)

    same([void], [again])
    same([first, again, last], sent_by(undisturbed))


def test_positions_of_a_lost_worker_are_added_to_the_gradient_and_not_to_the_residual() -> None:
    encoding = Encoding.INT4_BLOCK
    rounds = (((0, 4), "commit"), ((4, 8), "void"), ((4, 10), "commit"))
    bench = stepping(encoding, *rounds, attempts=(0, 0, 1))
    plain = StepBench()
    for (positions, end), attempt in zip(rounds, (0, 0, 1), strict=True):
        plain.assign(positions, end=end, attempt=attempt)
    run(plain)

    same(sent_by(bench), replay(sent_by(plain), ["commit", "void", "commit"], bench, encoding))


def test_a_step_without_samples_leaves_the_residual() -> None:
    encoding = Encoding.INT8_BLOCK
    bench = StepBench()
    bench.member.encode_as(encoding)
    bench.assign((0, 4), end="commit")
    bench.assign(end="commit")  # This worker abstains.
    bench.assign((8, 12), end="commit")

    run(bench)

    undisturbed = stepping(encoding, ((0, 4), "commit"), ((8, 12), "commit"))
    same(sent_by(bench), sent_by(undisturbed))


def test_a_step_that_moved_no_weights_leaves_the_residual() -> None:
    encoding = Encoding.INT8_BLOCK

    def scaled(*rounds: tuple[tuple[int, int], str]) -> StepBench:
        bench = StepBench(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        bench.member.encode_as(encoding)
        for positions, end in rounds:
            bench.assign(positions, end=end)
        run(bench)
        return bench

    bench = scaled(((0, 4), "commit"), ((4, 8), "commit overflow"), ((8, 12), "commit"))

    undisturbed = scaled(((0, 4), "commit"), ((8, 12), "commit"))
    first, _, last = sent_by(bench)
    same([first, last], sent_by(undisturbed))


def test_a_worker_that_got_the_lines_state_begins_with_no_residual() -> None:
    encoding = Encoding.INT4_BLOCK
    bench = StepBench()
    bench.member.encode_as(encoding)
    bench.assign((0, 4), end="commit")
    second = bench.assign((4, 8), end="commit")
    state = TransferAsked(transfer_id=1, head=Key(1, 90), sends=False, step=8, cursor=Cursor(0, 4))
    bench.member.transfers[second.key] = state

    run(bench)

    same(sent_by(bench), gradients_of(((0, 4), "commit"), ((4, 8), "commit")))


def test_a_limited_gradient_gets_the_residual_on_top() -> None:
    encoding, limit = Encoding.INT4_BLOCK, 0.0625
    rounds = (((0, 4), "commit"), ((4, 8), "commit"))
    plain, bench = StepBench(), StepBench()
    bench.member.encode_as(encoding)
    for each in (plain, bench):
        each.member.policy = replace(each.member.policy, max_grad_norm=limit)
        for positions, end in rounds:
            each.assign(positions, end=end)

        run(each)

    assert [np.linalg.norm(flat) for flat in sent_by(plain)] == pytest.approx([limit] * 2)
    same(sent_by(bench), replay(sent_by(plain), ["commit"] * 2, bench, encoding))
    norms = [
        [report.own_gradient_norm for report in each.member.reports] for each in (plain, bench)
    ]
    assert norms[0] == norms[1], "the norm is the gradient's own"


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.BFLOAT16])
def test_other_encodings_have_no_residual(encoding: Encoding) -> None:
    rounds = (((0, 4), "commit"), ((4, 8), "commit"))

    same(sent_by(stepping(encoding, *rounds)), gradients_of(*rounds))


# ---------------------------------------------------------------------- manual steps


class ManualSeat(ScriptedSeat):
    """A place on a line for manual steps, whose exchanges are never void."""

    def begin(self, weight: float, call: Call | None = None) -> bool:
        return super().begin(weight)


def by_hand(encoding: Encoding) -> tuple[nn.Linear, LineCollectives, ManualSeat]:
    model = nn.Linear(40, 1, bias=False)
    plan = plan_model([model])
    seat = ManualSeat([40])
    seat.ends = ["never"]
    seat.stand(assigned=seat._work(()))
    seat.encode_as(encoding)
    return model, LineCollectives(cast(Membership, seat), plan, torch.device("cpu")), seat


def give(
    model: nn.Linear, collectives: LineCollectives, flat: Floats, *, again: bool = False
) -> None:
    """Gives gradients in a round of its own, or `again` in the same one."""
    model.weight.grad = torch.from_numpy(flat.copy()).view(1, -1)
    assigned = collectives._member.position.assigned
    assert assigned is not None
    if not again:
        key = Key(assigned.key.term, assigned.key.round + 1)
        cast(Any, collectives._member).stand(assigned=replace(assigned, key=key))
    call = Call(name="all_reduce_gradients", blocks=range(1))
    assert collectives.run(call, 1.0) is not None


def test_a_manual_step_carries_what_the_one_before_lost_if_it_was_committed() -> None:
    encoding = Encoding.INT4_BLOCK
    model, collectives, seat = by_hand(encoding)
    first, second = gradients(40, 1), gradients(40, 2)

    give(model, collectives, first)
    collectives.committed()
    give(model, collectives, second)  # Is not committed: the script gives the step up.
    give(model, collectives, second)

    carried = second + lost_of(first, encoding)
    same(sent_in(seat), [first, carried, carried])
    collectives.close()


def test_a_block_that_is_exchanged_twice_in_a_manual_step_carries_on_within_it() -> None:
    encoding = Encoding.INT8_BLOCK
    model, collectives, seat = by_hand(encoding)
    first, second = gradients(40, 1), gradients(40, 2)

    give(model, collectives, first)
    give(model, collectives, second, again=True)

    same(sent_in(seat), [first, second + lost_of(first, encoding)])
    collectives.close()


# ---------------------------------------------------------------------- local steps


def windows(encoding: Encoding, *ends: str) -> LocalBench:
    bench = LocalBench()
    bench.member.encode_as(encoding)
    for index, end in enumerate(ends):
        done = sum(each == "commit" for each in ends[:index])
        bench.assign(
            (8 * done, 8 * done + 8), end=end, attempt=int("void" in ends[index - 1 : index])
        )
    bench.run()
    return bench


@narrow
def test_a_window_sends_what_was_lost_of_the_one_before(encoding: Encoding) -> None:
    bench = windows(encoding, "commit", "commit")

    first, second = sent_by(bench)
    rows = layout_rows(plan_model([bench.model]).layout.blocks)
    lost = np.concatenate([lost_of(first[row], encoding) for row in rows])
    start = windows(encoding, "commit")
    alone = LocalBench()
    for mine, held in zip(alone.model.parameters(), start.model.parameters(), strict=True):
        mine.data.copy_(held)
    transfer = TransferAsked(
        transfer_id=7, head=Key(1, 9), sends=False, step=0, cursor=Cursor(0, 0)
    )
    alone.member.stand(installed_from=transfer)  # The line has written them.
    alone.optimizer.load_state_dict(start.optimizer.state_dict())
    alone.assign((8, 16), end="commit")
    alone.run()

    (change,) = sent_by(alone)
    same([second], [change + lost])


@narrow
@pytest.mark.parametrize("infinite", [False, True])
def test_c_commit_001_what_was_lost_of_a_dropped_window_is_not_what_an_abstaining_one_commits(
    encoding: Encoding, *, infinite: bool
) -> None:
    bench, calm = (LocalBench() for _ in range(2))

    def spoil(body: int, loss: torch.Tensor) -> torch.Tensor:
        if infinite and body == 3:  # The last one of the window that is dropped.
            bench.model.get_parameter("0.bias").data[0] = torch.inf
        return loss

    bench.spoil = spoil
    for each in (bench, calm):
        each.member.encode_as(encoding)
        each.assign((0, 8), end="commit")
    bench.assign((8, 16), end="void")  # Its halt is answered by SKIP, and its change is dropped.
    bench.assign(end="commit")
    for each in (bench, calm):
        each.assign((16, 24), end="commit")

        each.run()

    assert bench.member.exchange.weights == [8.0, 8.0, 0.0, 8.0]
    assert (len(bench.sent[1]) < len(bench.sent[0])) == infinite, "blocks after it are not sent"
    same([sent_by(bench)[-1]], [sent_by(calm)[-1]])


@narrow
def test_a_change_of_a_void_window_is_sent_again_bit_for_bit(encoding: Encoding) -> None:
    bench = windows(encoding, "commit", "void", "commit", "commit")
    undisturbed = windows(encoding, "commit", "commit", "commit")

    first, void, again, last = sent_by(bench)

    same([void], [again])
    same([first, again, last], sent_by(undisturbed))
