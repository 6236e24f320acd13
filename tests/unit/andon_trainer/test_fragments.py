"""Fragments: a round exchanges a part of the blocks, and the rest of a change is left over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from andon.protocol.schedules import NESTEROV
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import ranges

LAST, FIRST = 0, 1
"""The blocks of the bench's two layers: the last layer is the first block."""


def layers(bench: LocalBench) -> dict[int, list[torch.Tensor]]:
    """Copies of each block's own weights."""
    first, last = bench.weights[:2], bench.weights[2:]
    return {FIRST: first, LAST: last}


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def held(bench: LocalBench) -> dict[int, list[torch.Tensor]]:
    """The line's weights, as a newcomer would get them."""
    assert bench.replica.beneath is not None
    tree = bench.replica.beneath()
    if tree is None:
        return layers(bench)
    model = tree["model"]
    return {
        FIRST: [model["0.weight"].clone(), model["0.bias"].clone()],
        LAST: [model["1.weight"].clone(), model["1.bias"].clone()],
    }


def test_a_round_moves_the_lines_weights_of_its_fragment_and_leaves_the_workers_own() -> None:
    bench = LocalBench(fragments=2)
    start, plain = layers(bench), copy.deepcopy(bench.model)
    for number in range(3):
        bench.assign((4 * number, 4 * number + 4), end="commit", fragment=(number + 1) % 2)
    bodies = bench.bodies()

    next(bodies)

    assert set(bench.sent[0]) == {FIRST}
    assert same(held(bench)[LAST], start[LAST]), "no record has moved them"
    assert same(held(bench)[FIRST], layers(bench)[FIRST])
    assert not same(layers(bench)[LAST], start[LAST]), "left over"

    next(bodies)
    # This worker is alone, so the mean of all changes is its own: it is as if nobody exchanged.
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for batch in bench.computed:
        optimizer.zero_grad()
        plain(bench.inputs[batch]).square().mean().backward()
        optimizer.step()

    assert set(bench.sent[1]) == {LAST}
    trained = [part.detach() for part in plain.parameters()]
    torch.testing.assert_close(bench.weights, trained)
    torch.testing.assert_close(held(bench)[LAST], trained[2:])
    # The change of both rounds.
    torch.testing.assert_close(
        flat(start[LAST]) - flat(trained[2:]), bench.change_of(bench.sent[1])
    )
    assert bench.member.computed.left_over, "what the second round changed in the first layer"


def test_the_outer_optimizer_passes_over_what_was_not_exchanged() -> None:
    bench = LocalBench(outer=NESTEROV, fragments=2)
    start = layers(bench)
    bench.assign((0, 4), end="commit", fragment=1)

    bench.run()

    assert same(held(bench)[LAST], start[LAST])
    moved = flat(start[FIRST]) - flat(layers(bench)[FIRST])
    torch.testing.assert_close(moved, 0.7 * 1.9 * bench.change_of(bench.sent[0]))
    assert len(bench.outer.state) == 2, "one momentum for each parameter of the first layer"


def test_a_round_of_the_whole_model_leaves_nothing_over() -> None:
    bench = LocalBench(fragments=2)
    bench.assign((0, 4), end="commit", fragment=1)
    bench.assign((4, 8), end="commit")

    bench.run()

    assert set(bench.sent[1]) == {FIRST, LAST}
    assert not bench.member.computed.left_over
    assert same(held(bench)[LAST], layers(bench)[LAST])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_void_round_sends_the_same_change_of_a_fragment_again(overlap: bool) -> None:
    bench, calm = LocalBench(fragments=2, overlap=overlap), LocalBench(fragments=2, overlap=overlap)
    for each, ends in ((bench, ["void", "commit"]), (calm, ["commit"])):
        each.assign((0, 4), end="commit", fragment=1)
        ahead: dict[str, Any] = {}
        if overlap:
            ahead = {"ahead": ranges((8, 12)), "ahead_batch": ranges((8, 12))[0]}
        for attempt, end in enumerate(ends):
            each.assign((4, 8), end=end, attempt=attempt, fragment=0, **ahead)

        each.run()

    assert bench.sent[1] == bench.sent[2] == calm.sent[1]
    assert bench.computed == calm.computed, "nothing is computed twice"
    assert same(bench.weights, calm.weights)


def test_what_is_dropped_takes_along_what_is_left_over() -> None:
    bench = LocalBench(fragments=2)
    bench.assign((0, 4), end="commit", fragment=1)
    next(bench.bodies())
    line = held(bench)
    assert not same(layers(bench)[LAST], line[LAST])

    bench.member.drop_computed("state moves to another worker")

    assert same(bench.weights, line[FIRST] + line[LAST])
    assert not bench.member.computed.left_over


def test_what_is_ahead_lies_on_the_new_weights_of_a_fragment() -> None:
    bench = LocalBench(fragments=2, overlap=True, momentum=0.0)
    start = layers(bench)
    ahead: dict[str, Any] = {"ahead": ranges((4, 8)), "ahead_batch": ranges((4, 8))[0]}
    bench.assign((0, 4), end="commit", fragment=1, **ahead)
    bench.assign((4, 8), end="commit")

    bodies = bench.bodies()
    next(bodies)
    due = layers(bench)
    next(bodies)  # Computed ahead; then the first record comes.

    # Alone, and with plain averaging, the line's new weights are where the due steps ended.
    assert set(bench.sent[0]) == {FIRST}
    torch.testing.assert_close(held(bench)[FIRST], due[FIRST])
    assert same(held(bench)[LAST], start[LAST])
    assert not same(layers(bench)[FIRST], due[FIRST]), "the step ahead stays"
    own = layers(bench)
    for _ in bodies:
        pass
    for layer in (FIRST, LAST):
        torch.testing.assert_close(layers(bench)[layer], own[layer])  # Now the line's, too.


def test_a_factor_keeps_a_part_of_the_own_weights_and_sends_it_later() -> None:
    bench, plain = LocalBench(fragments=2, mix=0.5), LocalBench(fragments=2)
    for each in (bench, plain):
        each.member.exchange.halves = True  # Somebody else is here, whose weights stand still.
        each.assign((0, 4), end="commit", fragment=1)
        next(each.bodies())

    line, own = held(bench), layers(bench)

    assert same(line[FIRST], held(plain)[FIRST]), "the line's weights are not mixed"
    # The average is half of the change, so the own weights are the change away, the line's half.
    start = layers(LocalBench(fragments=2))
    change = flat(start[FIRST]) - flat(line[FIRST])
    torch.testing.assert_close(flat(start[FIRST]) - flat(own[FIRST]), 1.5 * change)


def test_a_rank_without_samples_keeps_what_it_had_left_over() -> None:
    bench = LocalBench(fragments=2)
    bench.assign((0, 4), end="commit", fragment=1)
    bench.assign(end="commit", fragment=0)
    bodies = bench.bodies()
    next(bodies)
    own = layers(bench)

    next(bodies)

    assert bench.borrowed, "there was nothing to compute"
    assert same(layers(bench)[LAST], own[LAST])
    assert bench.member.computed.left_over
