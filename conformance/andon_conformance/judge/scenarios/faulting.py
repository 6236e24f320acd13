"""Faults: every client reports to the coordinator what a reducer found wrong."""

from __future__ import annotations

import grpc

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound

__all__ = ["FAULTING"]

_CHECKS = (
    Check("faults.block", "forwards BlockFault as Fault, with key, kind, rank, block and element",
          "section 3"),
    Check("faults.stale", "forwards StaleRound as Fault, with the greatest key", "rule 14"),
    Check("faults.aborted", "forwards RoundAborted as Fault", "section 3"),
    Check("faults.stream", "ends the Reduce stream of a void round if averages of it are missing",
          "rule 16"),
    Check("faults.held", "sends no Fault for a round whose averages it holds", "section 3"),
    Check("faults.again", "opens a new Reduce stream for its next round", "rule 16"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start()
    await line.bootstrap()

    current = await _begun(line)
    key = conversion.key_to_proto(current.key)
    found = reducer_pb2.BlockFault(
        key=key, kind=reducer_pb2.BLOCK_FAULT_KIND_NON_FINITE, rank=0, block=0, element=1,
        value="nan", message="worker 0 sent NaN",
    )  # fmt: skip
    current.given[0].stream.send(reducer_pb2.ReduceResponse(block_fault=found))
    fault = await _fault(bench, line, current, "faults.block")
    right = fault.kind == pb.FAULT_KIND_NON_FINITE_GRADIENT and fault.HasField("rank")
    right = right and fault.HasField("block") and (fault.rank, fault.block, fault.element) == (
        0, 0, 1,
    )  # fmt: skip
    evidence = f"{pb.FaultKind.Name(fault.kind)}, rank {fault.rank}, element {fault.element}"
    verdicts.judge("faults.block", right, evidence)
    await _void(bench, line, current)

    current = await _begun(line, again=True, bench=bench)
    greatest = line.new_key()
    stale = reducer_pb2.StaleRound(
        key=conversion.key_to_proto(current.key), greatest=conversion.key_to_proto(greatest)
    )
    current.given[0].stream.send(reducer_pb2.ReduceResponse(stale_round=stale))
    fault = await _fault(bench, line, current, "faults.stale")
    right = fault.kind == pb.FAULT_KIND_STALE_ROUND
    right = right and conversion.optional_key_from_proto(fault.greatest) == greatest
    verdicts.judge("faults.stale", right, pb.FaultKind.Name(fault.kind))
    await _void(bench, line, current)

    current = await _begun(line)
    aborted = reducer_pb2.RoundAborted(
        key=conversion.key_to_proto(current.key), message="worker 0 was lost"
    )
    current.given[0].stream.send(reducer_pb2.ReduceResponse(round_aborted=aborted))
    fault = await _fault(bench, line, current, "faults.aborted")
    right = fault.kind == pb.FAULT_KIND_DATA_STREAM_LOST
    verdicts.judge("faults.aborted", right, pb.FaultKind.Name(fault.kind))
    await _void(bench, line, current)

    await _too_late(bench, line)


async def _too_late(bench: Bench, line: ScriptedLine) -> None:
    """The reducer gives up a round and ends its stream, after it has sent all averages."""
    verdicts, name = bench.verdicts, "faults.held"
    _, current = await line.averaged()
    stream, key = current.given[0].stream, conversion.key_to_proto(current.key)
    aborted = reducer_pb2.RoundAborted(key=key, message="worker 0 was lost")
    stream.send(reducer_pb2.ReduceResponse(round_aborted=aborted))
    stream.end(grpc.StatusCode.UNAVAILABLE, "the judge's reducer goes away")
    came = await line.transcript.pause()
    faults = [event for event in came if event.kind == "fault"]
    verdicts.judge(name, not faults, f"{len(faults)} Fault came after StepReady")
    line.commit(current)
    with verdicts.deciding(name):
        await line.asks()


async def _begun(
    line: ScriptedLine, *, again: bool = False, bench: Bench | None = None
) -> ClientRound:
    """A round in which the client contributed everything and has no average yet."""
    await line.asks()
    current = line.assign()
    await line.gives(current)
    if again and bench is not None:
        streams = line.reduce_streams(current.began)
        stream = current.given[0].stream
        evidence = f"the next round's chunks came on {stream}"
        bench.verdicts.judge("faults.again", stream in streams, evidence)
    return current


async def _fault(bench: Bench, line: ScriptedLine, current: ClientRound, name: str) -> pb.Fault:
    with bench.verdicts.deciding(name):
        event = await line.transcript.wait(
            f"Fault of step {current.step}", line.of_round("fault", current), current.began
        )
    fault: pb.Fault = event.message
    return fault


async def _void(bench: Bench, line: ScriptedLine, current: ClientRound) -> None:
    """Voids the round; the client must end its Reduce streams."""
    line.void(current)
    for stream in {given.stream for given in current.given}:
        with bench.verdicts.deciding("faults.stream"):
            await line.ends(stream)
    bench.verdicts.passed("faults.stream", "it ended the stream of each void round")


FAULTING = Scenario(
    name="faults",
    summary="three rounds that the reducer aborts, and one that it aborts too late",
    checks=_CHECKS,
    play=_play,
)
