"""Halting: the line halts twice in the middle of a round, and resumes."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import Key, Record, RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Stopped
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound
from andon_conformance.judge.transcript import Event

__all__ = ["HALTING"]

_HALTED = 3
_UNKNOWN_REASON = 99
_CHECKS = (
    Check("halt.silence", "sends no StepReady and asks for no work until Resume", "section 3"),
    Check("halt.reported", "reports its current halt when it joins again", "rule 8"),
    Check("halt.answered", "continues if JoinAccepted names no halt", "section 3"),
    Check(
        "halt.joined", "asks for no work if JoinAccepted names a halt, until Resume", "section 3"
    ),
    Check("halt.resume", "continues from the same head after Resume", "section 3"),
    Check("halt.weights", "has changed no weight", "rule 7"),
    Check("halt.unknown", "halts for an unknown reason too", "section 3"),
    Check("halt.skip", "moves its head on a MARK, and changes no weight", "rule 13"),
)


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start()
    await line.bootstrap()
    await line.steps()
    before, void = await line.averaged()
    line.void(void)

    held, _ = await _halt(line, 1, halt_pb2.HALT_REASON_OPERATOR)
    if not verdicts.judge("halt.silence", not held, _came(held)):
        raise Stopped("the client does not halt")
    if line.transcript.exit_code == _HALTED:
        for check in _CHECKS[1:]:
            verdicts.skip(check.name, f"it ends at a halt, with exit code {_HALTED}: it may")
        return
    await _answered_meanwhile(bench, line)
    await _joins_a_halt(bench, line)
    after, void = await line.averaged()
    evidence = f"digests {before.digest.sha256.hex()[:12]}, {after.digest.sha256.hex()[:12]}"
    verdicts.judge("halt.weights", before.digest.sha256 == after.digest.sha256, evidence)
    line.void(void)

    held, current = await _halt(line, 3, _UNKNOWN_REASON)
    verdicts.judge("halt.unknown", not held, _came(held))
    _skip(line, current)
    with verdicts.deciding("halt.skip"):
        skipped, void = await line.averaged()
    same = skipped.digest.sha256 == before.digest.sha256
    right = same and conversion.optional_key_from_proto(skipped.digest.head) == line.head
    evidence = f"its digest is {'as before' if same else 'another'}, of head {line.head}"
    verdicts.judge("halt.skip", right, evidence)
    line.void(void)


async def _halt(line: ScriptedLine, number: int, reason: int) -> tuple[list[Event], ClientRound]:
    """Halts after the client contributed, then sends the averages; returns what must not come."""
    await line.asks()
    current = line.assign()
    await line.gives(current)
    evidence = _evidence(number, reason, current.key, current.step)
    line.train.send(pb.TrainResponse(halt=pb.Halt(evidence=evidence)))
    came = list(await line.transcript.pause())
    _send_late(line, current)
    came += await line.transcript.pause()
    return _work(came), current


def _evidence(number: int, reason: int, key: Key | None, step: int) -> halt_pb2.HaltEvidence:
    return halt_pb2.HaltEvidence(
        id=number,
        reason=reason,  # type: ignore[arg-type]  # one of a later version
        key=conversion.key_to_proto(key),
        step=step,
        message="the judge halts",
    )


def _work(came: Sequence[Event]) -> list[Event]:
    return [event for event in came if event.kind in ("step_ready", "request_work")]


async def _answered_meanwhile(bench: Bench, line: ScriptedLine) -> None:
    """The coordinator is away during the halt, and comes back after it was answered."""
    verdicts = bench.verdicts
    line.end_train()
    with verdicts.deciding("halt.reported"):
        await line.joins()
    reported = line.join.halt.id if line.join.HasField("halt") else None
    evidence = "no halt" if reported is None else f"halt {reported}"
    verdicts.judge("halt.reported", reported == 1, f"it joined again with {evidence}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    await _works(bench, line, "halt.answered")


async def _joins_a_halt(bench: Bench, line: ScriptedLine) -> None:
    """The line halts while the client is away, and resumes once it is back."""
    verdicts = bench.verdicts
    line.end_train()
    await line.joins()
    halt = _evidence(2, halt_pb2.HALT_REASON_OPERATOR, None, line.step)
    line.accept(pb.JOIN_STATUS_IN_SYNC, halt=halt)
    held = _work(await line.transcript.pause())
    verdicts.judge("halt.joined", not held, _came(held))
    resumed = pb.Resume(halt_id=2, answer=pb.HALT_ANSWER_RETRY)
    line.train.send(pb.TrainResponse(resume=resumed))
    await _works(bench, line, "halt.resume")


def _send_late(line: ScriptedLine, current: ClientRound) -> None:
    for stream, answer in line.answers(current):
        if stream.is_open:
            stream.send(answer)


async def _works(bench: Bench, line: ScriptedLine, name: str) -> None:
    """The client accepts work from its old head."""
    with bench.verdicts.deciding(name):
        await line.asks()
        current = line.assign()
        await line.gives(current)
    bench.verdicts.passed(name, f"it works from {line.head}")
    line.void(current)


def _skip(line: ScriptedLine, current: ClientRound) -> None:
    """Answers the halt with a MARK that moves the cursor past the round's samples."""
    mark = Record(line.new_key(), line.head, RecordKind.MARK, line.step, current.cursor, ())
    line.tell_record(mark)
    resumed = pb.Resume(halt_id=3, answer=pb.HALT_ANSWER_SKIP)
    line.train.send(pb.TrainResponse(resume=resumed))


def _came(held: list[Event]) -> str:
    return f"{', '.join(map(str, held)) or 'nothing'} came while the line was halted"


HALTING = Scenario(
    name="halt",
    summary="three halts: answered during an outage, sent at a rejoin, and of an unknown reason",
    checks=_CHECKS,
    play=_play,
)
