"""A worker's exchange with real reducers: the same over gRPC, TCP lanes and shared memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import MeanKind, Policy
from andon_reducer.config import ReducerConfig
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.reducer_path import ReducerUnfit
from andon_trainer.exchange.star.star import ReducerAway, StarExchange
from integration.andon_trainer.star_workers import (
    CHUNK,
    LAYOUT,
    PATHS,
    PATIENCE_S,
    POLICY,
    SIZES,
    StarWorker,
    exchanged,
    means,
    opening_of,
    shares_of,
    star,
    weighted_mean,
)
from integration.flipping import FlippingRelay, in_run_of
from integration.harness import wait_until
from integration.reducer_bench import Reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

over_every_path = pytest.mark.parametrize("path", PATHS)
WIDE = Layout((Block(BlockKind.OTHER, "b", (Component("w", (2**18,)),)),))
TRIMMED = Policy(chunk_elements=CHUNK, mean=MeanKind.TRIMMED)


@pytest.fixture(scope="module")
def bits_of_one(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The averages of three workers that one reducer makes over gRPC."""
    with star("wire", tmp_path_factory.mktemp("one"), 1, 3) as (_, workers):
        first, *others = exchanged(workers, 1)
        assert others == [first] * 2
    return first


def moved(reducers: list[Reducer], direction: str, path: str) -> float:
    """The bytes that reducers have moved over a path."""
    name = "andon_exchange_bytes_total"
    return sum(each.metric(name, direction=direction, path=path) for each in reducers)


def has_moved(reducers: list[Reducer], direction: str, path: str, size: int) -> bool:
    return moved(reducers, direction, path) == size


# ------------------------------------------------------------------------- every path


@pytest.mark.parametrize("reducers", [1, 3])
@over_every_path
def test_a_path_carries_the_bits_of_one_reducer_over_grpc_and_nothing_takes_another(
    tmp_path: Path, bits_of_one: bytes, path: str, reducers: int
) -> None:
    with star(path, tmp_path, reducers, 3) as (started, workers):
        for number in (1, 2):
            assert exchanged(workers, number) == [bits_of_one] * 3

        traffic = [worker.exchange.traffic for worker in workers]
        for each in traffic:
            assert min(each.sent[path], each.received[path]) >= 2 * 4 * sum(SIZES)
            assert not any(each.sent[other] + each.received[other] for other in {*PATHS} - {path})
        for direction, told in (("up", "sent"), ("down", "received")):
            expected = sum(getattr(each, told)[path] for each in traffic)
            if path != "shared-memory":
                # Counted once the kernel has an average, by when the worker may have it.
                wait_until(partial(has_moved, started, direction, path, expected))
            assert moved(started, direction, path) > 0
    assert list(tmp_path.iterdir()) == []


@over_every_path
def test_a_trimmed_mean_is_the_same_over_every_path(tmp_path: Path, path: str) -> None:
    with star(path, tmp_path, 2, 5, policy=TRIMMED) as (_, workers):
        found = exchanged(workers, 1)

    numbers = np.array([np.concatenate(worker.blocks) for worker in workers], np.float64)
    shares = np.array([worker.rank + 0.5 for worker in workers]) / 12.5
    kept = np.sort(np.argsort(numbers, axis=0)[1:-1], axis=0)
    products = shares[kept] * np.take_along_axis(numbers, kept, axis=0)
    first, second, third = products
    weights = (shares[kept[0]] + shares[kept[1]]) + shares[kept[2]]
    expected = (((first + second) + third) / weights).astype(np.float32)
    assert found == [expected.tobytes()] * 5


@over_every_path
def test_a_rank_that_abstains_gets_every_average(tmp_path: Path, path: str) -> None:
    with star(path, tmp_path, 3, 2) as (_, workers):
        workers[0].give(1)
        workers[1].abstain(1)

        assert [worker.told() for worker in workers] == [AveragesComplete(Key(1, 1), 0.5, 2)] * 2

        assert means(workers) == [np.concatenate(workers[0].blocks).tobytes()] * 2


@over_every_path
def test_if_all_abstain_each_is_told_once_that_the_averages_are_zero(
    tmp_path: Path, path: str
) -> None:
    with star(path, tmp_path, 3, 2) as (_, workers):
        exchanged(workers, 1)
        for number in (2, 3):
            for worker in workers:
                worker.abstain(number)

            told = [worker.told() for worker in workers]

            assert told == [AveragesComplete(Key(1, number), 0.0, 2)] * 2
            assert means(workers) == [bytes(4 * sum(SIZES))] * 2
        assert all(worker.is_told_no_more() for worker in workers)


@over_every_path
def test_calls_of_one_round_run_in_order_over_the_reducers_that_they_use(
    tmp_path: Path, path: str
) -> None:
    calls = [
        Call(name="a", sequence=0, blocks=range(1)),
        Call(name="barrier", sequence=1),
        Call(name="b", sequence=2, blocks=range(1, 4)),
    ]
    with star(path, tmp_path, 3, 2) as (_, workers):
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


@pytest.mark.parametrize(
    ("path", "reducers", "size", "policy"),
    [
        *((path, 3, 5 * CHUNK + 9, POLICY) for path in PATHS),
        # More than the kernel takes at once follow each other on the socket beside the memory.
        ("shared-memory", 1, 2**22, Policy(chunk_elements=2**18)),
    ],
    ids=[*PATHS, "more than the kernel takes at once"],
)
def test_bytes_of_rank_0_reach_the_others_once(
    tmp_path: Path, path: str, reducers: int, size: int, policy: Policy
) -> None:
    with star(path, tmp_path, reducers, 2, policy=policy) as (_, workers):
        sent = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        arrived = np.zeros_like(sent)
        workers[0].begin(1, Call(name="broadcast", data=sent))
        workers[0].exchange.submit_data()
        workers[1].abstain(1, Call(name="broadcast", data=arrived))

        told = [worker.told() for worker in workers]

        assert all(isinstance(event, AveragesComplete) for event in told), told
        assert all(worker.is_told_no_more() for worker in workers)
        np.testing.assert_array_equal(arrived, sent)


@pytest.mark.parametrize("path", ["wire", "tcp"])
def test_f_dp_003_a_value_that_must_not_be_sent_is_reported_once_and_goes_to_no_reducer(
    tmp_path: Path, path: str
) -> None:
    with star(path, tmp_path, 3, 1) as (_, (worker,)):
        worker.blocks[0][5] = np.nan

        worker.give(1)

        told = worker.told()
        assert isinstance(told, ExchangeFailed)
        assert (told.kind, told.block, told.element) == ("NON_FINITE_GRADIENT", 0, 5)
        assert worker.is_told_no_more()
        assert worker.exchange.refused
        assert not worker.exchange.traffic.sent[path]


@pytest.mark.parametrize("path", ["wire", "tcp"])
def test_blocks_of_a_void_round_do_not_stand_in_the_next_ones_way(
    tmp_path: Path, path: str
) -> None:
    # The model is larger than the window, and a rank died before it sent anything.
    window_bytes = 8 * 2**10
    with star(path, tmp_path, 1, 3, window_bytes=window_bytes) as ((reducer,), workers):
        for worker in workers[:2]:
            worker.give(1)
        workers[2].open()
        wait_until(lambda: reducer.app.inflight_bytes > window_bytes - 2 * 4 * CHUNK)
        workers[2].exchange.close()
        survivors = workers[:2]
        for worker in survivors:
            worker.exchange.end()
            worker.size = 2

        assert exchanged(survivors, 2) == [weighted_mean(survivors)] * 2


# ---------------------------------------------------------------- where a path matters


@pytest.mark.parametrize("socketed", [True, False], ids=["socket", "grpc"])
def test_messages_about_shared_memory_use_the_socket_beside_it_if_the_reducer_has_one(
    tmp_path: Path, bits_of_one: bytes, monkeypatch: pytest.MonkeyPatch, *, socketed: bool
) -> None:
    if not socketed:  # As an older reducer.
        monkeypatch.setattr("andon_reducer.transport.reduce.SOCKET_CAPABILITY", "unknown.v1")
    with star("shared-memory", tmp_path, 1, 3) as (_, workers):
        assert exchanged(workers, 1) == [bits_of_one] * 3

        receiving = [each for each in threading.enumerate() if each.name == "andon-from-reducer"]
        assert len(receiving) == (3 if socketed else 0)


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[StarWorker]]:
    """A reducer and a worker on each of `count` hosts; no two hosts share a folder."""
    with ExitStack() as stack:
        folders = [folder / f"host{number}" for number in range(count)]
        for each in folders:
            each.mkdir()
        reducers = [
            stack.enter_context(Reducer(ReducerConfig(chunk_elements=CHUNK, shared_dir=each)))
            for each in folders
        ]
        shares = shares_of([f"127.0.0.1:{each.port}" for each in reducers])
        members = [
            StarWorker(rank, count, shares, shared_dir=each) for rank, each in enumerate(folders)
        ]
        for worker in members:
            stack.callback(worker.exchange.close)
        yield members
        assert [list(each.iterdir()) for each in folders] == [[]] * count


def test_a_worker_shares_memory_with_the_reducer_of_its_host_and_gets_the_same_bits(
    tmp_path: Path, bits_of_one: bytes
) -> None:
    with hosts(tmp_path, 3) as workers:
        for number in (1, 2):
            assert exchanged(workers, number) == [bits_of_one] * 3
        traffic = [worker.exchange.traffic for worker in workers]

    model = 2 * 4 * sum(SIZES)
    for each in traffic:
        for way in (each.sent, each.received):
            assert 0.2 * model < way["shared-memory"] < 0.45 * model
            assert 0.55 * model < way["wire"] < model


def test_memory_that_a_reducer_of_this_host_does_not_share_is_counted(tmp_path: Path) -> None:
    with Reducer(ReducerConfig(chunk_elements=CHUNK)) as reducer:  # It shares none.
        shares = shares_of([f"127.0.0.1:{reducer.port}"])
        sharing, plain = StarWorker(0, 1, shares, shared_dir=tmp_path), StarWorker(0, 1, shares)
        for worker in (sharing, plain):
            worker.begin(1)
            worker.exchange.close()

    assert sharing.exchange.traffic.fallbacks == 1
    assert plain.exchange.traffic.fallbacks == 0, "it was not asked to share"


def test_each_reducer_carries_its_part_alone(tmp_path: Path) -> None:
    with star("wire", tmp_path, 3, 2) as (_, workers):
        exchanged(workers, 1)
        exchange = workers[0].exchange
        sent = [reducer.traffic.sent["wire"] for reducer in exchange._reducers]

    assert exchange.traffic.sent == {"wire": sum(sent)}
    assert sum(sent) < 1.2 * 4 * sum(SIZES)
    assert max(sent) < 0.45 * sum(sent)


def test_a_round_that_was_void_after_its_averages_keeps_the_stream(tmp_path: Path) -> None:
    with star("wire", tmp_path, 1, 1) as (_, (worker,)):
        exchanged([worker], 1)

        assert worker.exchange.is_open


@pytest.mark.parametrize(
    ("encoding", "answer"),
    [
        (Encoding.FLOAT16, None),
        (Encoding.BFLOAT16, Encoding.FLOAT32),
        (Encoding.INT8_BLOCK, None),
        (Encoding.INT4_BLOCK, Encoding.FLOAT32),
        (Encoding.INT2_BLOCK, Encoding.INT4_BLOCK),
        (Encoding.TOPK, None),
    ],
)
def test_narrow_gradients_are_averaged_in_float32_and_come_back_as_asked(
    tmp_path: Path, encoding: Encoding, answer: Encoding | None
) -> None:
    policy = Policy(chunk_elements=2**12, encoding=encoding, answer_encoding=answer)

    with star("wire", tmp_path, 1, 2, policy=policy, layout=WIDE) as (_, workers):
        found = exchanged(workers, 1)
        sent = workers[0].exchange.traffic.sent["wire"]

    size = workers[0].blocks[0].size
    payloads = [
        [
            encode(each.blocks[0][start : start + 2**12], encoding, kept=policy.topk_kept)
            for start in range(0, size, 2**12)
        ]
        for each in workers
    ]
    first, second = (
        np.concatenate(
            [decode(part, encoding, min(2**12, size - 2**12 * at)) for at, part in enumerate(parts)]
        )
        for parts in payloads
    )
    exact = (first * np.float32(0.25) + second * np.float32(0.75)).astype(np.float32)
    back = answer or encoding
    expected = decode(encode(exact, back), back, size)
    assert found == [expected.tobytes()] * 2
    assert (
        1
        < sent / sum(part.nbytes for part in payloads[0])
        < 1.1 + 0.4 * (encoding is Encoding.TOPK)
    )


@pytest.mark.parametrize(
    ("policy", "lacks"),
    [
        (Policy(chunk_elements=CHUNK, encoding=Encoding.INT4_BLOCK), r"int4\.v1"),
        (TRIMMED, r"trimmed\.v1"),
    ],
    ids=["encoding", "mean"],
)
def test_a_reducer_that_lacks_what_the_line_needs_is_refused_by_the_capabilitys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, lacks: str
) -> None:
    monkeypatch.setattr("andon_reducer.transport.reduce.CAPABILITIES", ("int8.v1",))

    with (
        star("wire", tmp_path, 1, 1, policy=policy) as (_, (worker,)),
        pytest.raises(ReducerUnfit, match=f"lacks {lacks}, which the line"),
    ):
        worker.open()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_bit_that_flips_on_the_wire_voids_the_round_and_the_next_one_is_right(
    direction: str,
) -> None:
    # Rank 1 sends 2.0 everywhere, and gets 1.75.
    number = np.float32(2.0 if direction == "up" else 1.75).tobytes()
    with (
        Reducer() as reducer,
        FlippingRelay(f"127.0.0.1:{reducer.port}", direction, in_run_of(number)) as relay,
    ):
        sound, relayed = f"127.0.0.1:{reducer.port}", relay.address
        workers = [
            StarWorker(rank, 2, shares_of([address]))
            for rank, address in enumerate((sound, relayed))
        ]
        for rank, worker in enumerate(workers):
            worker.blocks = [np.full(size, rank + 1.0, np.float32) for size in SIZES]
            worker.give(1)

        told = workers[1].told()
        for worker in workers:
            worker.exchange.end()
        found = exchanged(workers, 2)
        for worker in workers:
            worker.exchange.close()

    assert relay.flipped == 1
    assert isinstance(told, ExchangeFailed), "what was changed was averaged"
    assert (told.kind, told.rank) == ("CORRUPT_CHUNK", 1)
    assert told.block in {block for block, size in enumerate(SIZES) if size > 16}
    assert found == [np.full(sum(SIZES), 1.75, np.float32).tobytes()] * 2


def test_a_reducer_that_goes_away_is_named_and_the_next_round_opens_all_streams_anew() -> None:
    with Reducer() as stays:
        with Reducer() as leaving:
            shares = shares_of([f"127.0.0.1:{each.port}" for each in (stays, leaving)])
            workers = [StarWorker(rank, 2, shares) for rank in range(2)]
            for worker in workers:
                worker.begin(2)
        told = [worker.told() for worker in workers]
        for worker in workers:
            assert not worker.exchange.is_open
            worker.exchange.end()
            with pytest.raises(ReducerAway, match=f"no reducer at 127.0.0.1:{leaving.port}"):
                worker.begin(3)
            worker.exchange.close()

    assert [getattr(event, "kind", "") for event in told] == ["DATA_STREAM_LOST"] * 2
    assert all(f":{leaving.port}" in getattr(event, "message", "") for event in told)


def test_a_reducer_that_never_answers_is_given_up() -> None:
    with Reducer() as reducer, socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [f"127.0.0.1:{reducer.port}", f"127.0.0.1:{silent.getsockname()[1]}"]
        access = ReducerAccess(opening_s=2.0)
        exchange = StarExchange(LAYOUT, POLICY, Inbox(), shares_of(addresses), access)
        began = time.monotonic()

        with pytest.raises(ReducerAway, match=addresses[1]):
            exchange.open("", opening_of(0))

        assert time.monotonic() - began < PATIENCE_S
        assert not exchange.is_open
        exchange.close()
