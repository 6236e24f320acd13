"""Receiving: the client installs another worker's state, whole or not at all."""

from __future__ import annotations

import grpc

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Stopped
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.server import GET
from andon_conformance.judge.states import StateSource, give_state, pieces

__all__ = ["RECEIVING"]

_CHECKS = (
    Check("receive.ticket", "sends run, id, session token, transfer and head in GetState",
          "section 11"),
    Check("receive.corrupt", "reports a failure if the state's SHA-256 does not match", "rule 10"),
    Check("receive.resume",
          "keeps what came before the stream broke, and asks for the rest with its SHA-256",
          "section 11"),
    Check("receive.cancel", "cancels GetState when its Train stream ends", "rule 10"),
    Check("receive.report", "reports the transfer's head once the state is installed", "rule 10"),
    Check("receive.digest", "then has the weights that were sent, as its digest shows", "rule 17"),
    Check("receive.cursor", "then reports the transfer's head, cursor and step when it joins",
          "rule 8"),
    Check("receive.untouched", "installs nothing of a state whose SHA-256 does not match",
          "rule 10"),
)  # fmt: skip

_CUT_AT = 0.5


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    origin = await bench.origin()
    line = await bench.start()
    await line.joins()
    line.head, line.step, line.cursor = origin.head, origin.step, origin.cursor
    line.accept(pb.JOIN_STATUS_BEHIND)

    await _corrupt(bench, line, origin)
    await _cut(line, origin)
    await _lose(bench, line, origin)
    await _resume(bench, line, origin)
    with verdicts.deciding("receive.digest"):
        digest = await _digest(line)
    evidence = f"digest {digest.hex()[:12]}, sent was {origin.digest.hex()[:12]}"
    verdicts.judge("receive.digest", digest == origin.digest, evidence)
    await _corrupt_later(bench, line, origin, digest)


async def _corrupt(bench: Bench, line: ScriptedLine, origin: StateSource) -> None:
    verdicts = bench.verdicts
    since = line.transfer(1, pb.TRANSFER_ROLE_RECEIVE)
    with verdicts.deciding("receive.ticket"):
        asked = await line.state_call(GET, since)
    ticket = asked.message
    said = (ticket.run_id, ticket.worker, ticket.session_token, ticket.transfer_id)
    right = said == (line.run_id, line.setting.slot, line.session_token, 1)
    right &= conversion.optional_key_from_proto(ticket.head) == origin.head
    evidence = f"run {ticket.run_id!r}, worker {ticket.worker}, transfer {ticket.transfer_id}"
    verdicts.judge("receive.ticket", right, evidence)

    give_state(asked.stream, origin, data=_flipped(origin.state))
    with verdicts.deciding("receive.corrupt"):
        report = await line.reports(1, since)
    right = bool(report.failure) and conversion.optional_key_from_proto(report.head) is None
    if not verdicts.judge("receive.corrupt", right, f"it reports {report.failure or 'success'!r}"):
        raise Stopped("the client installs a state that it can't trust")


async def _cut(line: ScriptedLine, origin: StateSource) -> None:
    """Sends only the beginning."""
    since = line.transfer(2, pb.TRANSFER_ROLE_RECEIVE)
    asked = await line.state_call(GET, since)
    size = len(origin.state)
    asked.stream.send(reducer_pb2.GetStateResponse(size_bytes=size, sha256=origin.sha256))
    asked.stream.send_all(pieces(origin.state[: _half(origin)]))
    asked.stream.end(grpc.StatusCode.ABORTED, "the other end is gone")
    await line.reports(2, since)


async def _lose(bench: Bench, line: ScriptedLine, origin: StateSource) -> None:
    """The coordinator goes away while the client waits for a state; later it is BEHIND again."""
    since = line.transfer(3, pb.TRANSFER_ROLE_RECEIVE)
    asked = await line.state_call(GET, since)
    line.end_train()
    with bench.verdicts.deciding("receive.cancel"):
        await line.ends(asked.stream)
    bench.verdicts.passed("receive.cancel", "its call ended with its Train stream")
    await line.joins()
    line.accept(pb.JOIN_STATUS_BEHIND)


async def _resume(bench: Bench, line: ScriptedLine, origin: StateSource) -> None:
    verdicts = bench.verdicts
    half = _half(origin)
    since = line.transfer(4, pb.TRANSFER_ROLE_RECEIVE)
    asked = await line.state_call(GET, since)
    offset, sha256 = asked.message.offset, asked.message.sha256
    if not offset:
        verdicts.skip("receive.resume", "it asks for the whole state again, which it may")
    else:
        right = offset <= half and sha256 == origin.sha256
        evidence = f"{half} bytes came, it asks from byte {offset} on"
        if not verdicts.judge("receive.resume", right, evidence):
            offset = 0
    give_state(asked.stream, origin, offset=offset)
    with verdicts.deciding("receive.report"):
        report = await line.reports(4, since)
    right = not report.failure and conversion.optional_key_from_proto(report.head) == origin.head
    verdicts.judge("receive.report", right, f"it reports {report.failure or 'success'!r}")


async def _corrupt_later(
    bench: Bench, line: ScriptedLine, origin: StateSource, digest: bytes
) -> None:
    """The client has a head, is BEHIND, and receives a state that it must not install."""
    verdicts, name = bench.verdicts, "receive.untouched"
    head = line.head
    line.end_train()
    await line.joins()
    _judge_cursor(bench, line, origin)
    line.head = line.new_key()
    line.accept(pb.JOIN_STATUS_BEHIND)
    since = line.transfer(5, pb.TRANSFER_ROLE_RECEIVE)
    asked = await line.state_call(GET, since)
    give_state(asked.stream, origin, data=_flipped(origin.state))
    await line.reports(5, since)
    line.end_train()
    await line.joins()
    joined = conversion.optional_key_from_proto(line.join.head)
    if not verdicts.judge(name, joined == head, f"it joins again with head {joined}"):
        return
    line.head = head
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    with verdicts.deciding(name):
        now = await _digest(line)
    verdicts.judge(name, now == digest, "its head and its weights are as before")


async def _digest(line: ScriptedLine) -> bytes:
    """The digest of the client's weights, taken in a round that is voided afterwards."""
    ready, current = await line.averaged()
    line.void(current)
    sha256: bytes = ready.digest.sha256
    return sha256


def _judge_cursor(bench: Bench, line: ScriptedLine, origin: StateSource) -> None:
    head, cursor = (
        conversion.optional_key_from_proto(line.join.head),
        conversion.cursor_from_proto(line.join.cursor),
    )
    right = (head, cursor, line.join.step) == (origin.head, origin.cursor, origin.step)
    evidence = (
        f"head {head}, {cursor}, step {line.join.step}, and the transfer said {origin.cursor}"
    )
    bench.verdicts.judge("receive.cursor", right, evidence)


def _half(origin: StateSource) -> int:
    return int(len(origin.state) * _CUT_AT)


def _flipped(state: bytes) -> bytes:
    """The state with one bit changed in each of its last bytes."""
    tail = state[-16:]
    return state[:-16] + bytes(byte ^ 1 for byte in tail)


RECEIVING = Scenario(
    name="receive",
    summary="the client gets another client's state, after a corrupt one and two broken streams",
    checks=_CHECKS,
    play=_play,
)
