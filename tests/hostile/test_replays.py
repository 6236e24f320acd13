"""Whole sessions, recorded on their way and played again, as they were and changed.

The bytes are those of the connections: HTTP/2 with all its streams, and lanes with their proofs. On
a line without TLS whoever reads the network has them. Each is played to the end while the line goes
on, and then the judge trains again: no weight may have moved by what was played.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from andon_trainer.core.events import AveragesComplete
from chaos.judge import judge
from chaos.lane_relay import LaneRelay, Recorded
from chaos.rig import await_until, chaos_line, free_port
from hostile.rig import MIB, PACE_S
from integration.andon_trainer.ring_workers import RingLine
from integration.andon_trainer.test_ring import LAYOUT, POLICY, SIZES, key, random_blocks
from integration.strangers import TRAIN, resident_bytes
from unit.andon_trainer.ring_bench import expected_means

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CHANGES = int(os.environ.get("ANDON_REPLAYS", "3"))
"""How many times each recorded connection is played with changes; `make soak` raises it."""
SEED = int(os.environ.get("ANDON_REPLAY_SEED", "27"))
HEARD_S = 0.1
"""How long a player listens after the last byte, so that what it said is read."""
GROWN_BYTES = 256 * MIB
JOINED = "worker_joined worker=1"


def plays(
    records: list[Recorded], chance: random.Random, changes: int = CHANGES
) -> Iterator[Recorded]:
    """Each connection as it was, and then with bits changed, cut short, and with a part twice."""
    for record in records:
        yield record
        for number in range(changes):
            data = bytearray(record.data)
            at = chance.randrange(len(data))
            if number % 3 == 0:
                for _ in range(chance.randint(1, 8)):
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            elif number % 3 == 1:
                del data[at:]
            else:
                data[at:at] = data[at : at + chance.randint(1, 4096)]
            yield Recorded(record.direction, data)


def play(host: str, port: int, data: bytes, heard: Callable[[], bool] = lambda: True) -> None:
    """Says it all on a connection, and listens for a moment, and until it was `heard`."""
    with closing(socket.create_connection((host, port), timeout=30)) as player:
        with suppress(OSError):  # Hung up on, before the end or after it.
            player.sendall(data)
            player.settimeout(HEARD_S)
            while player.recv(2**16):
                pass
        await_until("what was played to be heard", heard, patience_s=20.0)


def test_f_dp_001_sessions_that_are_played_again_move_no_weight(tmp_path: Path) -> None:
    tcp_port = free_port()
    flags = ("--tcp-port", str(tcp_port))
    with (
        chaos_line(tmp_path, 2, *flags, absent=1, paths=("tcp",), pace_s=PACE_S) as line,
        LaneRelay(line.service.address, tcp_port) as relay,
    ):

        def joined() -> int:
            return (line.folder / "run" / "service.log").read_text().count(JOINED)

        def has_joined(times: int) -> bool:
            return joined() >= times

        line.start_worker(1, address=relay.address)
        line.await_progress(steps=4)
        host, _, grpc_port = line.service.address.rpartition(":")
        recorded = [Recorded(each.direction, bytearray(each.data)) for each in relay.records]
        assert {each.direction for each in recorded} == {0, 1, 2}
        joins = [each for each in recorded if TRAIN.encode() in each.data]
        before = resident_bytes(line.service.process.pid)

        for each in plays(recorded, random.Random(SEED)):
            port = tcp_port if each.direction else int(grpc_port)
            # A Join as it was is taken, however busy the service is.
            heard = partial(has_joined, joined() + (each in joins))
            play(host, port, bytes(each.data), heard)
            # One after the other: who plays a worker's Join takes its place for a moment.
            line.await_progress()

        assert resident_bytes(line.service.process.pid, most=True) - before < GROWN_BYTES
        line.finish()

    judge(line)
    # The first word of a session, its Join, was taken: what followed was heard, too.
    assert joined() > 1


def test_a_ring_link_that_is_played_again_changes_no_mean() -> None:
    chance = random.Random(SEED)
    with RingLine(LAYOUT, POLICY, 2) as ring:
        second = ring.workers[1]
        listener, port = second.exchange.listener, int(second.address.rpartition(":")[2])
        assert listener is not None
        assert listener.lanes is not None
        blocks = random_blocks(2, SIZES)
        means = [each.tobytes() for each in expected_means(blocks, [1.0, 1.0], POLICY)]

        def exchange(number: int, played: Recorded | None = None) -> None:
            """A round, into whose middle a recording may be played."""
            ring.give(key(number), 0, [0, 1], blocks[0], 1.0)
            ring.begin(key(number), 1, [0, 1])
            if played is not None:
                lane_port = listener.lanes.port if listener.lanes is not None else 0
                play("127.0.0.1", lane_port if played.direction else port, bytes(played.data))
            for block, flat in enumerate(blocks[1]):
                second.exchange.submit(block, flat)
            for worker in ring.workers:
                told = worker.outcome(key(number))
                assert isinstance(told, AveragesComplete), told
                assert [each.tobytes() for each in worker.exchange.averages] == means

        with LaneRelay(second.address, listener.lanes.port) as relay:
            second.address = relay.address
            for number in range(1, 4):
                exchange(number)
            recorded = [Recorded(each.direction, bytearray(each.data)) for each in relay.records]
            assert {each.direction for each in recorded} == {0, 1}
            for number, each in enumerate(plays(recorded, chance), start=4):
                exchange(number, each)
