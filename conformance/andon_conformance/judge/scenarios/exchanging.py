"""Exchanging: checksums and TCP lanes, and what a client reports of what a reducer finds wrong."""

from __future__ import annotations

import grpc

from andon.protocol.messages import AveragedBlock
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import checksums
from andon.wire.conversion import key_to_proto
from andon.wire.conversion import optional_key_from_proto as key_in
from andon.wire.frames import parse_response
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.lanes import LANE
from andon_conformance.judge.line import Answers, ScriptedLine, send_answers
from andon_conformance.judge.rounds import ClientRound
from andon_conformance.judge.transcript import Event
from andon_conformance.lane_format import CAPABILITY as LANES
from andon_conformance.lane_format import DOWN, UP

__all__ = ["checking", "faulting", "laning"]


@scenario(
    "checksums",
    """
    checksums.sent     section 16  sends a right CRC-32C with each chunk
    checksums.taken    section 16  goes on with averages that match theirs
    checksums.payload  section 16  reports an average that does not match as CORRUPT_CHUNK, and is
                                   not ready
    checksums.absent   section 16  reports an average that lacks one as CORRUPT_CHUNK, and is not
                                   ready
    checksums.told     section 16  forwards RoundAborted.corrupt as CORRUPT_CHUNK, with rank, block
                                   and element
    checksums.header   section 16  gives up a round with an average whose header does not match
    """,
)
async def checking(bench: Bench) -> None:
    """The client exchanges with checksums, and meets averages that changed on their way."""
    line = await bench.started(LineSetting(checksums=True))
    current = await line.begin()
    if not _asks_for(line, checksums.CAPABILITY):
        bench.verdicts.skip_undecided(f"the client does not offer {checksums.CAPABILITY}")
        return
    right = sum(checksums.is_intact(given.message) for given in current.given)
    evidence = f"{right} of {len(current.given)} chunks match"
    line.judge("checksums.sent", right == len(current.given), evidence)

    with bench.verdicts.deciding("checksums.taken"):
        send_answers(_sealed(line, current))
        await line.ready(current)
        line.commit(current)
        await line.asks()
    bench.verdicts.passed("checksums.taken", "the step was ready, and was taken")

    await _damage(line, "checksums.payload")
    await _damage(line, "checksums.absent")
    await _tell(line)
    current = await line.begin()
    answers = _sealed(line, current)
    for _, answer in answers:
        answer.header_crc32c ^= 1
    send_answers(answers)
    did = await line.must("checksums.header", line.gives_up(current))
    bench.verdicts.passed("checksums.header", did)


def _asks_for(line: ScriptedLine, capability: str) -> bool:
    openings = line.transcript.find(lambda event: event.kind == "open_round")
    return any(capability in event.message.capabilities for event in openings)


def _sealed(line: ScriptedLine, current: ClientRound) -> Answers:
    """A round's averages, with the right checksums beside them."""
    answers = line.answers(current)
    for _, answer in answers:
        average = parse_response(answer.SerializeToString())
        assert isinstance(average, AveragedBlock)
        answer.header_crc32c = checksums.header_crc32c_of(average)
        answer.crc32c = checksums.crc32c_of(average)
    return answers


async def _damage(line: ScriptedLine, name: str) -> None:
    """The first average arrives changed, or without its checksum; all the others are right."""
    current = await line.begin()
    answers = _sealed(line, current)
    first = answers[0][1]
    if name == "checksums.absent":
        first.ClearField("crc32c")
    else:
        payload = bytearray(first.averaged_block.payload)
        payload[0] ^= 1  # The lowest bit of the first number: no other check can see it.
        first.averaged_block.payload = bytes(payload)
    send_answers(answers)
    fault = await line.must(name, line.fault(current))
    await line.transcript.pause(beats=0)
    ready = line.readies(current)
    right = fault.kind == pb.FAULT_KIND_CORRUPT_CHUNK and not ready
    line.judge(name, right, f"{pb.FaultKind.Name(fault.kind)}, and {len(ready)} StepReady")
    line.void(current)


async def _tell(line: ScriptedLine) -> None:
    """The reducer says that a chunk of another rank was changed on its way."""
    current = await line.begin()
    aborted = reducer_pb2.RoundAborted(
        key=key_to_proto(current.key),
        message="a chunk of rank 0 does not match its CRC-32C",
        corrupt=reducer_pb2.CorruptChunk(rank=0, block=1, element=2),
    )
    current.given[0].stream.send(reducer_pb2.ReduceResponse(round_aborted=aborted))
    fault = await line.must("checksums.told", line.fault(current))
    _judge_place(line, "checksums.told", fault, pb.FAULT_KIND_CORRUPT_CHUNK, (0, 1, 2))
    line.void(current)


def _judge_place(
    line: ScriptedLine, name: str, fault: pb.Fault, kind: pb.FaultKind, place: tuple[int, int, int]
) -> None:
    """Whether a Fault has this kind, and names this rank, block and element."""
    named = fault.HasField("rank") and fault.HasField("block")
    right = named and (fault.rank, fault.block, fault.element) == place
    evidence = f"{pb.FaultKind.Name(fault.kind)}, rank {fault.rank}, block {fault.block}"
    line.judge(name, right and fault.kind == kind, f"{evidence}, element {fault.element}")


@scenario(
    "lanes",
    """
    lanes.proof     section 17  opens both lanes that it asked for, each with the right proof
    lanes.frames    section 17  then sends all contributions on the lane up, and none over gRPC
    lanes.averages  section 17  takes averages from the lane down, and goes on
    lanes.broken    rule 5      gives up a round in which its lanes break, and takes the next one
    lanes.answer    section 17  uses gRPC if the listener does not prove itself
    """,
)
async def laning(bench: Bench) -> None:
    """The client exchanges over TCP lanes, which then break; another meets one that lies."""
    line = await bench.started(LineSetting(lanes="right"))
    current = await line.begin()
    if not _asks_for(line, LANES):
        bench.verdicts.skip_undecided(f"the client does not offer {LANES}")
        return
    _judge_opening(line, current)
    line.average(current)
    with bench.verdicts.deciding("lanes.averages"):
        await line.ready(current)
        line.commit(current)
        await line.steps()
    bench.verdicts.passed("lanes.averages", "two steps were ready with averages from the lane")

    current = await line.begin()
    # The client has sent everything and waits: what breaks are its averages.
    for server in line.servers:
        for stream in line.reduce_streams():
            server.lanes.close_lanes_of(stream)
    with bench.verdicts.deciding("lanes.broken"):
        did = await line.gives_up(current)
        await line.steps()
    bench.verdicts.passed("lanes.broken", f"{did}, and took the next step")
    await _lie(bench)


def _judge_opening(line: ScriptedLine, current: ClientRound) -> None:
    opened = _preambles(line)
    directions = sorted(each.message.direction for each in opened)
    proven = all(each.message.proven for each in opened)
    said = f"{len(opened)} connections, of the directions {directions}, "
    said += "all proven" if proven else "not all proven"
    if not line.judge("lanes.proof", directions == [UP, DOWN] and proven, said):
        raise Stopped("the client opened no lanes")
    streams = {each.stream for each in opened}
    sent = len(current.given) + len(current.abstained)
    framed = sum(line.servers[0].lanes.frames.get(stream, 0) for stream in streams)
    line.judge("lanes.frames", framed == sent, f"{framed} of {sent} messages were frames")


async def _lie(bench: Bench) -> None:
    """Another client, on a line whose listener answers with 32 wrong bytes."""
    name, line = "lanes.answer", await bench.started(LineSetting(lanes="liar"))
    current = await line.begin(check=name)
    line.average(current)
    await line.must(name, line.ready(current))
    framed, tried = sum(line.servers[0].lanes.frames.values()), len(_preambles(line))
    evidence = f"it tried {tried} lanes, sent {framed} frames, and was ready over gRPC"
    line.judge(name, tried and not framed, evidence)


def _preambles(line: ScriptedLine) -> list[Event]:
    return line.transcript.find(lambda event: event.kind == LANE)


@scenario(
    "faults",
    """
    faults.block    section 3  forwards BlockFault as Fault, with key, kind, rank, block and element
    faults.stale    rule 14    forwards StaleRound as Fault, with the greatest key
    faults.aborted  section 3  forwards RoundAborted as Fault
    faults.stream   rule 16    ends the Reduce stream of a void round if averages of it are missing
    faults.held     section 3  sends no Fault for a round whose averages it holds
    faults.again    rule 16    opens a new Reduce stream for its next round
    """,
)
async def faulting(bench: Bench) -> None:
    """Three rounds that the reducer aborts, and one that it aborts too late."""
    line = await bench.started()
    current = await line.begin()
    found = reducer_pb2.BlockFault(
        key=key_to_proto(current.key), kind=reducer_pb2.BLOCK_FAULT_KIND_NON_FINITE, rank=0,
        block=0, element=1, value="nan", message="worker 0 sent NaN",
    )  # fmt: skip
    fault = await _told(line, current, "faults.block", block_fault=found)
    _judge_place(line, "faults.block", fault, pb.FAULT_KIND_NON_FINITE_GRADIENT, (0, 0, 1))
    await _void(bench, line, current)

    current = await line.begin()
    stream = current.given[0].stream
    evidence = f"the next round's chunks came on {stream}"
    line.judge("faults.again", stream in line.reduce_streams(current.began), evidence)
    key, greatest = key_to_proto(current.key), line.new_key()
    stale = reducer_pb2.StaleRound(key=key, greatest=key_to_proto(greatest))
    fault = await _told(line, current, "faults.stale", stale_round=stale)
    right = fault.kind == pb.FAULT_KIND_STALE_ROUND and key_in(fault.greatest) == greatest
    line.judge("faults.stale", right, pb.FaultKind.Name(fault.kind))
    await _void(bench, line, current)

    current = await line.begin()
    fault = await _told(line, current, "faults.aborted", round_aborted=_lost(current))
    right = fault.kind == pb.FAULT_KIND_DATA_STREAM_LOST
    line.judge("faults.aborted", right, pb.FaultKind.Name(fault.kind))
    await _void(bench, line, current)
    await _too_late(line)


async def _told(
    line: ScriptedLine,
    current: ClientRound,
    name: str,
    **message: reducer_pb2.BlockFault | reducer_pb2.StaleRound | reducer_pb2.RoundAborted,
) -> pb.Fault:
    """The client's Fault after the reducer has sent this message."""
    answer = reducer_pb2.ReduceResponse(**message)  # type: ignore[arg-type]  # a case of its own
    current.given[0].stream.send(answer)
    return await line.must(name, line.fault(current))


def _lost(current: ClientRound) -> reducer_pb2.RoundAborted:
    key = key_to_proto(current.key)
    return reducer_pb2.RoundAborted(key=key, message="worker 0 was lost")


async def _too_late(line: ScriptedLine) -> None:
    """The reducer gives up a round and ends its stream, after it has sent all averages."""
    _, current = await line.averaged()
    stream = current.given[0].stream
    stream.send(reducer_pb2.ReduceResponse(round_aborted=_lost(current)))
    # After the averages, in the same stream: the client holds them when this arrives.
    stream.end(grpc.StatusCode.UNAVAILABLE, "the judge's reducer goes away")
    came = await line.transcript.pause()
    faults = [event for event in came if event.kind == "fault"]
    line.judge("faults.held", not faults, f"{len(faults)} Fault came after StepReady")
    # The record decides: a client that holds the averages takes it.
    line.commit(current)
    await line.must("faults.held", line.asks())


async def _void(bench: Bench, line: ScriptedLine, current: ClientRound) -> None:
    """Voids the round; the client must end its Reduce streams."""
    line.void(current)
    for stream in {given.stream for given in current.given}:
        await line.must("faults.stream", line.ends(stream))
    bench.verdicts.passed("faults.stream", "it ended the stream of each void round")
