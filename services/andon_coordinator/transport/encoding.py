"""Encoding: the bytes of what the core sends to workers; what is the same for all is encoded once.

Theory of operation. A commit goes to every worker as it is, and an assignment differs between
workers in a few numbers beside a roster, targets and a map of reducers that are as long as the line
is. Encoded for each worker, a step would cost the square of the roster. So the encoder keeps the
bytes of the last message that went to everybody, and the common part of the last assignment.

The parts of an assignment are joined as bytes: protobuf reads a message that was written in two
parts like one whose fields were merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, get_args

from google.protobuf.message import Message

from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.wire.round_terms import terms_to_proto
from andon_coordinator.core import effects
from andon_coordinator.transport.outgoing import (
    CommitAndAssign,
    JoinAnswers,
    MessageEffect,
    message_to,
)

__all__ = ["Encoder", "serialized"]

_TO_ALL = (
    effects.SendCommitted
    | effects.SendVoided
    | effects.SendHalt
    | effects.SendResume
    | effects.SendShutdown
    | effects.SendScalarAllReduceResult
)
"""Effects that one event often has for every worker, alike but for the stream."""

_LENGTH_DELIMITED = 2
"""The wire type of an embedded message."""


class Encoder:
    """Makes the messages of effects; it keeps the last one that went to several workers."""

    def __init__(self, answers: JoinAnswers) -> None:
        """`answers` makes assignments."""
        self._answers = answers
        self._last: tuple[type[MessageEffect], Any, bytes] | None = None
        """Of what went to all: its kind, its content, and its bytes."""
        self._commit: tuple[Any, bytes] | None = None
        self._shared: tuple[Key, bytes] | None = None

    def encoded(self, effect: MessageEffect) -> bytes:
        """The bytes of a TrainResponse."""
        if isinstance(effect, CommitAndAssign):
            return self._both(effect)
        if isinstance(effect, effects.Assign):
            return _embedded(_SHARD_ASSIGNMENT, self._assignment(effect))
        kind = type(effect)
        content_of = _CONTENT.get(kind)
        if content_of is None:
            return message_to(effect).SerializeToString()
        content = content_of(effect)
        if self._last is None or self._last[:2] != (kind, content):
            self._last = kind, content, message_to(effect).SerializeToString()
        return self._last[2]

    def _both(self, effect: CommitAndAssign) -> bytes:
        """A record and what follows it; the record's part is the same for all."""
        content = _CONTENT[effects.SendCommitted](effect.committed)
        if self._commit is None or self._commit[0] != content:
            body = message_to(effect.committed).step_committed.SerializeToString()
            self._commit = content, body
        work = _embedded(_ASSIGNMENT, self._assignment(effect.assign))
        return _embedded(_STEP_COMMITTED, self._commit[1] + work)

    def _assignment(self, effect: effects.Assign) -> bytes:
        """The bytes of a ShardAssignment."""
        work = effect.assignment
        # A round's key is never used for another one, and its assignments have one common part.
        if self._shared is None or self._shared[0] != work.key:
            self._shared = work.key, terms_to_proto(work).SerializeToString()
        own = self._answers.own_assignment(work).SerializeToString()
        return self._shared[1] + own


def serialized(message: Message | bytes) -> bytes:
    """The bytes of a message that may be encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


_CONTENT: dict[type[Any], Callable[[Any], Any]] = {
    kind: attrgetter(*(field.name for field in fields(kind) if field.name != "stream"))
    for kind in get_args(_TO_ALL)
}
"""What each kind says, whatever stream it goes to."""


def _embedded(tag: bytes, body: bytes) -> bytes:
    """The bytes of a message of one field, which is a message with the bytes `body`."""
    return tag + _varint(len(body)) + body


def _tag(kind: type[Message], field: str) -> bytes:
    return _varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def _varint(number: int) -> bytes:
    if number <= 0x7F:
        return _ONE_BYTE[number]
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_ONE_BYTE = [bytes([number]) for number in range(0x80)]
_SHARD_ASSIGNMENT = _tag(pb.TrainResponse, "shard_assignment")
_STEP_COMMITTED = _tag(pb.TrainResponse, "step_committed")
_ASSIGNMENT = _tag(pb.StepCommitted, "assignment")
