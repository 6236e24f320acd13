"""The ring exchange over TCP lanes and over gRPC (contract C-RING-001)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.messages import EnterRound, RingHeader
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon.tcp.connection import prepare
from andon.v1 import ring_pb2
from andon.wire.frames import frame_pass
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from chaos.lane_relay import UP, LaneRelay
from integration.andon_trainer.ring_workers import Floats, RingLine
from integration.andon_trainer.test_tcp_star import NO_THREAD, no_thread_called, noted_connections
from integration.flipping import FlippingRelay, in_run_of
from integration.harness import wait_until
from unit.andon.certificates import certify
from unit.andon_trainer.ring_bench import expected_means, layout_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(110)]

SIZES = [1000, 7, 1, 300]
POLICY = Policy(chunk_elements=64)
LAYOUT = layout_of(SIZES)
PASS = "/andon.v1.Ring/Pass"


def key(number: int) -> Key:
    return Key(1 << 32, number)


def random_blocks(ranks: int, sizes: list[int], seed: int = 0) -> list[list[Floats]]:
    draw = np.random.default_rng(seed)
    return [[draw.standard_normal(size, dtype=np.float32) for size in sizes] for _ in range(ranks)]


def thirds(ring: RingLine, number: int, roster: list[int] | None = None) -> list[bool]:
    """Whether each worker of a roster gets the averages of a round."""
    roster = roster or [0, 1, 2]
    given = random_blocks(len(roster), SIZES, number)
    workers = [
        ring.give(key(number), rank, roster, given[rank], 1.0) for rank in range(len(roster))
    ]
    return [isinstance(each.outcome(key(number)), AveragesComplete) for each in workers]


@pytest.mark.parametrize("without_lanes", [[], [0], [0, 1, 2, 3]], ids=["lanes", "both", "gRPC"])
@pytest.mark.parametrize("weights", [[2.0], [3.0, 1.0], [1.0, 0.0, 2.5], [0.0, 0.0, 1.0, 4.0]])
def test_c_ring_001_uneven_weights_give_the_defined_mean(
    weights: list[float], without_lanes: list[int]
) -> None:
    ranks = len(weights)
    blocks = random_blocks(ranks, SIZES)
    with RingLine(LAYOUT, POLICY, ranks, without_lanes=without_lanes) as ring:
        for number in (1, 2, 3):
            for rank, weight in enumerate(weights):
                ring.give(key(number), rank, range(ranks), blocks[rank], weight)

            outcomes = {each.outcome(key(number)) for each in ring.workers}

            assert outcomes == {AveragesComplete(key(number), sum(weights), ranks)}
            for worker in ring.workers:
                means = expected_means(blocks, weights, POLICY)
                for mean, average in zip(means, worker.exchange.averages, strict=True):
                    assert average.tobytes() == mean.tobytes()


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.BFLOAT16, Encoding.INT8_BLOCK])
def test_c_ring_001_no_deadlock_at_ten_million_elements(encoding: Encoding) -> None:
    elements, policy = 10**7, Policy(encoding=encoding)
    blocks = random_blocks(2, [elements])
    with RingLine(layout_of([elements]), policy, 2) as ring:
        for rank in range(2):
            ring.give(key(1), rank, [0, 1], blocks[rank], 1.0)

        outcomes = {each.outcome(key(1)) for each in ring.workers}

        assert outcomes == {AveragesComplete(key(1), 2.0, 2)}
        (mean,) = expected_means(blocks, [1.0, 1.0], policy)
        for worker in ring.workers:
            assert worker.exchange.averages[0].tobytes() == mean.tobytes()


@pytest.mark.parametrize("without_lanes", [[], [0, 1, 2]], ids=["lanes", "gRPC"])
def test_c_ring_001_a_slow_rank_bounds_what_waits_for_it_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, without_lanes: list[int]
) -> None:
    # Far less room than the amount that arrives before the slow rank has any block.
    monkeypatch.setattr("andon_trainer.exchange.ring.incoming._WINDOW_BYTES", 2**12)
    sizes = [2**14] * 8
    blocks = random_blocks(3, sizes)
    policy = Policy(chunk_elements=2**9)
    with RingLine(layout_of(sizes), policy, 3, without_lanes=without_lanes) as ring:
        slow = ring.begin(key(1), 2, [0, 1, 2])
        for rank in range(2):
            ring.give(key(1), rank, [0, 1, 2], blocks[rank], 1.0)

        for block, flat in enumerate(blocks[2]):
            slow.exchange.submit(block, flat)

        for worker in ring.workers:
            assert isinstance(worker.outcome(key(1)), AveragesComplete)


@contextlib.contextmanager
def relayed_ring(workers: int) -> Iterator[tuple[RingLine, LaneRelay]]:
    """A ring whose rank 0 reaches rank 1 through a relay, and is not patient."""
    with RingLine(LAYOUT, POLICY, workers, lane_patience_s=0.5) as ring:
        second = ring.workers[1]
        listener = second.exchange.listener
        assert listener is not None
        assert listener.lanes is not None
        with LaneRelay(second.address, listener.lanes.port) as relay:
            second.address = relay.address
            yield ring, relay


def test_a_ring_link_whose_lane_passes_nothing_on_is_named_and_grpc_takes_its_place() -> None:
    with relayed_ring(3) as (ring, relay):
        assert thirds(ring, 1) == [True] * 3
        relay.freeze(UP)
        blocks = random_blocks(3, SIZES, 2)
        for rank in range(3):
            ring.give(key(2), rank, [0, 1, 2], blocks[rank], 1.0)

        failed = ring.workers[0].outcome(key(2))

        assert isinstance(failed, ExchangeFailed)
        assert failed.kind == "DATA_STREAM_LOST"
        assert f"the next rank, at {relay.address}: its TCP lane" in failed.message
        for worker in ring.workers:
            worker.exchange.end()
        relay.thaw()
        assert thirds(ring, 3) == [True] * 3
        lanes = [worker.exchange._station._link._sender for worker in ring.workers]  # type: ignore[union-attr]  # Each has a link.
        assert [lane is None for lane in lanes] == [True, False, False]


def test_a_rank_that_has_all_averages_still_finds_that_the_next_one_gets_none() -> None:
    with relayed_ring(2) as (ring, relay):
        first, second = ring.workers
        blocks = random_blocks(2, SIZES)
        ring.give(key(1), 0, [0, 1], blocks[0], 1.0)
        ring.begin(key(1), 1, [0, 1])
        sent = sum(SIZES) // 2 * 4
        wait_until(lambda: second.exchange.received_bytes > sent)
        relay.freeze(UP)  # After what rank 0 gives, and before the means that it makes.
        for block, flat in enumerate(blocks[1]):
            second.exchange.submit(block, flat)

        assert isinstance(first.outcome(key(1)), AveragesComplete)
        failed = second.outcome(key(1))

        assert isinstance(failed, ExchangeFailed)
        assert failed.kind == "DATA_STREAM_LOST"


def test_several_exchanges_of_a_round_and_a_broadcast_follow_each_other() -> None:
    roster = [0, 1, 2]
    blocks = random_blocks(3, SIZES)
    data = [np.full(50, 7 if rank == 0 else 0, np.uint8) for rank in roster]
    for each in data:
        each[:32] = 9
    with RingLine(LAYOUT, POLICY, 3) as ring:

        def work(rank: int) -> None:
            worker = ring.workers[rank]
            for sequence, span in enumerate((range(2), range(2, 4))):
                call = Call(name="all_reduce_gradients", sequence=sequence, blocks=span)
                ring.begin(key(1), rank, roster, rank + 1.0, call)
                for block in span:
                    worker.exchange.submit(block, blocks[rank][block])
                assert isinstance(worker.outcome(key(1)), AveragesComplete)
            call = Call(name="broadcast", sequence=2, data=data[rank], head_bytes=32)
            ring.begin(key(1), rank, roster, 1.0 if rank == 0 else 0.0, call)
            if rank == 0:
                worker.exchange.submit_data()
            assert worker.outcome(key(1)) == AveragesComplete(key(1), 1.0, 3)
            ring.begin(key(1), rank, roster, 0.0, Call(name="barrier", sequence=3))
            assert worker.outcome(key(1)) == AveragesComplete(key(1), 0.0, 3)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in roster]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        means = expected_means(blocks, [1.0, 2.0, 3.0], POLICY)
        for worker in ring.workers:
            for mean, average in zip(means, worker.exchange.averages, strict=True):
                assert average.tobytes() == mean.tobytes()
        assert all((each[32:] == 7).all() for each in data)


def test_f_dp_003_a_bad_value_is_named_and_is_not_sent() -> None:
    blocks = random_blocks(2, SIZES)
    blocks[1][0][640] = np.nan
    with RingLine(LAYOUT, POLICY, 2) as ring:
        for rank in range(2):
            ring.give(key(1), rank, [0, 1], blocks[rank], 1.0)

        failed = ring.workers[1].outcome(key(1))

        assert isinstance(failed, ExchangeFailed)
        found = (failed.kind, failed.rank, failed.block, failed.element)
        assert found == ("NON_FINITE_GRADIENT", 1, 0, 640)
        assert ring.workers[1].exchange.refused
        ring.workers[1].exchange.end()
        lost = ring.workers[0].outcome(key(1))
        assert isinstance(lost, ExchangeFailed)
        assert lost.kind == "DATA_STREAM_LOST"


@pytest.mark.parametrize("without_lanes", [[], [0, 1, 2]], ids=["lanes", "gRPC"])
def test_a_bit_that_flips_on_a_link_voids_the_round_and_the_next_one_is_right(
    without_lanes: list[int],
) -> None:
    twos = [np.full(size, 2.0, np.float32) for size in SIZES]
    two = twos[0][:1].tobytes()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(RingLine(LAYOUT, POLICY, 3, without_lanes=without_lanes))
        listener = ring.workers[1].exchange.listener
        assert listener is not None
        if listener.lanes is None:
            relay = FlippingRelay(ring.workers[1].address, "up", in_run_of(two))
            ring.workers[1].address = relay.address
        else:
            relay = FlippingRelay(f"127.0.0.1:{listener.lanes.port}", "up", in_run_of(two))
            listener.lanes.port = int(relay.address.rpartition(":")[2])  # what it offers
        stack.enter_context(relay)
        for rank in range(3):
            ring.give(key(1), rank, range(3), twos, 1.0)

        found = ring.workers[1].outcome(key(1))
        for worker in ring.workers:
            worker.exchange.end()

        assert relay.flipped == 1
        assert isinstance(found, ExchangeFailed), "what was changed was averaged"
        assert (found.kind, found.rank, found.block) == ("CORRUPT_CHUNK", 0, 0)
        assert thirds(ring, 2) == [True] * 3


def test_a_rank_that_leaves_breaks_its_neighbours_streams_and_the_others_continue() -> None:
    with RingLine(LAYOUT, POLICY, 3) as ring:
        assert thirds(ring, 1) == [True] * 3
        survivors = [
            ring.give(key(2), rank, [0, 1, 2], random_blocks(1, SIZES)[0], 1.0) for rank in (0, 2)
        ]

        ring.workers[1].exchange.close()

        for worker in survivors:
            lost = worker.outcome(key(2))
            assert isinstance(lost, ExchangeFailed)
            assert lost.kind == "DATA_STREAM_LOST"
            worker.exchange.end()
        assert thirds(ring, 3, [0, 2]) == [True, True]


def test_a_worker_that_closed_may_come_back_at_another_address_and_counts_on() -> None:
    with RingLine(LAYOUT, POLICY, 3) as ring:
        assert thirds(ring, 1) == [True] * 3
        before = ring.workers[1].exchange.traffic
        ring.workers[1].exchange.close()
        ring.workers[1].address = ring.workers[1].exchange.listen()

        assert thirds(ring, 2) == [True] * 3

        after = ring.workers[1].exchange.traffic
        assert after.received["ring"] > before.received["ring"] > 0


def test_nothing_of_a_void_round_is_added_to_the_next() -> None:
    old, new = random_blocks(2, SIZES, 1), random_blocks(2, SIZES, 2)
    with RingLine(LAYOUT, POLICY, 2) as ring:
        for number in range(1, 20, 2):
            # Void at rank 0 while rank 1 has not started it, or is in the middle of it.
            first = ring.give(key(number), 0, [0, 1], old[0], 1.0)
            if number % 4 == 1:
                ring.give(key(number), 1, [0, 1], old[1], 1.0)
            first.exchange.end()
            ring.workers[1].exchange.end()
            for rank in range(2):
                ring.give(key(number + 1), rank, [0, 1], new[rank], 1.0)

            for worker in ring.workers:
                assert isinstance(worker.outcome(key(number + 1)), AveragesComplete)
                means = expected_means(new, [1.0, 1.0], POLICY)
                for mean, average in zip(means, worker.exchange.averages, strict=True):
                    assert average.tobytes() == mean.tobytes()


def test_a_rank_with_an_older_key_learns_the_greater_one() -> None:
    with RingLine(LAYOUT, POLICY, 2) as ring:
        ring.begin(key(9), 1, [0, 1])

        late = ring.begin(key(8), 0, [0, 1])

        failed = late.outcome(key(8))
        assert isinstance(failed, ExchangeFailed)
        assert (failed.kind, failed.greatest) == ("STALE_ROUND", key(9))


def test_a_ring_with_certificates_has_encrypted_lanes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    certs = certify(tmp_path / "ca", tmp_path / "host", "127.0.0.1")
    with RingLine(LAYOUT, POLICY, 3, tls=certs) as ring:
        assert [thirds(ring, number) for number in (1, 2)] == [[True] * 3] * 2

    assert caplog.text.count("is reached over a TCP lane") == 3


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="only Linux lets one choose")
def test_a_lane_within_one_host_is_not_paced() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as connection,
    ):
        prepare(connection)

        chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0") == b"reno"


def test_where_no_lane_can_be_opened_grpc_carries_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with RingLine(LAYOUT, POLICY, 2) as ring:
        listener = ring.workers[1].exchange.listener
        assert listener is not None
        assert listener.lanes is not None
        with socket.create_server(("127.0.0.1", 0)) as closed:
            listener.lanes.port = closed.getsockname()[1]

        for number in (1, 2):
            assert thirds(ring, number, [0, 1]) == [True, True]
            for worker in ring.workers:
                worker.exchange.end()  # so that the next round has new links

        assert caplog.text.count("is reached over gRPC") == 1
    assert "path_chosen" in {getattr(each.msg, "name", "") for each in caplog.records}


@pytest.mark.parametrize("name", ["andon-ring-send", "andon-lane-watch"])
def test_where_a_lane_gets_no_thread_grpc_carries_everything(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    opened = noted_connections("andon_trainer.exchange.ring.link.connect", monkeypatch)
    no_thread_called(name, monkeypatch)
    with RingLine(LAYOUT, POLICY, 2) as ring:
        assert thirds(ring, 1, [0, 1]) == [True, True]

    assert f"is reached over gRPC: {NO_THREAD}" in caplog.text
    wait_until(lambda: [each._socket.fileno() for each in opened] == [-1, -1])


def test_an_ended_ring_leaves_no_thread_behind() -> None:
    before = {each for each in threading.enumerate() if each.name.startswith("andon-ring")}
    with RingLine(LAYOUT, POLICY, 3) as ring:
        assert thirds(ring, 1) == [True] * 3
        ring.begin(key(2), 0, [0, 1, 2])

    left = [each for each in threading.enumerate() if each.name.startswith("andon-ring")]
    for thread in left:
        thread.join(10.0)
    assert {thread for thread in left if thread.is_alive()} <= before


def pass_of(channel: grpc.Channel) -> grpc.StreamUnaryMultiCallable[bytes, bytes]:
    method: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(PASS)
    return method


def stranger(address: str, *messages: bytes) -> tuple[grpc.StatusCode, bytes]:
    """Sends messages to a worker from an unknown peer; returns the status and the answer."""
    with grpc.insecure_channel(address) as channel:
        try:
            return grpc.StatusCode.OK, pass_of(channel)(iter(messages), timeout=20.0)
        except grpc.RpcError as error:
            return error.code(), b""


def enter(number: int, token: bytes, rank: int = 0) -> bytes:
    return frame_pass(EnterRound(key=key(number), rank=rank, world_size=2, token=token))


def test_only_the_rank_before_may_write_to_a_rank() -> None:
    with RingLine(LAYOUT, POLICY, 2) as ring:
        first, second = ring.workers
        ring.begin(key(5), 1, [0, 1])
        right = ring.assigned(key(5), 1, [0, 1]).ring
        assert right is not None
        terms = frame_pass(RingHeader(key=key(5), rank=0, weight=1.0))
        answers = [
            stranger(second.address, enter(5, bytes(32)), terms),
            stranger(second.address, enter(5, right.token), terms),
            stranger(second.address, enter(5, right.expected_token, rank=1), terms),
            stranger(second.address, terms),
            stranger(second.address, b"\xff\xff"),
        ]

        assert [code.name for code, _ in answers] == [
            *["UNAUTHENTICATED"] * 3,
            *["INVALID_ARGUMENT"] * 2,
        ]
        code, answer = stranger(second.address, enter(4, bytes(32)))
        assert code is grpc.StatusCode.OK
        assert ring_pb2.PassResponse.FromString(answer).greatest.round == 4 + 1
        # The round continues.
        blocks = random_blocks(2, SIZES)
        ring.give(key(5), 0, [0, 1], blocks[0], 1.0)
        for block, flat in enumerate(blocks[1]):
            second.exchange.submit(block, flat)
        assert isinstance(first.outcome(key(5)), AveragesComplete)


def test_strangers_that_say_nothing_do_not_keep_the_neighbour_out() -> None:
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(60.0)
        yield from ()

    with RingLine(LAYOUT, POLICY, 2) as ring:
        channels = [grpc.insecure_channel(ring.workers[1].address) for _ in range(12)]
        calls = [pass_of(channel).future(nothing()) for channel in channels]
        for channel in channels:
            grpc.channel_ready_future(channel).result(20.0)

        assert thirds(ring, 1, [0, 1]) == [True, True]
        silence.set()
        for call, channel in zip(calls, channels, strict=True):
            call.cancel()
            channel.close()


def test_a_rank_that_breaks_a_rule_is_named() -> None:
    with RingLine(LAYOUT, POLICY, 2) as ring:
        ring.begin(key(1), 1, [0, 1])
        right = ring.assigned(key(1), 1, [0, 1]).ring
        assert right is not None
        terms = frame_pass(RingHeader(key=key(1), rank=1, weight=1.0))
        with grpc.insecure_channel(ring.workers[1].address) as channel:
            held = threading.Event()

            def messages() -> Iterator[bytes]:
                yield enter(1, right.expected_token)
                yield terms
                held.wait(30.0)

            call = pass_of(channel).future(messages())
            failed = ring.workers[1].outcome(key(1))
            held.set()
            call.cancel()

        assert isinstance(failed, ExchangeFailed)
        assert (failed.kind, failed.rank) == ("PROTOCOL", 0)
