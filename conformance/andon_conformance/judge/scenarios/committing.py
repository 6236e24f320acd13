"""Committing: a client's weights change with the record, and with nothing else."""

from __future__ import annotations

from andon.protocol.capabilities import OVERFLOW
from andon.protocol.records import Record, RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound, steady

__all__ = ["COMMITTING"]

_CHECKS = (
    Check("commit.patience", "changes no weight before StepCommitted", "rule 7"),
    Check("commit.void-head", "continues from the old head after RoundVoided", "section 3"),
    Check("commit.moves", "updates its weights when the record of its round arrives", "rule 7"),
    Check("commit.void-averages", "never applies averages of a void round", "rule 7"),
    Check("commit.other-void", "keeps its round when RoundVoided names another one", "section 3"),
    Check("commit.strange-record", "joins again when it receives a record that it can't apply",
          "rule 4"),
    Check("commit.overflow",
          "takes a record with overflow, and moves no weight, if it offers `overflow.v1`",
          "rule 15"),
    Check("commit.strange-parent", "joins again when it is assigned work for another head",
          "rule 4"),
)  # fmt: skip

_WILD = 3.0


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    plain, disturbed = await bench.several_from_origin(2)
    expected = await _undisturbed(plain)

    # All averages of a round come, none of them near the true ones; then it is void.
    before, void = await disturbed.averaged(
        lambda current, chunk: disturbed.averages(current).made(chunk, steady(chunk, _WILD))
    )
    disturbed.void(void)
    since = disturbed.transcript.now
    with verdicts.deciding("commit.void-head"):
        await disturbed.asks()
        current = disturbed.assign()
        await disturbed.gives(current)
    with verdicts.deciding("commit.other-void"):
        ready = await _ready_despite(disturbed, current, void)
    heads = {
        conversion.optional_key_from_proto(event.message.head)
        for event in disturbed.transcript.find(disturbed.on_train("request_work"), since)
    }
    evidence = "it took work for the old head, and asked for no other"
    verdicts.judge("commit.void-head", heads <= {disturbed.head}, evidence)
    same = ready.digest.sha256 == before.digest.sha256
    evidence = f"digests {_short(before.digest.sha256)}, then {_short(ready.digest.sha256)}"
    verdicts.judge("commit.patience", same, evidence)
    disturbed.void_key(void.key)
    disturbed.commit(current)
    with verdicts.deciding("commit.other-void"):
        await disturbed.asks()
    verdicts.passed("commit.other-void", "it held its round, and took its record")
    later, current = await disturbed.averaged()
    moved = later.digest.sha256 != ready.digest.sha256
    evidence = f"digests {_short(ready.digest.sha256)}, then {_short(later.digest.sha256)}"
    verdicts.judge("commit.moves", moved, evidence)
    if same and moved:
        evidence = f"digest {_short(later.digest.sha256)}, undisturbed {_short(expected)}"
        verdicts.judge("commit.void-averages", later.digest.sha256 == expected, evidence)
    current = await _overflow(bench, disturbed, later, current, patient=same)
    await _strange_record(bench, disturbed, current)
    await _strange_parent(bench, disturbed)


async def _ready_despite(
    line: ScriptedLine, current: ClientRound, void: ClientRound
) -> pb.StepReady:
    """Voids an older and a future round, then sends the current round's averages."""
    line.void_key(void.key)
    line.void_key(line.new_key())
    averages = line.averages(current)
    line.average(current, lambda chunk: averages.made(chunk, steady(chunk)))
    return await line.ready(current)


async def _undisturbed(line: ScriptedLine) -> bytes:
    """The digest of the weights after one step from the recorded state."""
    await line.steps()
    ready, _ = await line.averaged()
    digest: bytes = ready.digest.sha256
    return digest


async def _overflow(
    bench: Bench, line: ScriptedLine, before: pb.StepReady, current: ClientRound, *, patient: bool
) -> ClientRound:
    """Another worker's scaled gradients overflowed; returns the round after that.

    `patient`: whether the client waits for records. One that does not has moved already.
    """
    verdicts, name = bench.verdicts, "commit.overflow"
    if OVERFLOW not in line.join.capabilities:
        verdicts.skip(name, f"it does not offer {OVERFLOW}")
        return current
    line.tell_record(line.record_of(current), overflow=True)
    with verdicts.deciding(name):
        after, following = await line.averaged()
    if patient:
        same = before.digest.sha256 == after.digest.sha256
        evidence = f"digests {_short(before.digest.sha256)}, then {_short(after.digest.sha256)}"
        verdicts.judge(name, same, evidence)
    return following


async def _strange_record(bench: Bench, line: ScriptedLine, current: ClientRound) -> None:
    """The line commits a round that the client does not hold."""
    verdicts, name = bench.verdicts, "commit.strange-record"
    head, step, cursor = line.head, line.step, line.cursor
    assert head is not None
    strange = Record(
        line.new_key(), current.parent, RecordKind.STEP, step + 1, current.cursor, current.roster
    )
    line.tell_record(strange)
    line.head, line.step, line.cursor = head, step, cursor
    with verdicts.deciding(name):
        await line.joins()
    joined = conversion.optional_key_from_proto(line.join.head)
    verdicts.judge(name, joined == head, f"it joined again with head {joined}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)


async def _strange_parent(bench: Bench, line: ScriptedLine) -> None:
    verdicts, name = bench.verdicts, "commit.strange-parent"
    await line.asks()
    strange = line.new_key()
    current = line.assign(parent=strange)
    with verdicts.deciding(name):
        await line.joins()
    since = current.began
    given = line.transcript.find(
        lambda event: event.kind == "block_gradient" and event.message.key == current.key, since
    )
    joined = conversion.optional_key_from_proto(line.join.head)
    evidence = f"it joined again with head {joined}, and sent {len(given)} chunks"
    verdicts.judge(name, joined == line.head and not given, evidence)


def _short(digest: bytes) -> str:
    return digest.hex()[:12] or "none"


COMMITTING = Scenario(
    name="commit",
    summary="two clients from one state: a void round disturbs one of them",
    checks=_CHECKS,
    play=_play,
)
