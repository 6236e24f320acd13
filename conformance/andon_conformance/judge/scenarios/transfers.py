"""Transfers: the client sends its state to a newcomer, or installs another worker's."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire.conversion import cursor_from_proto
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import short
from andon_conformance.judge.server import GET, PUT
from andon_conformance.judge.states import StateSource, give_state, pieces, whole_state
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import Event

__all__ = ["bootstrapping", "receiving"]


@scenario(
    "bootstrap",
    """
    bootstrap.other      rule 11     takes no head from an INITIAL record of another worker
    bootstrap.head       rule 11     is at the key of the INITIAL record that names it
    bootstrap.ticket     section 11  sends run, id, session token, transfer and head in PutState
    bootstrap.patience   section 11  sends no byte of its state before the reducer's answer
    bootstrap.state      section 11  sends its state's length and SHA-256, and exactly that state
    bootstrap.pieces     section 12  sends pieces of at most 1 MiB
    bootstrap.report     section 11  reports the transfer and its head, and no failure
    bootstrap.offset     section 11  begins at the byte that the answer names
    bootstrap.cancel     rule 10     cancels PutState when its Train stream ends
    bootstrap.elsewhere  rule 10     reports a failure if it is not at the transfer's head
    """,
)
async def bootstrapping(bench: Bench) -> None:
    """The client bootstraps the line, and sends its state to a newcomer."""
    line = await bench.start(LineSetting(slot=0))
    await _bootstrap_another(line)
    line.accept(pb.JOIN_STATUS_FRESH)
    line.send_initial_record()
    work = await line.must("bootstrap.head", line.asks())
    bench.verdicts.passed("bootstrap.head", f"RequestWork is from {key_in(work.head)}")

    state, sha256 = await _send_whole(line)
    await _send_rest(line, state, sha256)

    elsewhere = Key(line.term, line.new_key().round)
    since = line.transfer(3, pb.TRANSFER_ROLE_SEND, elsewhere)
    report = await line.must("bootstrap.elsewhere", line.reports(3, since))
    line.judge("bootstrap.elsewhere", report.failure, _report(report))

    since = line.transfer(4, pb.TRANSFER_ROLE_SEND)
    first = await line.state_call(PUT, since)
    # The transfer is under way, and its answer never comes.
    line.end_train()
    await _judge_cancelled(bench, line, "bootstrap.cancel", first.stream)


def _report(report: pb.StateReport) -> str:
    return f"it reports {report.failure or 'success'!r}"


async def _judge_cancelled(bench: Bench, line: ScriptedLine, name: str, stream: ClientCall) -> None:
    await line.must(name, line.ends(stream))
    bench.verdicts.passed(name, "its call ended with its Train stream")


def _is_ticket(line: ScriptedLine, ticket: Any) -> bool:
    """Whether the first message of the first transfer's call says whose and which it is."""
    said = (ticket.run_id, ticket.worker, ticket.session_token, ticket.transfer_id)
    mine = (line.run_id, line.setting.slot, line.session_token, 1)
    return said == mine and key_in(ticket.head) == line.head


def _shown(ticket: Any) -> str:
    text = f"run {ticket.run_id!r}, worker {ticket.worker}, transfer {ticket.transfer_id}"
    return f"{text}, head {key_in(ticket.head)}"


async def _bootstrap_another(line: ScriptedLine) -> None:
    """The line is bootstrapped with another worker's weights."""
    name = "bootstrap.other"
    await line.joins()
    line.accept(pb.JOIN_STATUS_FRESH)
    since = line.transcript.now
    # The record names another worker, whose weights the client does not have.
    line.tell_record(line.initial_record_of(line.peer))
    line.head = None
    head = key_in((await line.must(name, line.joins())).head)
    asked = line.transcript.find(lambda event: event.kind == "request_work", since)
    evidence = f"it joined again with head {head}, and {len(asked)} RequestWork came"
    line.judge(name, head is None and not asked, evidence)


async def _send_whole(line: ScriptedLine) -> tuple[bytes, bytes]:
    """The first transfer, from the first byte on: the state and its SHA-256."""
    since = line.transfer(1, pb.TRANSFER_ROLE_SEND)
    first = await line.must("bootstrap.ticket", line.state_call(PUT, since))
    ticket, stream = first.message, first.stream
    right = _is_ticket(line, ticket) and len(ticket.sha256) == 32
    line.judge("bootstrap.ticket", right, _shown(ticket))

    # The reducer's answer names the first byte to send: whatever comes before it is a mistake.
    await line.transcript.pause()
    early = sum(map(_length, _pieces(line, stream)))
    line.judge("bootstrap.patience", not early, f"{early} bytes came before the answer")

    stream.send(reducer_pb2.PutStateResponse(offset=0))
    state = await line.must("bootstrap.state", whole_state(line, stream, ticket.size_bytes))
    right = (len(state), hashlib.sha256(state).digest()) == (ticket.size_bytes, ticket.sha256)
    line.judge("bootstrap.state", right, f"{len(state)} of {ticket.size_bytes} bytes came")
    longest = max(map(_length, _pieces(line, stream)), default=0)
    line.judge("bootstrap.pieces", longest <= STATE_PIECE_BYTES, f"the longest has {longest} bytes")
    stream.end()

    report = await line.must("bootstrap.report", line.reports(1, since))
    head = key_in(report.head)
    right = head == line.head and not report.failure
    line.judge("bootstrap.report", right, f"head {head}, failure {report.failure!r}")
    return state, ticket.sha256


async def _send_rest(line: ScriptedLine, state: bytes, sha256: bytes) -> None:
    """The second transfer, whose receiver already has the first half."""
    name, half = "bootstrap.offset", len(state) // 2
    since = line.transfer(2, pb.TRANSFER_ROLE_SEND)
    first = await line.state_call(PUT, since)
    first.stream.send(reducer_pb2.PutStateResponse(offset=half))
    size = first.message.size_bytes - half
    rest = await line.must(name, whole_state(line, first.stream, size))
    first.stream.end()
    await line.must(name, line.reports(2, since))
    # The client may serialise the same state to other bytes the second time. Then only the length
    # can be compared.
    right = len(rest) == size
    if first.message.sha256 == sha256:
        right = rest == state[half:]
    line.judge(name, right, f"asked for byte {half} on, it sent {len(rest)} bytes")


def _pieces(line: ScriptedLine, stream: ClientCall) -> list[Event]:
    return line.transcript.find(lambda event: event.kind == "put_state" and event.stream is stream)


def _length(piece: Event) -> int:
    return len(piece.message.payload)


@scenario(
    "receive",
    """
    receive.ticket     section 11  sends run, id, session token, transfer and head in GetState
    receive.corrupt    rule 10     reports a failure if the state's SHA-256 does not match
    receive.resume     section 11  keeps what came before the stream broke, and asks for the rest
                                   with its SHA-256
    receive.cancel     rule 10     cancels GetState when its Train stream ends
    receive.report     rule 10     reports the transfer's head once the state is installed
    receive.digest     rule 17     then has the weights that were sent, as its digest shows
    receive.cursor     rule 8      then reports the transfer's head, cursor and step when it joins
    receive.untouched  rule 10     installs nothing of a state whose SHA-256 does not match
    """,
)
async def receiving(bench: Bench) -> None:
    """The client gets another client's state, after a corrupt one and two broken streams."""
    origin = await bench.origin()
    line = await bench.start_behind(origin)
    await _corrupt(line, origin)
    await _cut(line, origin)
    await _lose(bench, line)
    await _resume(bench, line, origin)
    digest = await line.must("receive.digest", _digest(line))
    evidence = f"digest {short(digest)}, sent was {short(origin.digest)}"
    line.judge("receive.digest", digest == origin.digest, evidence)
    await _corrupt_later(line, origin, digest)


async def _asked(line: ScriptedLine, number: int) -> tuple[Event, int]:
    """The client's GetState of a transfer, and the place in the transcript where that began."""
    since = line.transfer(number, pb.TRANSFER_ROLE_RECEIVE)
    return await line.state_call(GET, since), since


async def _corrupt(line: ScriptedLine, origin: StateSource) -> None:
    asked, since = await line.must("receive.ticket", _asked(line, 1))
    line.judge("receive.ticket", _is_ticket(line, asked.message), _shown(asked.message))
    give_state(asked.stream, origin, data=_flipped(origin.state))
    report = await line.must("receive.corrupt", line.reports(1, since))
    right = bool(report.failure) and key_in(report.head) is None
    if not line.judge("receive.corrupt", right, _report(report)):
        raise Stopped("the client installs a state that it can't trust")


async def _cut(line: ScriptedLine, origin: StateSource) -> None:
    """Only the beginning comes."""
    asked, since = await _asked(line, 2)
    size = len(origin.state)
    asked.stream.send(reducer_pb2.GetStateResponse(size_bytes=size, sha256=origin.sha256))
    asked.stream.send_all(pieces(origin.state[: _half(origin)]))
    asked.stream.end(grpc.StatusCode.ABORTED, "the other end is gone")
    await line.reports(2, since)


async def _lose(bench: Bench, line: ScriptedLine) -> None:
    """The coordinator goes away while the client waits for a state; later it is BEHIND again."""
    asked, _ = await _asked(line, 3)
    line.end_train()
    await _judge_cancelled(bench, line, "receive.cancel", asked.stream)
    await line.joins()
    line.accept(pb.JOIN_STATUS_BEHIND)


async def _resume(bench: Bench, line: ScriptedLine, origin: StateSource) -> None:
    half = _half(origin)
    asked, since = await _asked(line, 4)
    offset, sha256 = asked.message.offset, asked.message.sha256
    if not offset:
        bench.verdicts.skip("receive.resume", "it asks for the whole state again, which it may")
    else:
        right = offset <= half and sha256 == origin.sha256
        evidence = f"{half} bytes came, it asks from byte {offset} on"
        if not line.judge("receive.resume", right, evidence):
            offset = 0
    give_state(asked.stream, origin, offset=offset)
    report = await line.must("receive.report", line.reports(4, since))
    right = not report.failure and key_in(report.head) == origin.head
    line.judge("receive.report", right, _report(report))


async def _corrupt_later(line: ScriptedLine, origin: StateSource, digest: bytes) -> None:
    """The client has a head, is BEHIND, and receives a state that it must not install."""
    name, head = "receive.untouched", line.head
    join = await line.joins_again()
    said = (key_in(join.head), cursor_from_proto(join.cursor), join.step)
    right = said == (origin.head, origin.cursor, origin.step)
    evidence = f"head {said[0]}, {said[1]}, step {join.step}; the transfer said {origin.cursor}"
    line.judge("receive.cursor", right, evidence)
    # The line went on without the client.
    line.head = line.new_key()
    line.accept(pb.JOIN_STATUS_BEHIND)
    asked, since = await _asked(line, 5)
    give_state(asked.stream, origin, data=_flipped(origin.state))
    await line.reports(5, since)
    joined = key_in((await line.joins_again()).head)
    if not line.judge(name, joined == head, f"it joins again with head {joined}"):
        return
    line.head = head
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    now = await line.must(name, _digest(line))
    line.judge(name, now == digest, "its head and its weights are as before")


async def _digest(line: ScriptedLine) -> bytes:
    """The digest of the client's weights, taken in a round that is voided afterwards."""
    ready, current = await line.averaged()
    line.void(current)
    sha256: bytes = ready.digest.sha256
    return sha256


def _half(origin: StateSource) -> int:
    return len(origin.state) // 2


def _flipped(state: bytes) -> bytes:
    """The state with one bit changed in each of its last bytes."""
    return state[:-16] + bytes(byte ^ 1 for byte in state[-16:])
