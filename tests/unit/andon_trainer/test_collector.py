"""What comes back of a round lies in its place, and is told of when it is whole."""

from __future__ import annotations

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, encode
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import AveragedBlock, CorruptChunk, RoundAborted
from andon.protocol.records import Key
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.collector import Collector, OpenCall
from andon_trainer.exchange.path import Inbox

LAYOUT = Layout((Block(BlockKind.OTHER, "b", (Component("w", (4,)),)),))
KEY = Key(1, 1)


def averaged(
    offset: int, *values: float, encoding: Encoding = Encoding.FLOAT32, total: float = 2.0
) -> AveragedBlock:
    return AveragedBlock(
        key=KEY,
        contributors=2 if values else 0,
        world_size=2,
        block=0,
        offset=offset,
        count=len(values),
        total_weight=total,
        encoding=encoding,
        payload=encode(np.array(values, np.float32), encoding),
    )


def collecting() -> tuple[Collector, Inbox]:
    inbox = Inbox()
    collector = Collector(LAYOUT, inbox)
    call = Call(name="line.backward", blocks=range(1))
    collector.begin(OpenCall(KEY, 0, 2, 1.0, call, missing=4))
    return collector, inbox


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16])
def test_averages_lie_in_their_places_whatever_came_first(encoding: Encoding) -> None:
    collector, inbox = collecting()

    collector.receive(averaged(2, 3.0, 4.0, encoding=encoding))
    assert inbox.take(0) is None
    collector.receive(averaged(0, 1.0, 2.0, encoding=encoding))

    assert collector.averages[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert inbox.take(0) == AveragesComplete(KEY, 2.0, 2)
    assert inbox.take(0) is None


def test_zeros_stand_for_everything_if_all_abstained() -> None:
    collector, inbox = collecting()
    collector.averages[0].fill(7.0)

    collector.receive(averaged(0, total=0.0))

    assert collector.averages[0].tolist() == [0.0] * 4
    assert inbox.take(0) == AveragesComplete(KEY, 0.0, 2)


def test_averages_that_disagree_on_the_weight_are_an_error() -> None:
    collector, inbox = collecting()
    collector.receive(averaged(0, 1.0, 2.0))

    with pytest.raises(FrameError, match="disagree"):
        collector.receive(averaged(2, 3.0, 4.0, total=3.0))

    assert inbox.take(0) is None


def test_a_chunk_that_was_changed_on_its_way_is_passed_on_with_whose_it_was() -> None:
    collector, inbox = collecting()

    collector.receive(RoundAborted(KEY, "changed", CorruptChunk(rank=1, block=0, element=2)))
    collector.refuse_corrupt(averaged(2, 3.0, 4.0))

    up, down = inbox.take(0), inbox.take(0)
    assert isinstance(up, ExchangeFailed)
    assert isinstance(down, ExchangeFailed)
    assert (up.kind, up.rank, up.block, up.element) == ("CORRUPT_CHUNK", 1, 0, 2)
    assert (down.kind, down.rank, down.block, down.element) == ("CORRUPT_CHUNK", 0, 0, 2)
    assert not collector.averages[0].any(), "nothing of it is kept"
