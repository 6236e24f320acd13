"""Rejoining: the stream breaks, before and after the client holds a round's averages."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Verdicts
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound
from andon_conformance.judge.transcript import EXITED

__all__ = ["REJOINING"]

_CHECKS = (
    Check("rejoin.joins", "joins again on a new stream when its stream ends", "section 3"),
    Check("rejoin.incarnation", "keeps its incarnation", "rule 8"),
    Check("rejoin.slot", "asks for its own slot or for none", "rule 8"),
    Check("rejoin.head", "reports its head, its cursor and its step", "rule 8"),
    Check("rejoin.term", "reports the greatest term that it has seen", "rule 8"),
    Check("rejoin.held", "reports the key of the averages that it holds", "rule 8"),
    Check("rejoin.not-held", "reports no key if averages of the round are missing", "rule 8"),
    Check("rejoin.streams", "opens new Reduce streams, with its new session token",
          "section 4"),
    Check("rejoin.in-sync", "applies none of its held averages if it is in sync", "rule 9"),
    Check("rejoin.record", "applies the record that follows, with the averages that it holds",
          "rule 8"),
    Check("rejoin.other-head", "asks for no work if JoinAccepted is IN_SYNC at another head",
          "section 3"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    plain, line = await bench.several_from_origin(2)
    await plain.steps(2)
    undisturbed, _ = await plain.averaged()
    await line.steps()
    incarnation = line.join.incarnation

    await line.asks()
    current = line.assign()
    await line.gives(current)
    line.end_train()
    with verdicts.deciding("rejoin.joins"):
        await line.joins()
    verdicts.passed("rejoin.joins", "it joined again")
    _judge_join(verdicts, line, incarnation)
    held = _held(line)
    verdicts.judge("rejoin.not-held", held is None, f"held key {held}")
    line.accept(pb.JOIN_STATUS_IN_SYNC)

    before, current = await _held_round(bench, line)
    line.accept(pb.JOIN_STATUS_IN_SYNC)
    with verdicts.deciding("rejoin.in-sync"):
        again, current = await line.averaged()
    _judge_streams(verdicts, line, current)
    same = before.digest.sha256 == again.digest.sha256
    verdicts.judge("rejoin.in-sync", same, "the digest of its head is as before")
    line.void(current)

    _, current = await _held_round(bench, line)
    line.accept(pb.JOIN_STATUS_RECORD_FOLLOWS, current.key)
    line.commit(current)
    with verdicts.deciding("rejoin.record"):
        after, current = await line.averaged()
    _judge_streams(verdicts, line, current)
    digest, expected = after.digest.sha256, undisturbed.digest.sha256
    evidence = f"digest {digest.hex()[:12]}, of an undisturbed client {expected.hex()[:12]}"
    verdicts.judge("rejoin.record", digest == expected, evidence)
    line.void(current)
    await _other_head(bench, line)


def _judge_join(verdicts: Verdicts, line: ScriptedLine, incarnation: int) -> None:
    join = line.join
    verdicts.judge("rejoin.incarnation", join.incarnation == incarnation, f"{join.incarnation:#x}")
    slot = join.launch_slot if join.HasField("launch_slot") else None
    verdicts.judge("rejoin.slot", slot in (None, line.setting.slot), f"slot {slot}")
    head, cursor = (
        conversion.optional_key_from_proto(join.head),
        conversion.cursor_from_proto(join.cursor),
    )
    right = (head, cursor, join.step) == (line.head, line.cursor, line.step)
    verdicts.judge("rejoin.head", right, f"head {head}, {cursor}, step {join.step}")
    term = join.greatest_term
    verdicts.judge(
        "rejoin.term", term == line.term, f"term {term:#x}, the line's term {line.term:#x}"
    )


def _judge_streams(verdicts: Verdicts, line: ScriptedLine, current: ClientRound) -> None:
    """Every stream that brought a contribution was opened since the client joined."""
    new = line.reduce_streams(line.joined_at)
    used = {given.stream for given in current.given}
    old = [stream for stream in used if stream not in new]
    openings = line.transcript.find(lambda event: event.kind == "open_round", line.joined_at)
    wrong = [each for each in openings if each.message.session_token != line.session_token]
    evidence = (
        f"{len(old)} of {len(used)} streams are from before its Join, {len(wrong)} tokens too"
    )
    verdicts.judge("rejoin.streams", not old and not wrong, evidence)


async def _other_head(bench: Bench, line: ScriptedLine) -> None:
    """The coordinator mistakes the client for another worker."""
    verdicts, name = bench.verdicts, "rejoin.other-head"
    line.end_train()
    await line.joins()
    since = line.transcript.now
    line.accept(pb.JOIN_STATUS_IN_SYNC, line.new_key())
    with verdicts.deciding(name):
        event = await line.transcript.wait(
            "RequestWork, another Join, or the client's end",
            lambda event: event.kind in (EXITED, "join") or line.on_train("request_work")(event),
            since,
        )
    asked = line.transcript.find(line.on_train("request_work"), since)
    verdicts.judge(name, not asked, f"{event.kind} came, and {len(asked)} RequestWork")


async def _held_round(bench: Bench, line: ScriptedLine) -> tuple[pb.StepReady, ClientRound]:
    """A round whose averages the client holds when its stream ends; it has joined again."""
    ready, current = await line.averaged()
    line.end_train()
    await line.joins()
    held = _held(line)
    bench.verdicts.judge("rejoin.held", held == current.key, f"held key {held}")
    return ready, current


def _held(line: ScriptedLine) -> object:
    return conversion.optional_key_from_proto(line.join.held_key)


REJOINING = Scenario(
    name="rejoin",
    summary="four broken streams: averages missing, all there, the record on its way, another head",
    checks=_CHECKS,
    play=_play,
)
