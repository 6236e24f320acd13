"""A line that is a ring: who is told what of its neighbours."""

from __future__ import annotations

from andon.protocol import tokens
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Liveness, Policy
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core import effects as do
from andon_coordinator.transport.outgoing import JoinAnswers
from scenarios import line_values

SECRET, RUN, KEY = b"secret", "7f3a", Key(7 << 32, 9)


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
