"""Bootstrapping: the client's weights become the line's, and it sends them to a newcomer."""

from __future__ import annotations

import hashlib

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.server import PUT
from andon_conformance.judge.states import whole_state
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import Event

__all__ = ["BOOTSTRAP"]

_CHECKS = (
    Check("bootstrap.other", "takes no head from an INITIAL record of another worker", "rule 11"),
    Check("bootstrap.head", "is at the key of the INITIAL record that names it", "rule 11"),
    Check("bootstrap.ticket", "sends run, id, session token, transfer and head in PutState",
          "section 11"),
    Check("bootstrap.patience", "sends no byte of its state before the reducer's answer",
          "section 11"),
    Check("bootstrap.state", "sends its state's length and SHA-256, and exactly that state",
          "section 11"),
    Check("bootstrap.pieces", "sends pieces of at most 1 MiB", "section 12"),
    Check("bootstrap.report", "reports the transfer and its head, and no failure", "section 11"),
    Check("bootstrap.offset", "begins at the byte that the answer names", "section 11"),
    Check("bootstrap.cancel", "cancels PutState when its Train stream ends", "rule 10"),
    Check("bootstrap.elsewhere", "reports a failure if it is not at the transfer's head",
          "rule 10"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(LineSetting(slot=0))
    await _bootstrap_another(bench, line)
    line.accept(pb.JOIN_STATUS_FRESH)
    line.send_initial_record()
    with verdicts.deciding("bootstrap.head"):
        work = await line.asks()
    verdicts.passed("bootstrap.head", f"RequestWork is from {_key(work.head)}")

    state, sha256 = await _send_whole(bench, line)
    await _send_rest(bench, line, state, sha256)

    elsewhere = Key(line.term, line.new_key().round)
    since = line.transfer(3, pb.TRANSFER_ROLE_SEND, elsewhere)
    with verdicts.deciding("bootstrap.elsewhere"):
        report = await line.reports(3, since)
    verdicts.judge(
        "bootstrap.elsewhere", report.failure, f"it reports {report.failure or 'success'!r}"
    )

    since = line.transfer(4, pb.TRANSFER_ROLE_SEND)
    first = await line.state_call(PUT, since)
    line.end_train()
    with verdicts.deciding("bootstrap.cancel"):
        await line.ends(first.stream)
    verdicts.passed("bootstrap.cancel", "its call ended with its Train stream")


async def _bootstrap_another(bench: Bench, line: ScriptedLine) -> None:
    """The line is bootstrapped with another worker's weights."""
    verdicts, name = bench.verdicts, "bootstrap.other"
    await line.joins()
    line.accept(pb.JOIN_STATUS_FRESH)
    since = line.transcript.now
    line.tell_record(line.initial_record_of(line.peer))
    line.head = None
    with verdicts.deciding(name):
        await line.joins()
    asked = line.transcript.find(lambda event: event.kind == "request_work", since)
    head = conversion.optional_key_from_proto(line.join.head)
    evidence = f"it joined again with head {head}, and {len(asked)} RequestWork came"
    verdicts.judge(name, head is None and not asked, evidence)


async def _send_whole(bench: Bench, line: ScriptedLine) -> tuple[bytes, bytes]:
    """The first transfer, from the first byte on: the state and its SHA-256."""
    verdicts, transcript = bench.verdicts, line.transcript
    since = line.transfer(1, pb.TRANSFER_ROLE_SEND)
    with verdicts.deciding("bootstrap.ticket"):
        first = await line.state_call(PUT, since)
    ticket = first.message
    said = (ticket.run_id, ticket.worker, ticket.session_token, ticket.transfer_id)
    right = said == (line.run_id, line.setting.slot, line.session_token, 1)
    right &= (
        conversion.optional_key_from_proto(ticket.head) == line.head and len(ticket.sha256) == 32
    )
    evidence = f"run {ticket.run_id!r}, worker {ticket.worker}, transfer {ticket.transfer_id}"
    verdicts.judge("bootstrap.ticket", right, f"{evidence}, head {_key(ticket.head)}")

    await transcript.pause()
    early = sum(map(_length, _pieces(line, first.stream)))
    verdicts.judge("bootstrap.patience", not early, f"{early} bytes came before the answer")

    first.stream.send(reducer_pb2.PutStateResponse(offset=0))
    with verdicts.deciding("bootstrap.state"):
        state = await whole_state(line, first.stream, ticket.size_bytes)
    sha256 = hashlib.sha256(state).digest()
    right = (len(state), sha256) == (ticket.size_bytes, ticket.sha256)
    verdicts.judge("bootstrap.state", right, f"{len(state)} of {ticket.size_bytes} bytes came")
    longest = max(map(_length, _pieces(line, first.stream)), default=0)
    evidence = f"the longest has {longest} bytes"
    verdicts.judge("bootstrap.pieces", longest <= STATE_PIECE_BYTES, evidence)
    first.stream.end()

    with verdicts.deciding("bootstrap.report"):
        report = await line.reports(1, since)
    right = conversion.optional_key_from_proto(report.head) == line.head and not report.failure
    evidence = f"head {_key(report.head)}, failure {report.failure!r}"
    verdicts.judge("bootstrap.report", right, evidence)
    return state, ticket.sha256


async def _send_rest(bench: Bench, line: ScriptedLine, state: bytes, sha256: bytes) -> None:
    """The second transfer, whose receiver already has the first half."""
    verdicts = bench.verdicts
    half = len(state) // 2
    since = line.transfer(2, pb.TRANSFER_ROLE_SEND)
    first = await line.state_call(PUT, since)
    first.stream.send(reducer_pb2.PutStateResponse(offset=half))
    size = first.message.size_bytes - half
    with verdicts.deciding("bootstrap.offset"):
        rest = await whole_state(line, first.stream, size)
        first.stream.end()
        await line.reports(2, since)
    # The client may serialise the same state to other bytes the second time. Then only the length
    # can be compared.
    right = len(rest) == size
    if first.message.sha256 == sha256:
        right = rest == state[half:]
    verdicts.judge(
        "bootstrap.offset", right, f"asked for byte {half} on, it sent {len(rest)} bytes"
    )


def _pieces(line: ScriptedLine, stream: ClientCall) -> list[Event]:
    return line.transcript.find(lambda event: event.kind == "put_state" and event.stream is stream)


def _length(piece: Event) -> int:
    return len(piece.message.payload)


def _key(message: object) -> str:
    key = conversion.optional_key_from_proto(message)  # type: ignore[arg-type]  # a Key of any message
    return "none" if key is None else str(key)


BOOTSTRAP = Scenario(
    name="bootstrap",
    summary="the client bootstraps the line, and sends its state to a newcomer",
    checks=_CHECKS,
    play=_play,
)
