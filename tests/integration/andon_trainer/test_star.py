"""A worker's exchange striped over several real reducers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import ReducerShare, partition
from andon.protocol.run_settings import Policy
from andon_reducer.config import ReducerConfig
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete, Event, ExchangeFailed
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.star import ReducerAway, StarExchange
from integration.reducer_bench import RUN, SECRET, Reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

CHUNK = 2**8
SIZES = (9 * CHUNK + 7, 3, 20 * CHUNK, 1)
LAYOUT = Layout(
    tuple(
        Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
        for i, size in enumerate(SIZES)
    )
)
POLICY = Policy(chunk_elements=CHUNK)
PATIENCE_S = 20.0
QUIET_S = 0.3


class Worker:
    """One worker's exchange, without a coordinator."""

    def __init__(
        self,
        rank: int,
        size: int,
        shares: tuple[ReducerShare, ...],
        shared_dir: Path | None = None,
        lane_patience_s: float = 60.0,
    ) -> None:
        self.inbox = Inbox()
        self.rank, self.size = rank, size
        self.opening = OpenRound(RUN, rank, tokens.session_token(SECRET, RUN, rank))
        self.address = shares[0].address
        access = ReducerAccess(
            opening_s=PATIENCE_S, shared_dir=shared_dir, lane_patience_s=lane_patience_s
        )
        self.exchange = StarExchange(LAYOUT, POLICY, self.inbox, shares, access)
        generator = np.random.default_rng(rank)
        self.blocks = [generator.standard_normal(size, dtype=np.float32) for size in SIZES]

    def begin(self, number: int, call: Call | None = None) -> None:
        if not self.exchange.is_open:
            self.exchange.open(self.address, self.opening)
        assigned = Assigned(
            key=Key(1, number),
            parent=None,
            roster=tuple(range(self.size)),
            rank=self.rank,
            step=1,
            attempt=0,
            epoch=0,
            positions=(PositionRange(0, 1),),
            batch=PositionRange(0, self.size),
        )
        self.exchange.begin(assigned, self.rank + 0.5, call)

    def give(self, number: int) -> None:
        self.begin(number)
        for index, block in enumerate(self.blocks):
            self.exchange.submit(index, block)

    def told(self) -> Event:
        event = self.inbox.take(PATIENCE_S)
        assert event is not None
        return event

    def is_told_no_more(self) -> bool:
        return self.inbox.take(QUIET_S) is None


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Worker]]:
    """A reducer and a worker on each of `count` hosts; no two hosts share a folder."""
    with ExitStack() as stack:
        folders = [folder / f"host{number}" for number in range(count)]
        for each in folders:
            each.mkdir()
        reducers = [
            stack.enter_context(Reducer(ReducerConfig(chunk_elements=CHUNK, shared_dir=each)))
            for each in folders
        ]
        shares = partition(LAYOUT, CHUNK, [f"127.0.0.1:{each.port}" for each in reducers])
        members = [Worker(rank, count, shares, each) for rank, each in enumerate(folders)]
        for worker in members:
            stack.callback(worker.exchange.close)
        yield members
        assert [list(each.iterdir()) for each in folders] == [[]] * count


@contextmanager
def line(reducers: int, workers: int) -> Iterator[tuple[list[Reducer], list[Worker]]]:
    """Reducers that share the model, and workers whose streams are not open yet."""
    with ExitStack() as stack:
        started = [stack.enter_context(Reducer(ReducerConfig())) for _ in range(reducers)]
        shares = partition(LAYOUT, CHUNK, [f"127.0.0.1:{each.port}" for each in started])
        members = [Worker(rank, workers, shares) for rank in range(workers)]
        for worker in members:
            stack.callback(worker.exchange.close)
        yield started, members


def means(workers: list[Worker]) -> list[bytes]:
    return [np.concatenate(worker.exchange.averages).tobytes() for worker in workers]


def test_several_reducers_give_every_worker_the_bits_of_one() -> None:
    results = []
    for reducers in (1, 3):
        with line(reducers, 3) as (_, workers):
            for worker in workers:
                worker.give(1)
            told = [worker.told() for worker in workers]
            results.append(means(workers))

        assert told == [AveragesComplete(Key(1, 1), 4.5, 3)] * 3
    assert len({*results[0], *results[1]}) == 1


def test_a_worker_shares_memory_with_the_reducer_of_its_host_and_gets_the_same_bits(
    tmp_path: Path,
) -> None:
    with line(1, 3) as (_, workers):
        for worker in workers:
            worker.give(1)
        assert {type(worker.told()) for worker in workers} == {AveragesComplete}
        expected = means(workers)

    with hosts(tmp_path, 3) as workers:
        for number in (1, 2):
            for worker in workers:
                worker.give(number)
            told = [worker.told() for worker in workers]
            assert told == [AveragesComplete(Key(1, number), 4.5, 3)] * 3
            assert means(workers) == expected
        traffic = [worker.exchange.traffic for worker in workers]
        model = 2 * 4 * sum(SIZES)
        for each in traffic:
            for way in (each.sent, each.received):
                assert 0.2 * model < way["shared-memory"] < 0.45 * model
                assert 0.55 * model < way["wire"] < model


def test_over_shared_lanes_too_a_rank_may_abstain_and_bytes_go_to_all(tmp_path: Path) -> None:
    data = [np.full(3 * CHUNK + 5, rank, np.uint8) for rank in range(2)]
    with hosts(tmp_path, 2) as workers:
        workers[0].give(1)
        workers[1].begin(1)
        workers[1].exchange.abstain()
        assert [worker.told() for worker in workers] == [AveragesComplete(Key(1, 1), 0.5, 2)] * 2
        alone = np.concatenate(workers[0].blocks).tobytes()
        assert means(workers) == [alone, alone]
        for worker, mine in zip(workers, data, strict=True):
            worker.begin(2, Call(name="broadcast", data=mine))
        workers[0].exchange.submit_data()
        workers[1].exchange.abstain()
        assert [type(worker.told()) for worker in workers] == [AveragesComplete] * 2
    assert data[1].tobytes() == data[0].tobytes()


def test_each_reducer_carries_its_part_alone() -> None:
    with line(3, 2) as (_, workers):
        for worker in workers:
            worker.give(1)
        for worker in workers:
            worker.told()
        exchange = workers[0].exchange
        sent = [reducer.traffic.sent["wire"] for reducer in exchange._reducers]

    assert exchange.traffic.sent == {"wire": sum(sent)}
    assert sum(sent) < 1.2 * 4 * sum(SIZES)
    assert max(sent) < 0.45 * sum(sent)


def test_a_rank_that_abstains_gets_every_average() -> None:
    with line(3, 2) as (_, workers):
        workers[0].give(1)
        workers[1].begin(1)
        workers[1].exchange.abstain()

        told = [worker.told() for worker in workers]

        assert told == [AveragesComplete(Key(1, 1), 0.5, 2)] * 2
        np.testing.assert_array_equal(workers[1].exchange.averages[2], workers[0].blocks[2])


def test_if_all_abstain_each_is_told_once_that_the_averages_are_zero() -> None:
    with line(3, 2) as (_, workers):
        for number in (1, 2):
            for worker in workers:
                worker.exchange.averages[0][:] = 7.0
                worker.begin(number)
                worker.exchange.abstain()

            told = [worker.told() for worker in workers]

            assert told == [AveragesComplete(Key(1, number), 0.0, 2)] * 2
            assert all(worker.is_told_no_more() for worker in workers)
            assert not any(worker.exchange.averages[0].any() for worker in workers)


def test_calls_of_one_round_run_in_order_over_the_lanes_that_they_use() -> None:
    calls = [
        Call(name="a", sequence=0, blocks=range(1)),
        Call(name="barrier", sequence=1),
        Call(name="b", sequence=2, blocks=range(1, 4)),
    ]
    with line(3, 2) as (_, workers):
        for call in calls:
            for worker in workers:
                worker.begin(1, call)
                for block in call.blocks:
                    worker.exchange.submit(block, worker.blocks[block])
                if not call.blocks:
                    worker.exchange.abstain()
            told = [worker.told() for worker in workers]

            total = 2.0 if call.blocks else 0.0
            assert told == [AveragesComplete(Key(1, 1), total, 2)] * 2
        assert all(worker.is_told_no_more() for worker in workers)


def test_bytes_of_rank_0_reach_the_others_once() -> None:
    with line(3, 2) as (_, workers):
        sent = np.arange(5 * CHUNK + 9, dtype=np.uint8)
        arrived = np.zeros_like(sent)
        workers[0].begin(1, Call(name="broadcast", data=sent))
        workers[0].exchange.submit_data()
        workers[1].begin(1, Call(name="broadcast", data=arrived))
        workers[1].exchange.abstain()

        told = [worker.told() for worker in workers]

        assert all(isinstance(event, AveragesComplete) for event in told)
        assert all(worker.is_told_no_more() for worker in workers)
        np.testing.assert_array_equal(arrived, sent)


def test_f_dp_003_a_value_that_must_not_be_sent_is_reported_once_and_goes_to_no_reducer() -> None:
    with line(3, 1) as (_, (worker,)):
        worker.blocks[0][5] = np.nan

        worker.give(1)

        told = worker.told()
        assert isinstance(told, ExchangeFailed)
        assert (told.kind, told.block, told.element) == ("NON_FINITE_GRADIENT", 0, 5)
        assert worker.is_told_no_more()
        assert worker.exchange.refused
        assert not worker.exchange.traffic.sent["wire"]


def test_a_reducer_that_goes_away_is_named_and_the_next_round_opens_all_lanes_anew() -> None:
    with line(2, 2) as (_, workers):
        for worker in workers:
            worker.begin(1)
        with Reducer(ReducerConfig()) as leaving:
            stand_in = [
                Worker(
                    rank,
                    2,
                    partition(LAYOUT, CHUNK, [workers[0].address, f"127.0.0.1:{leaving.port}"]),
                )
                for rank in range(2)
            ]
            for worker in stand_in:
                worker.begin(2)
        told = [worker.told() for worker in stand_in]
        for worker in stand_in:
            assert not worker.exchange.is_open
            worker.exchange.end()
            with pytest.raises(ReducerAway, match=f"no reducer at 127.0.0.1:{leaving.port}"):
                worker.begin(3)
            worker.exchange.close()

    assert [getattr(event, "kind", "") for event in told] == ["DATA_STREAM_LOST"] * 2
    assert all(f":{leaving.port}" in getattr(event, "message", "") for event in told)


def test_a_reducer_that_never_answers_is_given_up() -> None:
    with line(2, 1) as (reducers, _), socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [f"127.0.0.1:{reducers[0].port}", f"127.0.0.1:{silent.getsockname()[1]}"]
        shares = partition(LAYOUT, CHUNK, addresses)
        exchange = StarExchange(LAYOUT, POLICY, Inbox(), shares, ReducerAccess(opening_s=0.3))
        began = time.monotonic()

        with pytest.raises(ReducerAway, match=addresses[1]):
            exchange.open("", OpenRound(RUN, 0, tokens.session_token(SECRET, RUN, 0)))

        assert time.monotonic() - began < PATIENCE_S
        assert not exchange.is_open
        exchange.close()


def test_memory_that_a_reducer_of_this_host_does_not_share_is_counted(tmp_path: Path) -> None:
    with Reducer(ReducerConfig(chunk_elements=CHUNK)) as reducer:  # It shares none.
        shares = partition(LAYOUT, CHUNK, [f"127.0.0.1:{reducer.port}"])
        sharing, plain = Worker(0, 1, shares, tmp_path), Worker(0, 1, shares)
        for worker in (sharing, plain):
            worker.begin(1)
            worker.exchange.close()

    assert sharing.exchange.traffic.fallbacks == 1
    assert plain.exchange.traffic.fallbacks == 0, "it was not asked to share"
