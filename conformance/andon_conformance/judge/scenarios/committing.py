"""Committing: a client's weights change with the record, and with nothing else."""

from __future__ import annotations

from andon.protocol.capabilities import OVERFLOW
from andon.protocol.records import Record, RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.wire.conversion import cursor_from_proto
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.line import ScriptedLine, send_answers
from andon_conformance.judge.rounds import ClientRound, short, steady
from andon_conformance.judge.transcript import EXITED

__all__ = ["committing", "rejoining"]

_WILD = 3.0


@scenario(
    "commit",
    """
    commit.patience        rule 7     changes no weight before StepCommitted
    commit.void-head       section 3  continues from the old head after RoundVoided
    commit.moves           rule 7     updates its weights when the record of its round arrives
    commit.void-averages   rule 7     never applies averages of a void round
    commit.other-void      section 3  keeps its round when RoundVoided names another one
    commit.strange-record  rule 4     joins again when it receives a record that it can't apply
    commit.overflow        rule 15    takes a record with overflow, and moves no weight, if it
                                      offers `overflow.v1`
    commit.strange-parent  rule 4     joins again when it is assigned work for another head
    """,
)
async def committing(bench: Bench) -> None:
    """Two clients from one state: a void round disturbs one of them."""
    verdicts = bench.verdicts
    plain, line = await bench.several_from_origin(2)
    await plain.steps()
    expected = (await plain.averaged())[0].digest.sha256

    # All averages of a round come, none of them near the true ones; then it is void.
    before, void = await line.averaged(
        lambda current, chunk: line.averages(current).made(chunk, steady(chunk, _WILD))
    )
    # A client that applied the averages already would start from other weights now.
    line.void(void)
    since = line.transcript.now
    current = await line.must("commit.void-head", line.begin())
    ready = await line.must("commit.other-void", _ready_despite(line, current, void))
    requests = line.transcript.find(line.on_train("request_work"), since)
    heads = {key_in(event.message.head) for event in requests}
    evidence = "it took work for the old head, and asked for no other"
    line.judge("commit.void-head", heads <= {line.head}, evidence)
    same = ready.digest.sha256 == before.digest.sha256
    line.judge("commit.patience", same, _digests(before, ready))
    # A client with its averages waits for the record, whichever other round is void.
    line.void_key(void.key)
    line.commit(current)
    await line.must("commit.other-void", line.asks())
    verdicts.passed("commit.other-void", "it held its round, and took its record")
    later, current = await line.averaged()
    moved = later.digest.sha256 != ready.digest.sha256
    line.judge("commit.moves", moved, _digests(ready, later))
    if same and moved:
        evidence = f"digest {short(later.digest.sha256)}, undisturbed {short(expected)}"
        line.judge("commit.void-averages", later.digest.sha256 == expected, evidence)
    current = await _overflow(bench, line, later, current, patient=same)
    await _strange_record(line, current)
    await _strange_parent(line)


def _digests(first: pb.StepReady, second: pb.StepReady) -> str:
    return f"digests {short(first.digest.sha256)}, then {short(second.digest.sha256)}"


async def _ready_despite(
    line: ScriptedLine, current: ClientRound, void: ClientRound
) -> pb.StepReady:
    """Voids an older and a future round, then sends the current round's averages."""
    line.void_key(void.key)
    line.void_key(line.new_key())
    send_answers(line.made_up(current))
    return await line.ready(current)


async def _overflow(
    bench: Bench, line: ScriptedLine, before: pb.StepReady, current: ClientRound, *, patient: bool
) -> ClientRound:
    """Another worker's scaled gradients overflowed; returns the round after that.

    `patient`: whether the client waits for records. One that does not has moved already.
    """
    name = "commit.overflow"
    if OVERFLOW not in line.join.capabilities:
        bench.verdicts.skip(name, f"it does not offer {OVERFLOW}")
        return current
    # The client holds averages, and none of them may move a weight.
    line.tell_record(line.record_of(current), overflow=True)
    after, following = await line.must(name, line.averaged())
    if patient:
        same = before.digest.sha256 == after.digest.sha256
        line.judge(name, same, _digests(before, after))
    return following


async def _strange_record(line: ScriptedLine, current: ClientRound) -> None:
    """The line commits a round that the client does not hold."""
    name, head, step, cursor = "commit.strange-record", line.head, line.step, line.cursor
    strange = Record(
        line.new_key(), current.parent, RecordKind.STEP, step + 1, current.cursor, current.roster
    )
    line.tell_record(strange)
    # The record was a mistake: the line stays where it was, and so must the client.
    line.head, line.step, line.cursor = head, step, cursor
    joined = key_in((await line.must(name, line.joins())).head)
    line.judge(name, joined == head, f"it joined again with head {joined}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)


async def _strange_parent(line: ScriptedLine) -> None:
    name = "commit.strange-parent"
    await line.asks()
    current = line.assign(parent=line.new_key())
    joined = key_in((await line.must(name, line.joins())).head)
    given = line.transcript.find(
        lambda event: event.kind == "block_gradient" and event.message.key == current.key,
        current.began,
    )
    evidence = f"it joined again with head {joined}, and sent {len(given)} chunks"
    line.judge(name, joined == line.head and not given, evidence)


@scenario(
    "rejoin",
    """
    rejoin.joins        section 3  joins again on a new stream when its stream ends
    rejoin.incarnation  rule 8     keeps its incarnation
    rejoin.slot         rule 8     asks for its own slot or for none
    rejoin.head         rule 8     reports its head, its cursor and its step
    rejoin.term         rule 8     reports the greatest term that it has seen
    rejoin.held         rule 8     reports the key of the averages that it holds
    rejoin.not-held     rule 8     reports no key if averages of the round are missing
    rejoin.streams      section 4  opens new Reduce streams, with its new session token
    rejoin.in-sync      rule 9     applies none of its held averages if it is in sync
    rejoin.record       rule 8     applies the record that follows, with the averages that it holds
    rejoin.other-head   section 3  asks for no work if JoinAccepted is IN_SYNC at another head
    """,
)
async def rejoining(bench: Bench) -> None:
    """Four broken streams: averages missing, all there, the record on its way, another head."""
    plain, line = await bench.several_from_origin(2)
    await plain.steps(2)
    undisturbed, _ = await plain.averaged()
    await line.steps()
    incarnation = line.join.incarnation

    await line.begin()
    await line.must("rejoin.joins", line.joins_again())
    bench.verdicts.passed("rejoin.joins", "it joined again")
    _judge_join(line, incarnation)
    held = key_in(line.join.held_key)
    line.judge("rejoin.not-held", held is None, f"held key {held}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)

    before, current = await _held_round(line)
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    again, current = await line.must("rejoin.in-sync", line.averaged())
    _judge_streams(line, current)
    same = before.digest.sha256 == again.digest.sha256
    line.judge("rejoin.in-sync", same, "the digest of its head is as before")
    line.void(current)

    _, current = await _held_round(line)
    # The line's head is the record that the client missed.
    line.accept(pb.JOIN_STATUS_RECORD_FOLLOWS, current.key)
    line.commit(current)
    after, current = await line.must("rejoin.record", line.averaged())
    _judge_streams(line, current)
    digest, expected = after.digest.sha256, undisturbed.digest.sha256
    evidence = f"digest {short(digest)}, of an undisturbed client {short(expected)}"
    line.judge("rejoin.record", digest == expected, evidence)
    line.void(current)
    await _other_head(line)


def _judge_join(line: ScriptedLine, incarnation: int) -> None:
    join = line.join
    line.judge("rejoin.incarnation", join.incarnation == incarnation, f"{join.incarnation:#x}")
    slot = join.launch_slot if join.HasField("launch_slot") else None
    line.judge("rejoin.slot", slot in (None, line.setting.slot), f"slot {slot}")
    head, cursor = key_in(join.head), cursor_from_proto(join.cursor)
    right = (head, cursor, join.step) == (line.head, line.cursor, line.step)
    line.judge("rejoin.head", right, f"head {head}, {cursor}, step {join.step}")
    term = join.greatest_term
    line.judge("rejoin.term", term == line.term, f"term {term:#x}, the line's term {line.term:#x}")


def _judge_streams(line: ScriptedLine, current: ClientRound) -> None:
    """Every stream that brought a contribution was opened since the client joined."""
    new = line.reduce_streams(line.joined_at)
    used = {given.stream for given in current.given}
    old = [stream for stream in used if stream not in new]
    openings = line.transcript.find(lambda event: event.kind == "open_round", line.joined_at)
    wrong = [each for each in openings if each.message.session_token != line.session_token]
    evidence = f"{len(old)} of {len(used)} streams are from before its Join, {len(wrong)} tokens"
    line.judge("rejoin.streams", not old and not wrong, f"{evidence} too")


async def _other_head(line: ScriptedLine) -> None:
    """The coordinator mistakes the client for another worker."""
    await line.joins_again()
    since = line.transcript.now
    line.accept(pb.JOIN_STATUS_IN_SYNC, line.new_key())
    answer = line.transcript.wait(
        "RequestWork, another Join, or the client's end",
        lambda event: event.kind in (EXITED, "join") or line.on_train("request_work")(event),
        since,
    )
    event = await line.must("rejoin.other-head", answer)
    asked = line.transcript.find(line.on_train("request_work"), since)
    evidence = f"{event.kind} came, and {len(asked)} RequestWork"
    line.judge("rejoin.other-head", not asked, evidence)


async def _held_round(line: ScriptedLine) -> tuple[pb.StepReady, ClientRound]:
    """A round whose averages the client holds when its stream ends; it has joined again."""
    ready, current = await line.averaged()
    held = key_in((await line.joins_again()).held_key)
    line.judge("rejoin.held", held == current.key, f"held key {held}")
    return ready, current
