"""A round's terms on the wire: each field arrives, and what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from andon.protocol.attestations import NodeOwner
from andon.protocol.grains import Node
from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import ReducerShare
from andon.protocol.rounds import RankTerms
from andon.protocol.shards import Split
from andon.v1.coordinator_pb2 import ShardAssignment
from andon.wire.conversion import WireError
from andon.wire.round_terms import own_terms_to_proto, terms_from_proto, terms_to_proto

TERMS = RankTerms(
    key=Key(7, 3),
    parent=Key(7, 2),
    step=5,
    attempt=1,
    epoch=2,
    batch=PositionRange(8, 16),
    roster=(4, 6),
    reducers=(ReducerShare("beta:7071", 0, 6),),
    checkpoint_step=4,
    split=Split((3, 1), interleaved=True),
    window=8,
    ahead_batch=PositionRange(16, 24),
    learning_rate_scale=1.5,
    change_scale=0.75,
    fragment=1,
    copies_buffers=True,
    wants_digest=True,
    attended=True,
    rank=1,
    positions=(PositionRange(8, 9), PositionRange(12, 14)),
    micro_batches=2,
    ahead=(PositionRange(16, 18),),
    ahead_micro_batches=3,
    writes_checkpoint=True,
    attends=True,
    attests=True,
    verifies=(1, 3),
    anew=True,
    itemised=True,
    sums=(
        NodeOwner(node=Node(0, 2), rank=1, relayed=True),
        NodeOwner(node=Node(2, 3), rank=0, relayed=False),
    ),
)


def message_of(terms: RankTerms) -> ShardAssignment:
    message = terms_to_proto(terms)
    message.MergeFrom(own_terms_to_proto(terms))
    return message


def test_every_term_arrives() -> None:
    at_default = [each.name for each in fields(TERMS) if getattr(TERMS, each.name) == each.default]

    assert not at_default, "give these another value, or the next line proves nothing of them"
    assert terms_from_proto(message_of(TERMS), RankTerms) == TERMS


def test_terms_with_their_defaults_arrive() -> None:
    required = {
        each.name: getattr(TERMS, each.name) for each in fields(TERMS) if each.default is MISSING
    }
    least = RankTerms(**required)

    assert terms_from_proto(message_of(least), RankTerms) == least


def test_rank_0_writes_the_checkpoint_if_nobody_says_who_does() -> None:
    messages = [message_of(TERMS) for _ in range(2)]
    for rank, message in enumerate(messages):
        message.rank = rank
        message.ClearField("writes_checkpoint")

    assert [terms_from_proto(each, RankTerms).writes_checkpoint for each in messages] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 3),
        ("targets", [1, 2, 3]),
        ("learning_rate_scale", -1.0),
        ("learning_rate_scale", float("inf")),
        ("learning_rate_scale", float("nan")),
        ("key", None),
        ("batch", {"start": 2, "stop": 1}),
        ("verifies", [3, 3]),
    ],
)
def test_terms_that_contradict_themselves_are_refused_by_name(name: str, value: object) -> None:
    message = message_of(TERMS)
    message.ClearField(name)
    message.MergeFrom(ShardAssignment(**{name: value}))  # type: ignore[arg-type]  # As above.

    with pytest.raises(WireError, match=r"ShardAssignment|Key|PositionRange"):
        terms_from_proto(message, RankTerms)
