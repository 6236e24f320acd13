"""A host of several processes on a line of grains contributes the bits that one process would."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from andon.protocol.attestations import NodeOwner
from andon.protocol.grains import Node, cover
from andon.protocol.records import PositionRange
from andon.protocol.shards import merged
from andon_trainer.hosts.dealing import deal_grains
from unit.andon_trainer.host_bench import HostBench
from unit.andon_trainer.step_bench import StepBench

GRAIN = 2
"""Batches of 12 positions have 6 grains."""
VERIFIED: dict[str, Any] = {
    "attests": True,
    "verifies": (4, 5),
    "itemised": True,
    "sums": (
        NodeOwner(node=Node(0, 4), rank=0, relayed=True),
        NodeOwner(node=Node(4, 6), rank=1, relayed=False),
    ),
}


def benches(size: int, loss_scale: float | None = None) -> tuple[StepBench, HostBench]:
    """One process, and a host; both train a network with BatchNorm."""
    scaler = None if loss_scale is None else torch.amp.GradScaler("cpu", init_scale=loss_scale)
    one = StepBench(grain=GRAIN, middle=nn.BatchNorm1d(5), scaler=scaler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return one, HostBench(size, model=model, loss_scale=loss_scale, grain=GRAIN)


def run(one: StepBench, host: HostBench) -> None:
    one.run()
    assert host.run() == [None] * len(host.processes)


def assert_alike(one: StepBench, host: HostBench) -> None:
    """What was sent, reported and left in every process has the same bits."""
    assert host.seat.exchange.rounds == one.sent
    for mine, theirs in zip(host.seat.reports, one.member.reports, strict=True):
        for name in (
            "weight",
            "loss_sum",
            "node_losses",
            "correct",
            "samples",
            "attested",
            "apart",
        ):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.averages_digest == theirs.averages_digest
        assert mine.mean_check == theirs.mean_check
        assert mine.timings.computed == theirs.timings.computed
    for process in host.processes:
        for name, value in one.model.state_dict().items():
            assert torch.equal(process.model.state_dict()[name], value), name


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 3))
def test_each_grain_is_dealt_once_and_no_process_has_more_than_its_part(
    mine: list[bool], processes: int, more: int
) -> None:
    share = merged(PositionRange(at, at + 1) for at, own in enumerate(mine) if own)
    count = len(mine) + more

    dealt = deal_grains(share, count, processes)

    sizes = [sum(map(len, each)) for each in dealt]
    assert merged(chain(*dealt)) == share
    assert sum(sizes) == sum(mine)
    assert max(sizes) <= -(-sum(mine) // processes)
    assert min(sizes) >= min(1, sum(mine) // processes)
    assert sorted(chain(*dealt)) == list(chain(*dealt)), "in rising order"


@pytest.mark.parametrize(
    ("share", "count", "processes", "nodes"),
    [
        ((0, 16), 16, 4, [1, 1, 1, 1]),
        ((0, 7), 16, 2, [1, 2]),
        ((3, 8), 8, 2, [2, 1]),
        ((1, 12), 16, 3, [2, 1, 1]),
        ((0, 2), 16, 3, [1, 1, 0]),
    ],
)
def test_runs_end_where_the_tree_does_where_that_costs_no_balance(
    share: tuple[int, int], count: int, processes: int, nodes: list[int]
) -> None:
    dealt = deal_grains((PositionRange(*share),), count, processes)

    assert [len(cover(each, count)) for each in dealt] == nodes


@pytest.mark.parametrize(
    ("size", "share"),
    [
        (2, ((0, 12),)),
        (4, ((2, 6), (8, 12))),
        (3, ((4, 6),)),  # One process has something to do, and two borrow samples.
        (2, ()),
    ],
)
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_a_host_sends_the_sums_of_one_process_and_ends_with_its_statistics(
    size: int, share: tuple[tuple[int, int], ...], loss_scale: float | None
) -> None:
    one, host = benches(size, loss_scale)
    for bench in (one, host):
        bench.assign(*share, end="commit")

    run(one, host)

    assert_alike(one, host)


@pytest.mark.parametrize("end", ["void early", "void", "void late"])
def test_what_a_host_has_summed_of_a_void_step_is_not_computed_again(end: str) -> None:
    one, host = benches(2)
    for bench in (one, host):
        bench.assign((0, 6), end=end)
        bench.assign((0, 6), (8, 12), end=end, attempt=1)
        bench.assign((0, 12), end="commit", attempt=2)

    run(one, host)

    assert_alike(one, host)
    # Of the last grain, process 0 has computed it, and process 1 borrowed samples.
    first, second = (each.computed for each in host.processes)
    assert [len(first), len(second)] == [4, 3]
    assert len({tuple(each) for each in (*first, *second[:2])}) == 6


def test_a_host_attests_what_one_process_would_whoever_computed_it() -> None:
    one, host = benches(2)
    for bench in (one, host):
        bench.assign((0, 8), end="void early", **VERIFIED)
        bench.assign((0, 8), end="void late", attempt=1)
        bench.assign((0, 8), end="commit", attempt=2, anew=True, **VERIFIED)

    run(one, host)

    assert_alike(one, host)
    assert len(host.seat.reports[-1].attested) == (4 + 1) + (2 + 1)
    assert [len(each.computed) for each in host.processes] == [7, 7]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_halts_the_line_and_all_is_computed_anew(rank: int) -> None:
    one, host = benches(2)
    for bench in (one, host):
        bench.assign((0, 12), end="commit")
        bench.assign((0, 12), end="commit", attempt=1)
    one.spoil = lambda body, loss: loss * float("nan") if body == 0 else loss
    host.processes[rank].spoil = one.spoil
    host.seat.ends = ["commit"]

    assert host.run() == [None, None]

    one.spoil = lambda _body, loss: loss
    assert host.seat.reported_losses == ["nan"]
    assert len(host.seat.reports) == 1
    assert host.seat.reports[0].weight == 12.0
