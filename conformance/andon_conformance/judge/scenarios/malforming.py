"""Malforming: invalid messages, from the line and from the reducer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from andon.host.errors import UsageError
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Overdue
from andon_conformance.judge.line import ScriptedLine, send_answers
from andon_conformance.judge.rounds import ClientRound
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import ENDED, EXITED, Event

__all__ = ["malforming"]

_HERE = Path(__file__).parents[2] / "vectors"
"""In an installed package."""
_SOURCE = Path(__file__).parents[3]
"""In the source tree."""

_TERM = 7323331019669504007
_HEAD, _PRESENT, _NEXT = (Key(_TERM, number) for number in (8, 9, 10))
"""The keys that the vectors use for the head, the current round, and the round after it."""

_MAY_READ = {"ReduceResponse.bad.group"}
"""Generated code reads these as messages with an unknown field, so a worker may do so too."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One malformed message."""

    name: str
    data: bytes
    why: str
    """Why it must be refused."""

    def of(self, head: Key, key: Key) -> bytes:
        """Its bytes, with `head` and `key` in place of the head and round that it names.

        It then belongs to the current round, so that no client may ignore it as stale.
        """
        data, after = self.data, Key(key.term, key.round + 1)
        for old, new in ((_HEAD, head), (_PRESENT, key), (_NEXT, after)):
            data = data.replace(_encoded(old), _encoded(new))
        return data


def malformed(kind: str) -> list[Vector]:
    """The malformed messages of type `kind`, such as `TrainResponse`.

    Raises:
        UsageError: the vectors are not there, or are not what their index says.
    """
    folder = _HERE if _HERE.is_dir() else _SOURCE
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))["vectors"]
        return [
            _read(folder, entry)
            for entry in index
            if entry["type"] == f"andon.v1.{kind}"
            and entry["verdict"] == "refuse"
            and entry["name"] not in _MAY_READ
        ]
    except OSError as error:
        raise UsageError(
            f"the conformance vectors can't be read ({error}): reinstall andon-conformance, or "
            "run this in a checkout"
        ) from None


def _read(folder: Path, entry: dict[str, str]) -> Vector:
    data = (folder / entry["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise UsageError(
            f"{folder / entry['file']} does not match its index: reinstall andon-conformance"
        )
    return Vector(entry["name"], data, entry["why"])


def _encoded(key: Key) -> bytes:
    """A Key as bytes: two fields of fixed length."""
    return struct.pack("<BQBQ", 0x09, key.term, 0x11, key.round)


_UNKNOWN_ENCODING = 77
_UNREADABLE = b"\x12\x7f"
"""A field that claims 127 bytes and has none."""

_GIVEN_UP = (pb.FAULT_KIND_DATA_STREAM_LOST, pb.FAULT_KIND_PROTOCOL)
"""An average of a block that the model lacks could also belong to another exchange."""

Change = Callable[[reducer_pb2.AveragedBlock], None]


@scenario(
    "malformed",
    """
    malformed.opening   section 3  gives up the round if the answer to OpenRound is invalid
    malformed.limit     section 3  reports PROTOCOL if a reducer's payload limit is below a chunk
    malformed.payload   section 3  gives up the round if a payload's length does not match its count
    malformed.encoding  section 3  gives up the round if an average's encoding is unknown
    malformed.reduce    section 3  ends a Reduce stream on which an invalid message arrives, and
                                   sends Fault
    malformed.train     section 3  joins again, at its old head, after an invalid message on Train
    malformed.join      section 3  never works on a line whose JoinAccepted is invalid
    """,
)
async def malforming(bench: Bench) -> None:
    """Invalid averages, invalid messages of the coordinator, invalid answers to Join."""
    line = await bench.started()
    server = line.servers[0]
    server.opened = _UNREADABLE
    await _unopened(line, "malformed.opening", pb.FAULT_KIND_DATA_STREAM_LOST)
    server.opened = None
    before, server.max_payload_bytes = server.max_payload_bytes, 1
    await _unopened(line, "malformed.limit", pb.FAULT_KIND_PROTOCOL)
    server.max_payload_bytes = before
    await _averages(line, "malformed.payload", _shorter, _longer)
    await _averages(line, "malformed.encoding", _of_unknown_encoding)
    await _reduce(bench, line)
    await _train(bench, line)
    await _joins(bench)


# ---------------------------------------------------------------------- the reducer's


async def _unopened(line: ScriptedLine, name: str, kind: pb.FaultKind) -> None:
    """A round in which the reducer's first message makes it unusable."""
    await line.asks()
    current = line.assign()
    fault = await line.must(name, line.fault(current))
    line.judge(name, fault.kind == kind, pb.FaultKind.Name(fault.kind))
    line.void(current)


async def _averages(line: ScriptedLine, name: str, *changes: Change) -> None:
    """The first average is invalid; the true ones follow, and must not count any more."""
    rounds = []
    for change in changes:
        current = await line.begin()
        answers = line.answers(current)
        stream, first = answers[0]
        wrong = reducer_pb2.ReduceResponse()
        wrong.CopyFrom(first)
        change(wrong.averaged_block)
        # In one go: the client may not use what comes behind an invalid message.
        send_answers([(stream, wrong), *answers])
        lost = pb.FAULT_KIND_DATA_STREAM_LOST
        mistake = await line.must(name, _given_up(line, current, stream, lost))
        line.judge(name, not mistake, mistake or "it gave the round up")
        rounds.append(current)
    await line.asks()
    late = [each for each in rounds if line.readies(each)]
    line.judge(name, not late, f"{len(late)} StepReady came of rounds given up")


async def _reduce(bench: Bench, line: ScriptedLine) -> None:
    """Each malformed ReduceResponse, in a round of its own."""
    wrong = []
    for vector in malformed("ReduceResponse"):
        current = await line.begin()
        stream = current.given[0].stream
        stream.send(vector.of(current.parent, current.key))
        try:
            mistake = await _given_up(line, current, stream, *_GIVEN_UP)
        except Overdue as overdue:
            bench.verdicts.failed("malformed.reduce", _of(vector, str(overdue)))
            raise
        if mistake:
            wrong.append(_of(vector, mistake))
    line.judge("malformed.reduce", not wrong, "; ".join(wrong) or "it refused all")


async def _given_up(
    line: ScriptedLine, current: ClientRound, stream: ClientCall, *kinds: pb.FaultKind
) -> str:
    """Waits until the client gives up a round, as it must; then voids the round.

    Returns:
        What the client did wrong; empty if nothing.
    """
    event = await line.answer_to(current)
    mistake = ""
    if event.kind == ENDED:
        await line.gives_up(current)
        return mistake
    if event.kind == "step_ready":
        mistake = "StepReady came"
    elif event.message.kind not in kinds:
        mistake = f"{pb.FaultKind.Name(event.message.kind)} came, which is the wrong kind"
    # Who says that a stream is lost must also end it.
    elif event.message.kind == pb.FAULT_KIND_DATA_STREAM_LOST:
        await line.ends(stream)
    line.void(current)
    return mistake


def _shorter(average: reducer_pb2.AveragedBlock) -> None:
    average.payload = average.payload[:-1]


def _longer(average: reducer_pb2.AveragedBlock) -> None:
    average.payload += b"\0"


def _of_unknown_encoding(average: reducer_pb2.AveragedBlock) -> None:
    average.encoding = _UNKNOWN_ENCODING  # type: ignore[assignment]  # of a later version


# ---------------------------------------------------------------------- the coordinator's


async def _train(bench: Bench, line: ScriptedLine) -> None:
    """Sends each malformed TrainResponse, except answers to Join, while the client waits."""
    name, wrong = "malformed.train", []
    for vector in malformed("TrainResponse"):
        if _answers_join(vector):
            continue
        await line.asks()
        head = line.head
        assert head is not None
        # The client waits for work: no round can hide what it does.
        line.train.send(vector.of(head, line.new_key()))
        try:
            join = await line.joins()
        except Overdue as overdue:
            bench.verdicts.failed(name, _of(vector, str(overdue)))
            raise
        joined = key_in(join.head)
        if joined != head or join.HasField("halt"):
            wrong.append(_of(vector, f"it joined again with head {joined}, its head was {head}"))
            break
        line.accept(pb.JOIN_STATUS_IN_SYNC)
    line.judge(name, not wrong, "; ".join(wrong) or "it refused all, and its head stayed")


async def _joins(bench: Bench) -> None:
    """Sends each malformed JoinAccepted to a client of its own."""
    verdicts, name = bench.verdicts, "malformed.join"
    vectors = list(filter(_answers_join, malformed("TrainResponse")))
    answered = asyncio.gather(*(_answered(bench, vector) for vector in vectors))
    mistake = "; ".join(filter(None, await verdicts.must(name, answered)))
    verdicts.judge(name, not mistake, mistake or "it refused all")


async def _answered(bench: Bench, vector: Vector) -> str:
    """What a client does wrong after such an answer to Join; empty if nothing."""
    line = await bench.start()
    await line.joins()
    since = line.transcript.now
    line.train.send(pb.TrainResponse(join_accepted=_welcome(line, vector)))

    def is_over(event: Event) -> bool:
        return event.kind == EXITED or line.train_ends(event)

    try:
        event = await line.transcript.wait("the end of the stream", is_over, since)
    except Overdue as overdue:
        return _of(vector, str(overdue))
    asked = line.transcript.find(lambda event: event.kind == "request_work", since)
    if asked or (event.kind == EXITED and not event.message):
        return _of(vector, f"{len(asked)} RequestWork came, then {event.kind}")
    return ""


def _welcome(line: ScriptedLine, vector: Vector) -> pb.JoinAccepted:
    """A valid answer for the client, except for the vector's policy or join status."""
    wrong = pb.TrainResponse.FromString(vector.data).join_accepted
    welcome = line.welcome(pb.JOIN_STATUS_FRESH)
    welcome.policy.CopyFrom(wrong.policy)
    if wrong.join_status not in pb.JoinStatus.values():
        welcome.join_status = wrong.join_status
    return welcome


def _answers_join(vector: Vector) -> bool:
    try:
        return pb.TrainResponse.FromString(vector.data).HasField("join_accepted")
    except DecodeError:
        return False


def _of(vector: Vector, mistake: str) -> str:
    return f"{vector.name} ({vector.why}): {mistake}"
