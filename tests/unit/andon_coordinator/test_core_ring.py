"""A line that is a ring: who is told what of its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol import tokens
from andon.protocol.halts import HaltReason
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Liveness, Policy, RunPlan, Topology
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import event_from
from andon_coordinator.transport.outgoing import JoinAnswers
from scenarios import line_values
from scenarios.line_bench import Bench

SECRET, RUN, KEY = b"secret", "7f3a", Key(7 << 32, 9)


def bootstrapped() -> tuple[Bench, int]:
    """A ring of one worker, in sync at step 0, and its stream."""
    settings = LineSettings(run_id=RUN, policy=Policy(topology=Topology.RING))
    bench = Bench(settings, RunPlan(global_batch=4, dataset_size=64))
    stream = bench.join("w0", bench.request(0, 0))[0]
    bench.send(on.RecordSaved(bench.journal.save_record()))
    return bench, stream


def test_an_assignment_of_a_ring_says_where_each_rank_listens() -> None:
    bench, stream = bootstrapped()

    effects = bench.send(
        on.WorkRequested(stream, bench.peers[stream].head, ring_address="10.0.0.1:5")
    )

    (assign,) = [each for each in effects if isinstance(each, do.Assign)]
    assert assign.assignment.ring_addresses == ("10.0.0.1:5",)


def test_a_worker_without_a_ring_address_halts_a_ring() -> None:
    bench, stream = bootstrapped()

    effects = bench.send(on.WorkRequested(stream, bench.peers[stream].head))

    (halt,) = [each for each in effects if isinstance(each, do.SendHalt)]
    assert halt.evidence.reason is HaltReason.PROTOCOL_VIOLATION
    assert halt.evidence.worker == 0


def test_a_standing_request_without_a_ring_address_halts_a_ring() -> None:
    bench, stream = bootstrapped()
    bench.send(on.WorkRequested(stream, bench.peers[stream].head, ring_address="10.0.0.1:5"))
    ready = replace(bench.ready(stream), next=on.StandingRequest())

    effects = bench.send(on.WorkerReady(stream, ready))

    (halt,) = [each for each in effects if isinstance(each, do.SendHalt)]
    assert halt.evidence.reason is HaltReason.PROTOCOL_VIOLATION
    assert halt.evidence.worker == 0


def assignment(rank: int, roster: tuple[int, ...], addresses: tuple[str, ...]) -> pb.TrainResponse:
    answers = JoinAnswers(run_id=RUN, secret=SECRET, policy=Policy(), liveness=Liveness())
    work = line_values.assignment(
        key=KEY,
        roster=roster,
        rank=rank,
        positions=(PositionRange(0, 1),),
        batch=PositionRange(0, 3),
        ring_addresses=addresses,
    )
    return answers.assignment(do.Assign(1, work))


def test_only_the_two_neighbours_get_the_token_of_their_link() -> None:
    roster, addresses = (4, 2, 7), ("a:1", "b:2", "c:3")

    told = [assignment(rank, roster, addresses).shard_assignment.ring for rank in range(3)]

    assert [each.successor_address for each in told] == ["b:2", "c:3", "a:1"]
    for rank in range(3):
        after = (rank + 1) % 3
        expected = tokens.link_token(SECRET, RUN, KEY, roster[rank], roster[after])
        assert told[rank].successor_token == told[after].predecessor_token == expected
    assert len({each.successor_token for each in told}) == 3


def test_a_star_and_a_ring_of_one_have_no_neighbours() -> None:
    assert not assignment(0, (0, 1), ()).shard_assignment.HasField("ring")
    assert not assignment(0, (0,), ("a:1",)).shard_assignment.HasField("ring")


def test_a_malformed_ring_address_is_refused() -> None:
    message = pb.TrainRequest(request_work=pb.RequestWork(ring_address="unix:/tmp/socket"))

    with pytest.raises(LineError, match="ring_address must be"):
        event_from(5, message)
