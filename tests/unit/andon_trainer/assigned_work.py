"""A head, the keys after it, a halt, and the assignment that tests of the worker's core use."""

from __future__ import annotations

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key, PositionRange
from andon_trainer.core.events import Assigned

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
