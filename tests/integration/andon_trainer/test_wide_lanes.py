"""A star over lanes of several connections: the same bits, and what ends them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from andon.tcp.kernel import LaneFlow
from andon.tcp.proof import LaneDirection
from andon.tcp.width import LaneWidth
from andon_reducer.config import ReducerConfig
from andon_trainer.core.events import ExchangeFailed
from integration.andon_trainer.star_workers import (
    StarWorker,
    exchanged,
    lanes_of,
    shares_of,
    weighted_mean,
)
from integration.harness import wait_until
from integration.reducer_bench import Reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

UP, DOWN = LaneDirection


@contextmanager
def wide_star(
    workers: int = 2, *, offered: int | None = 4, chosen: int | None = None
) -> Iterator[list[StarWorker]]:
    """Workers at one reducer, which takes so many connections a lane."""
    with ExitStack() as stack:
        reducer = stack.enter_context(Reducer(ReducerConfig(lane_connections=offered), lanes=True))
        at = shares_of([f"127.0.0.1:{reducer.port}"])
        made = [
            StarWorker(each, workers, at, lanes=True, connections=chosen) for each in range(workers)
        ]
        for each in made:
            stack.callback(each.exchange.close)
        yield made


def has_connections(worker: StarWorker, count: int) -> bool:
    lanes = lanes_of(worker)
    return lanes is not None and {lanes.connections(way) for way in LaneDirection} == {count}


def test_all_connections_of_a_lane_carry_frames_and_the_means_have_the_same_bits() -> None:
    with wide_star() as workers:
        for worker in workers:
            worker.open()
        wait_until(lambda: all(has_connections(each, 4) for each in workers))
        wait_until(lambda: all(lanes_of(each).used[UP] == 4 for each in workers))

        for number in range(1, 6):
            assert set(exchanged(workers, number)) == {weighted_mean(workers)}

        sent = [each.sent_bytes for each in lanes_of(workers[0])._sender._connections]
        assert sum(each > 0 for each in sent) > 1


def test_the_end_of_one_connection_ends_the_lane_and_the_next_one_is_as_wide() -> None:
    with wide_star() as workers:
        exchanged(workers, 1)
        wait_until(lambda: all(has_connections(each, 4) for each in workers))
        broken = lanes_of(workers[0])
        wait_until(lambda: broken.used[UP] == 4)
        workers[0].begin(2)

        # The others go on without one that has nothing to send: here it is this one's turn.
        broken.use_up(1)
        broken._sender._connections[0].end()

        workers[0].submit()
        told = workers[0].told()
        assert isinstance(told, ExchangeFailed)
        assert told.kind == "DATA_STREAM_LOST"
        workers[0].exchange.end()
        assert set(exchanged(workers, 3)) == {weighted_mean(workers)}
        wait_until(lambda: has_connections(workers[0], 4))


def test_lanes_that_grow_as_it_pays_get_connections_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def try_that_pays(width: LaneWidth, _flow: LaneFlow, connections: int, _now: float) -> int:
        if connections == width.wanted:
            width.opened(2 * connections)
        return width.wanted

    with wide_star(offered=None) as workers:
        exchanged(workers, 1)
        assert has_connections(workers[0], 1)

        # What a try brings depends on the machine's speed: here each one pays.
        monkeypatch.setattr(LaneWidth, "look", try_that_pays)
        lanes, rounds = lanes_of(workers[0]), itertools.count(2)

        def grew() -> bool:
            exchanged(workers, next(rounds))
            return lanes.used[UP] > 1 and all(lanes.connections(way) > 1 for way in LaneDirection)

        wait_until(grew)
        assert set(exchanged(workers, next(rounds))) == {weighted_mean(workers)}


@pytest.mark.parametrize(("offered", "chosen", "there"), [(4, 2, 2), (2, 8, 2), (1, 8, 1)])
def test_a_lane_has_as_many_connections_as_both_ends_take(
    offered: int, chosen: int, there: int
) -> None:
    with wide_star(1, offered=offered, chosen=chosen) as workers:
        exchanged(workers, 1)

        wait_until(lambda: has_connections(workers[0], there))
