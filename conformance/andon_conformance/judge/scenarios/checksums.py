"""Checksums: a client that offers them sends right ones, and uses no number that was changed."""

from __future__ import annotations

from andon.protocol.messages import AveragedBlock
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon.wire.checksums import CAPABILITY, crc32c_of, header_crc32c_of, is_intact
from andon.wire.frames import parse_response
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound

__all__ = ["CHECKSUMS"]

_CHECKS = (
    Check("checksums.sent", "sends a right CRC-32C with each chunk", "section 16"),
    Check("checksums.taken", "goes on with averages that match theirs", "section 16"),
    Check("checksums.payload", "reports an average that does not match as CORRUPT_CHUNK, and is "
          "not ready", "section 16"),
    Check("checksums.absent", "reports an average that lacks one as CORRUPT_CHUNK, and is not "
          "ready", "section 16"),
    Check("checksums.told", "forwards RoundAborted.corrupt as CORRUPT_CHUNK, with rank, block and "
          "element", "section 16"),
    Check("checksums.header", "gives up a round with an average whose header does not match",
          "section 16"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(LineSetting(checksums=True))
    await line.bootstrap()
    current = await _begun(line)
    if not _offered(line):
        for check in _CHECKS:
            verdicts.skip(check.name, f"the client does not offer {CAPABILITY}")
        return
    right = sum(is_intact(given.message) for given in current.given)
    evidence = f"{right} of {len(current.given)} chunks match"
    verdicts.judge("checksums.sent", right == len(current.given), evidence)

    with verdicts.deciding("checksums.taken"):
        await _finish(line, current)
        await line.asks()
    verdicts.passed("checksums.taken", "the step was ready, and was taken")

    await _damage(bench, line, "checksums.payload")
    await _damage(bench, line, "checksums.absent")
    await _tell(bench, line)
    await _damage_the_header(bench, line)


async def _damage(bench: Bench, line: ScriptedLine, name: str) -> None:
    """The first average arrives changed, or without its checksum; all the others are right."""
    current = await _begun(line)
    (stream, first), *others = line.answers(current)
    _seal(first)
    if name == "checksums.absent":
        first.ClearField("crc32c")
    else:
        payload = bytearray(first.averaged_block.payload)
        payload[0] ^= 1  # The lowest bit of the first number: no other check can see it.
        first.averaged_block.payload = bytes(payload)
    stream.send(first)
    for each, answer in others:
        each.send(_seal(answer))
    with bench.verdicts.deciding(name):
        event = await line.transcript.wait(
            f"Fault of step {current.step}", line.of_round("fault", current), current.began
        )
    await line.transcript.pause(beats=0)
    ready = line.transcript.find(line.of_round("step_ready", current))
    fault: pb.Fault = event.message
    right = fault.kind == pb.FAULT_KIND_CORRUPT_CHUNK and not ready
    evidence = f"{pb.FaultKind.Name(fault.kind)}, and {len(ready)} StepReady"
    bench.verdicts.judge(name, right, evidence)
    line.void(current)


async def _tell(bench: Bench, line: ScriptedLine) -> None:
    """The reducer says that a chunk of another rank was changed on its way."""
    name, current = "checksums.told", await _begun(line)
    aborted = reducer_pb2.RoundAborted(
        key=conversion.key_to_proto(current.key),
        message="a chunk of rank 0 does not match its CRC-32C",
        corrupt=reducer_pb2.CorruptChunk(rank=0, block=1, element=2),
    )
    current.given[0].stream.send(reducer_pb2.ReduceResponse(round_aborted=aborted))
    with bench.verdicts.deciding(name):
        event = await line.transcript.wait(
            f"Fault of step {current.step}", line.of_round("fault", current), current.began
        )
    fault: pb.Fault = event.message
    right = fault.kind == pb.FAULT_KIND_CORRUPT_CHUNK and fault.HasField("rank")
    right = right and fault.HasField("block") and (fault.rank, fault.block, fault.element) == (
        0, 1, 2,
    )  # fmt: skip
    evidence = f"{pb.FaultKind.Name(fault.kind)}, rank {fault.rank}, block {fault.block}, "
    bench.verdicts.judge(name, right, f"{evidence}element {fault.element}")
    line.void(current)


async def _damage_the_header(bench: Bench, line: ScriptedLine) -> None:
    name, current = "checksums.header", await _begun(line)
    for stream, answer in line.answers(current):
        _seal(answer).header_crc32c ^= 1
        stream.send(answer)
    with bench.verdicts.deciding(name):
        did = await line.gives_up(current)
    bench.verdicts.passed(name, did)


async def _begun(line: ScriptedLine) -> ClientRound:
    """A round in which the client contributed everything and has no average yet."""
    await line.asks()
    current = line.assign()
    await line.gives(current)
    return current


async def _finish(line: ScriptedLine, current: ClientRound) -> None:
    for stream, answer in line.answers(current):
        stream.send(_seal(answer))
    await line.ready(current)
    line.commit(current)


def _seal(answer: reducer_pb2.ReduceResponse) -> reducer_pb2.ReduceResponse:
    """Puts the right checksums beside an average."""
    average = parse_response(answer.SerializeToString())
    assert isinstance(average, AveragedBlock)
    answer.header_crc32c = header_crc32c_of(average)
    answer.crc32c = crc32c_of(average)
    return answer


def _offered(line: ScriptedLine) -> bool:
    return any(
        event.kind == "open_round" and CAPABILITY in event.message.capabilities
        for event in line.transcript.events
    )


CHECKSUMS = Scenario(
    name="checksums",
    summary="the client exchanges with checksums, and meets averages that changed on their way",
    checks=_CHECKS,
    play=_play,
)
