"""A head, the keys after it, a halt, an assignment and its record, for the worker's core."""

from __future__ import annotations

from typing import Any

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.events import Assigned, AveragesComplete, Committed

HEAD, KEY, NEXT = Key(7, 1), Key(7, 2), Key(7, 3)
HALT = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=4)


def work(key: Key = KEY, parent: Key | None = HEAD) -> Assigned:
    batch = PositionRange(12, 16)
    return Assigned(
        key=key,
        parent=parent,
        roster=(0,),
        rank=0,
        step=4,
        attempt=0,
        epoch=0,
        positions=(batch,),
        batch=batch,
    )


def committed(
    key: Key = KEY, parent: Key | None = HEAD, kind: str = "STEP", **more: Any
) -> Committed:
    """The record of the step of `work`, or of another kind."""
    record = Record(key, parent, RecordKind[kind], 4, Cursor(0, 16), (0,))
    return Committed(record=record, **more)


def wait_for(conversation: Conversation, wait: Wait) -> list[Any]:
    """The effects of a wait, until there are none, or it is over."""
    conversation.wait_for(wait)
    done: list[Any] = []
    while not conversation.over and (effects := conversation.poll()):
        done += effects
    return done


def average(conversation: Conversation, key: Key = KEY) -> None:
    """The script's part of a round, until it has the averages."""
    assert conversation.begin()
    conversation.receive(AveragesComplete(key, 2.0, 1))
    assert wait_for(conversation, Wait.AVERAGES) == []
    assert conversation.take_averages() is not None
