"""What a worker that learns hears waits for its script, and gaps in it are told once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, encode
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import AveragedBlock, Operation, RoundAborted
from andon.protocol.records import Key
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ListeningLost
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.heard import HeardAverages, HeardExchange, room_for
from unit.andon_trainer.assigned_work import HEAD, KEY, NEXT, work

LAYOUT = Layout(
    (
        Block(BlockKind.OTHER, "b", (Component("w", (4,)),)),
        Block(BlockKind.OTHER, "c", (Component("v", (2,)),)),
    )
)
ATTENDED = replace(work(), attends=True, attended=True, rank=1, positions=())
STREAM = 3


def averaged(
    key: Key = KEY,
    *values: float,
    block: int = 0,
    sequence: int = 0,
    encoding: Encoding = Encoding.FLOAT32,
) -> AveragedBlock:
    return AveragedBlock(
        key=key,
        contributors=1 if values else 0,
        world_size=1,
        block=block,
        offset=0,
        count=len(values),
        total_weight=2.0 if values else 0.0,
        sequence=sequence,
        encoding=encoding,
        payload=encode(np.array(values, np.float32), encoding),
    )


class Ear:
    """An exchange whose streams are this test."""

    def __init__(
        self, room_bytes: int | None = None, shares: tuple[ReducerShare, ...] = ()
    ) -> None:
        self.inbox = Inbox()
        self.inbox.follow(STREAM)
        self.heard = HeardAverages(LAYOUT, self.inbox, stream=STREAM, room_bytes=room_bytes)
        self.exchange = HeardExchange(LAYOUT, Policy(), self.heard, shares, ReducerAccess())

    def hear(self, *messages: AveragedBlock) -> None:
        for message in messages:
            # As a lane does it: the payload lies where the next one will be read to.
            scratch = bytearray(message.payload)
            place = self.heard.place_of(message, len(scratch))
            if place is not None:
                place[:] = scratch
            seen = replace(message, payload=memoryview(scratch))
            self.heard.receive(seen, placed=place is not None)
            scratch[:] = bytes(len(scratch))

    def averages(self) -> list[list[float]]:
        return [each.tolist() for each in self.exchange.averages]


WHOLE = averaged(KEY, 1, 2, 3, 4), averaged(KEY, 5, 6, block=1)


@pytest.mark.parametrize("before", range(3))
def test_averages_are_the_same_whether_they_came_before_the_exchange_or_later(before: int) -> None:
    ear = Ear()
    ear.hear(*WHOLE[:before])
    ear.exchange.begin(ATTENDED, 0.0)
    ear.hear(*WHOLE[before:])

    assert ear.inbox.take(0) == AveragesComplete(KEY, 2.0, 1)
    assert ear.inbox.take(0) is None
    assert ear.averages() == [[1, 2, 3, 4], [5, 6]]


def test_averages_are_kept_encoded_and_by_the_number_of_their_exchange() -> None:
    ear = Ear()
    later = [replace(each, sequence=1) for each in WHOLE]
    ear.hear(*later, averaged(KEY, 7, 8, 9, 0, encoding=Encoding.BFLOAT16), WHOLE[1])

    ear.exchange.begin(ATTENDED, 0.0)
    first = ear.averages()
    assert isinstance(ear.inbox.take(0), AveragesComplete)
    ear.exchange.begin(ATTENDED, 0.0, Call(name="line.backward", sequence=1, blocks=range(2)))

    assert isinstance(ear.inbox.take(0), AveragesComplete)
    assert (first, ear.averages()) == ([[7, 8, 9, 0], [5, 6]], [[1, 2, 3, 4], [5, 6]])


def test_bytes_of_rank_0_and_exchanges_to_which_nobody_gives_are_heard_too() -> None:
    ear = Ear()
    data = np.zeros(6, np.uint8)
    told = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    sent = AveragedBlock(
        key=KEY,
        contributors=1,
        world_size=1,
        block=0,
        offset=0,
        count=6,
        total_weight=1.0,
        encoding=Encoding.UINT8,
        operation=Operation.BROADCAST,
        payload=told.data,
    )
    ear.hear(replace(sent, payload=memoryview(told.tobytes())), averaged(KEY, sequence=1))

    # The head tells whether rank 0 sends what this worker expects.
    data[:2] = told[:2]
    ear.exchange.begin(ATTENDED, 0.0, Call(name="buffers", data=data, head_bytes=2))
    assert ear.inbox.take(0) == AveragesComplete(KEY, 1.0, 1)
    ear.exchange.begin(ATTENDED, 0.0, Call(name="line.backward", sequence=1, blocks=range(2)))

    assert data.tolist() == told.tolist()
    assert ear.inbox.take(0) == AveragesComplete(KEY, 0.0, 1)
    assert ear.averages() == [[0] * 4, [0] * 2]


def test_with_several_reducers_all_of_their_parts_are_waited_for() -> None:
    shares = ReducerShare("a:1", 0, 4), ReducerShare("b:2", 4, 6)
    ear = Ear(shares=shares)
    ear.hear(averaged(KEY))
    ear.exchange.begin(ATTENDED, 0.0)

    assert ear.inbox.take(0) is None
    ear.hear(averaged(KEY))
    assert ear.inbox.take(0) == AveragesComplete(KEY, 0.0, 1)


def test_rounds_up_to_the_head_are_forgotten_and_make_room() -> None:
    ear = Ear(room_bytes=2 * (16 + 512))
    old = averaged(HEAD, 9, 9, 9, 9)
    ear.hear(old, WHOLE[0])
    ear.exchange.forget(HEAD)
    ear.hear(old, WHOLE[1])

    assert ear.inbox.take(0) is None
    ear.exchange.begin(ATTENDED, 0.0)
    assert isinstance(ear.inbox.take(0), AveragesComplete)


def test_averages_that_were_used_make_room() -> None:
    ear = Ear(room_bytes=2 * (16 + 512))
    for key in (KEY, NEXT):
        ear.hear(*(replace(each, key=key) for each in WHOLE))
        ear.exchange.begin(replace(ATTENDED, key=key), 0.0)
        assert isinstance(ear.inbox.take(0), AveragesComplete)


def test_more_than_may_wait_is_told_once() -> None:
    ear = Ear(room_bytes=16 + 512)
    ear.hear(*WHOLE, *WHOLE)

    event = ear.inbox.take(0)

    assert isinstance(event, ListeningLost)
    assert "too far behind" in event.message
    assert ear.inbox.take(0) is None


def test_a_lost_stream_and_a_corrupt_average_are_gaps_and_a_void_round_is_none() -> None:
    streams, corrupt, void = Ear(), Ear(), Ear()
    streams.heard.lost("the reducer at a:1: gone")
    corrupt.heard.refuse_corrupt(WHOLE[0])
    void.heard.receive(RoundAborted(key=KEY, message="a rank was lost"))

    assert streams.inbox.take(0) == ListeningLost(
        "this worker can't learn on (the reducer at a:1: gone)"
    )
    assert isinstance(corrupt.inbox.take(0), ListeningLost)
    assert void.inbox.take(0) is None


def test_averages_that_contradict_each_other_are_a_gap() -> None:
    ear = Ear()
    ear.hear(WHOLE[0], replace(WHOLE[1], total_weight=3.0))
    ear.exchange.begin(ATTENDED, 0.0)

    assert isinstance(ear.inbox.take(0), ListeningLost)


def test_what_an_older_stream_heard_concerns_nobody() -> None:
    ear = Ear()
    ear.inbox.follow(STREAM + 1)
    ear.heard.lost("gone")

    assert ear.inbox.take(0) is None


def test_exchanges_that_the_script_did_not_make_are_told_whenever_they_come() -> None:
    second = averaged(KEY, 1, 2, 3, 4, sequence=1)
    for late in (False, True):
        ear = Ear()
        ear.hear(*WHOLE, *(() if late else (second,)))
        ear.exchange.begin(ATTENDED, 0.0)
        assert isinstance(ear.inbox.take(0), AveragesComplete)
        ear.exchange.forget(KEY)
        ear.hear(*((second,) if late else ()))

        event = ear.inbox.take(0)

        assert isinstance(event, ListeningLost)
        assert "the others made more exchanges" in event.message


def test_exchanges_of_rounds_that_came_with_a_state_or_were_void_are_not_missed() -> None:
    ear = Ear()
    ear.hear(*(replace(each, key=HEAD, sequence=2) for each in WHOLE))
    ear.exchange.forget(HEAD)
    ear.exchange.begin(ATTENDED, 0.0)
    ear.exchange.end()
    ear.hear(*(replace(each, sequence=1) for each in WHOLE))
    ear.hear(*(replace(each, key=NEXT) for each in WHOLE))
    ear.exchange.begin(replace(ATTENDED, key=NEXT), 0.0)
    ear.exchange.forget(NEXT)
    ear.hear(*(replace(each, sequence=1) for each in WHOLE))

    assert isinstance(ear.inbox.take(0), AveragesComplete)
    assert ear.inbox.take(0) is None


def test_it_is_known_when_something_came_that_is_not_of_a_later_exchange() -> None:
    ear = Ear()
    seconds = iter(range(1, 9))
    ear.heard.clock = lambda: float(next(seconds))
    ear.exchange.begin(ATTENDED, 0.0)
    assert ear.exchange.heard_at == 1.0
    ear.hear(averaged(KEY, 1, 2, 3, 4, sequence=1), averaged(NEXT, 1, 2, 3, 4))
    assert ear.exchange.heard_at == 1.0
    ear.hear(WHOLE[0])

    assert ear.exchange.heard_at == 2.0


def test_what_comes_after_a_round_was_given_up_is_kept() -> None:
    ear = Ear()
    ear.exchange.begin(ATTENDED, 0.0)
    ear.exchange.end()
    ear.hear(*(replace(each, key=NEXT) for each in WHOLE))
    ear.exchange.begin(replace(ATTENDED, key=NEXT), 0.0)

    assert ear.inbox.take(0) == AveragesComplete(NEXT, 2.0, 1)


def test_nothing_is_given() -> None:
    ear = Ear()
    ear.exchange.begin(ATTENDED, 1.0)

    ear.exchange.submit(0, np.ones(4, np.float32))
    ear.exchange.submit_data()
    ear.exchange.abstain()

    assert (ear.exchange.first_sent, ear.exchange.refused) == (None, False)
    assert not ear.exchange.traffic.sent


@pytest.mark.parametrize(("available", "room"), [(2**33, 2**30), (2**23, 2**21), (None, 2**30)])
def test_there_is_room_for_a_gib_or_a_quarter_of_the_memory(
    available: int | None, room: int
) -> None:
    assert room_for(LAYOUT, available) == room


def test_there_is_room_for_a_large_model_many_times() -> None:
    large = Layout((Block(BlockKind.OTHER, "b", (Component("w", (2**26,)),)),))

    assert room_for(large, None) == 16 * 4 * 2**26
