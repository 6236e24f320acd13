"""Halting: the line halts in the middle of a round, and resumes."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import Key, Record, RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from andon.wire.conversion import key_to_proto
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound, short
from andon_conformance.judge.transcript import Event

__all__ = ["halting"]

_HALTED = 3
"""The exit code of a client that ends at a halt."""
_UNKNOWN_REASON = 99


@scenario(
    "halt",
    """
    halt.silence   section 3  sends no StepReady and asks for no work until Resume
    halt.reported  rule 8     reports its current halt when it joins again
    halt.answered  section 3  continues if JoinAccepted names no halt
    halt.joined    section 3  asks for no work if JoinAccepted names a halt, until Resume
    halt.resume    section 3  continues from the same head after Resume
    halt.weights   rule 7     has changed no weight
    halt.unknown   section 3  halts for an unknown reason too
    halt.skip      rule 13    moves its head on a MARK, and changes no weight
    """,
)
async def halting(bench: Bench) -> None:
    """Three halts: answered during an outage, sent at a rejoin, and of an unknown reason."""
    line = await bench.started()
    await line.steps()
    before, void = await line.averaged()
    line.void(void)

    held, _ = await _halt(line, 1, halt_pb2.HALT_REASON_OPERATOR)
    if not line.judge("halt.silence", not held, _came(held)):
        raise Stopped("the client does not halt")
    if line.transcript.exit_code == _HALTED:
        bench.verdicts.skip_undecided(f"it ends at a halt, with exit code {_HALTED}: it may")
        return
    await _answered_meanwhile(bench, line)
    await _joins_a_halt(bench, line)
    after, void = await line.averaged()
    evidence = f"digests {short(before.digest.sha256)}, {short(after.digest.sha256)}"
    line.judge("halt.weights", before.digest.sha256 == after.digest.sha256, evidence)
    line.void(void)

    held, current = await _halt(line, 3, _UNKNOWN_REASON)
    line.judge("halt.unknown", not held, _came(held))
    # A MARK that moves the cursor past the round's samples answers the halt.
    mark = Record(line.new_key(), line.head, RecordKind.MARK, line.step, current.cursor, ())
    line.tell_record(mark)
    line.train.send(pb.TrainResponse(resume=pb.Resume(halt_id=3, answer=pb.HALT_ANSWER_SKIP)))
    skipped, void = await line.must("halt.skip", line.averaged())
    same = skipped.digest.sha256 == before.digest.sha256
    right = same and key_in(skipped.digest.head) == line.head
    evidence = f"its digest is {'as before' if same else 'another'}, of head {line.head}"
    line.judge("halt.skip", right, evidence)
    line.void(void)


async def _halt(line: ScriptedLine, number: int, reason: int) -> tuple[list[Event], ClientRound]:
    """Halts after the client contributed, then sends the averages; returns what must not come."""
    current = await line.begin()
    evidence = _evidence(number, reason, current.key, current.step)
    line.train.send(pb.TrainResponse(halt=pb.Halt(evidence=evidence)))
    came = list(await line.transcript.pause())
    # The averages complete the round, so that a client that overlooks the halt is ready now.
    for stream, answer in line.answers(current):
        if stream.is_open:
            stream.send(answer)
    came += await line.transcript.pause()
    return _work(came), current


def _evidence(number: int, reason: int, key: Key | None, step: int) -> halt_pb2.HaltEvidence:
    return halt_pb2.HaltEvidence(
        id=number,
        reason=reason,  # type: ignore[arg-type]  # one of a later version
        key=key_to_proto(key),
        step=step,
        message="the judge halts",
    )


def _work(came: Sequence[Event]) -> list[Event]:
    return [event for event in came if event.kind in ("step_ready", "request_work")]


def _came(held: list[Event]) -> str:
    return f"{', '.join(map(str, held)) or 'nothing'} came while the line was halted"


async def _answered_meanwhile(bench: Bench, line: ScriptedLine) -> None:
    """The coordinator is away during the halt, and comes back after it was answered."""
    join = await line.must("halt.reported", line.joins_again())
    reported = join.halt.id if join.HasField("halt") else None
    evidence = "no halt" if reported is None else f"halt {reported}"
    line.judge("halt.reported", reported == 1, f"it joined again with {evidence}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    await _judge_works(bench, line, "halt.answered")


async def _joins_a_halt(bench: Bench, line: ScriptedLine) -> None:
    """The line halts while the client is away, and resumes once it is back."""
    await line.joins_again()
    halt = _evidence(2, halt_pb2.HALT_REASON_OPERATOR, None, line.step)
    line.accept(pb.JOIN_STATUS_IN_SYNC, halt=halt)
    held = _work(await line.transcript.pause())
    line.judge("halt.joined", not held, _came(held))
    line.train.send(pb.TrainResponse(resume=pb.Resume(halt_id=2, answer=pb.HALT_ANSWER_RETRY)))
    await _judge_works(bench, line, "halt.resume")


async def _judge_works(bench: Bench, line: ScriptedLine, name: str) -> None:
    """The client accepts work from its old head."""
    current = await line.must(name, line.begin())
    bench.verdicts.passed(name, f"it works from {line.head}")
    line.void(current)
