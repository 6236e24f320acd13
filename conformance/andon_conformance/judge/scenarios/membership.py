"""Membership: how a client joins, waits for a line, and leaves it."""

from __future__ import annotations

from andon.protocol.limits import PROTOCOL_VERSION
from andon.v1 import coordinator_pb2 as pb
from andon.wire.conversion import optional_key_from_proto as key_in
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Overdue
from andon_conformance.judge.control import LineSetting, layout_of, opened
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import short
from andon_conformance.judge.server import TRAIN, UNKNOWN
from andon_conformance.judge.streams import refusal
from andon_conformance.judge.transcript import EXITED, HEARTBEAT, OPENED, Event

__all__ = ["absent", "dismissed", "joining", "leaving", "refused"]

_TOKEN = b"a-token-of-the-judge"
_BEATS = 4
_LEASE_S = 1.5
_MOST_A_SECOND, _MOST_LATER = 20, 6
_AWAY_S, _LATER_S = 3.0, 2.0
_FAREWELL_S = 5.0

_tries = opened(TRAIN)


def _ends(event: Event) -> bool:
    return event.kind == EXITED


@scenario(
    "join",
    f"""
    join.first          section 3   sends Join as the first message of its stream
    join.patience       section 3   sends nothing else before JoinAccepted
    join.version        section 3   sends protocol version {PROTOCOL_VERSION}
    join.run            section 3   names the run of its environment
    join.incarnation    section 3   sends a random incarnation other than 0
    join.layout         section 7   sends a layout of unique names
    join.layout-digest  section 7   sends the digest of its layout's text
    join.plan           section 9   sends a plan with samples in a step
    join.fresh          rule 11     reports no head, no held key and no term at first
    join.slot           section 3   asks for the slot that its launcher gave it
    join.token          section 3   sends the token, without the line break at its file's end
    join.no-work        section 3   asks for no work while the line is fresh
    join.heartbeat      section 3   sends heartbeats, counted from 1, within the lease
    join.unknown        section 3   ignores unknown cases and fields
    """,
)
async def joining(bench: Bench) -> None:
    """The first messages, with a token, and patience until the line is bootstrapped."""
    line = await bench.start(LineSetting(slot=1, workers=3, token=_TOKEN, lease_s=_LEASE_S))
    transcript = line.transcript
    with bench.verdicts.deciding("join.first"):
        await transcript.wait("a Train stream", lambda event: event.kind == OPENED)
        first = await transcript.wait(
            "the first message",
            lambda event: event.kind != OPENED and event.stream and event.stream.method == TRAIN,
        )
    if not line.judge("join.first", first.kind == "join", f"the first was {first.kind}"):
        return
    await line.joins()
    early = await transcript.pause(beats=0)
    beats = transcript.find(lambda event: event.kind == HEARTBEAT)
    evidence = ", ".join(map(str, [*beats, *early])) or "nothing"
    line.judge("join.patience", not early and not beats, f"{evidence} came before the answer")
    _judge_join(bench, line)

    since = transcript.now
    line.accept(pb.JOIN_STATUS_FRESH)
    # A case of a later version, and a known message with a field of one.
    line.train.send(UNKNOWN)
    answer = pb.TrainResponse(heartbeat_answer=pb.HeartbeatAnswer(sequence=1))
    line.train.send(answer.SerializeToString() + UNKNOWN)
    last_beat = transcript.wait(
        f"heartbeat {_BEATS}",
        lambda event: event.kind == HEARTBEAT and event.message.sequence >= _BEATS,
        since,
        patience_s=_BEATS * line.setting.lease_s,
    )
    await line.must("join.heartbeat", last_beat)
    _judge_heartbeats(line)
    asked = transcript.find(line.on_train("request_work"))
    line.judge("join.no-work", not asked, f"{len(asked)} RequestWork came")
    line.send_initial_record()
    line.train.send(UNKNOWN)
    await line.must("join.unknown", line.asks())
    line.judge("join.unknown", line.train.is_open, "its stream stayed open, and it went on")


def _judge_join(bench: Bench, line: ScriptedLine) -> None:
    join, version = line.join, line.join.protocol_version
    line.judge("join.version", version == PROTOCOL_VERSION, f"version {version}")
    line.judge("join.run", join.run_id == line.run_id, f"run {join.run_id!r}")
    line.judge("join.incarnation", join.incarnation, f"incarnation {join.incarnation:#x}")
    try:
        layout = layout_of(join.layout)
    except ValueError as error:
        bench.verdicts.failed("join.layout", str(error))
    else:
        text = f"{len(layout.blocks)} blocks of {layout.elements} elements"
        bench.verdicts.passed("join.layout", text)
        said, digest = join.layout.digest, layout.digest
        text = f"it says {said.hex() or 'nothing'}, and it is {digest.hex()}"
        line.judge("join.layout-digest", said == digest, text)
    plan = join.plan
    sane = plan.global_batch and (plan.dataset_size or not plan.HasField("dataset_size"))
    line.judge("join.plan", sane, f"{plan.global_batch} samples a step")
    known = [name for name in ("head", "held_key", "halt") if join.HasField(name)]
    known += ["greatest_term"] * bool(join.greatest_term)
    line.judge("join.fresh", not known, f"{', '.join(known) or 'nothing'} was reported")
    slot = join.launch_slot if join.HasField("launch_slot") else None
    line.judge("join.slot", slot == line.setting.slot, f"slot {slot}")
    line.judge("join.token", join.token == _TOKEN, f"{len(join.token)} bytes of token")


def _judge_heartbeats(line: ScriptedLine) -> None:
    beats = line.transcript.find(line.on_train(HEARTBEAT))
    numbers = [beat.message.sequence for beat in beats]
    pace_s = (beats[-1].at - beats[0].at) / (len(beats) - 1)
    line.judge(
        "join.heartbeat",
        numbers == list(range(1, len(numbers) + 1)) and pace_s < line.setting.lease_s,
        f"numbers {numbers}, one each {pace_s:.2f} s, with a lease of {line.setting.lease_s} s",
    )


@scenario(
    "refusal",
    """
    refusal.final  section 3  ends with an exit code other than 0 when it is refused, and
                              does not join again
    """,
)
async def refused(bench: Bench) -> None:
    """A line that refuses the client."""
    line = await bench.start()
    await line.joins()
    line.train.end_with(
        refusal("LAYOUT_DIFFERS", "the layouts differ", component="w0", mine="(7,)", theirs="(8,)")
    )
    since, name = line.transcript.now, "refusal.final"
    ending = line.transcript.wait(
        "the end of the process", lambda event: _ends(event) or _tries(event), since
    )
    event = await line.must(name, ending)
    if _ends(event):
        line.judge(name, event.message, f"it ended with exit code {event.message}")
    else:
        bench.verdicts.failed(name, "it joined again, though it was refused")


@scenario(
    "absence",
    f"""
    absence.patience  section 3  keeps trying while nobody answers
    absence.pace      section 3  tries to join at most {_MOST_A_SECOND} times in a second,
                                 and {_MOST_LATER} after {_LATER_S:g} s
    """,
)
async def absent(bench: Bench) -> None:
    """A coordinator that does not answer yet."""
    line = await bench.start(away=True)
    transcript = line.transcript
    with bench.verdicts.deciding("absence.patience"):
        await transcript.wait("a Train stream", _tries)
        await transcript.pause(_AWAY_S, beats=0)
    tries = [event.at for event in transcript.find(_tries)]
    most = max(sum(at <= other < at + 1.0 for other in tries) for at in tries)
    late = sum(at >= tries[0] + _LATER_S for at in tries)
    line.judge(
        "absence.pace",
        most <= _MOST_A_SECOND and late <= _MOST_LATER,
        f"{most} tries in a second, {late} in the second after {_LATER_S:g} s",
    )
    since = transcript.now
    # Only now: tries before this line were in vain.
    line.servers[0].away = False
    returned = transcript.wait("a try after the coordinator came back", _tries, since)
    await line.must("absence.patience", returned)
    bench.verdicts.passed("absence.patience", f"it tried {len(tries)} times, and came")


@scenario(
    "leave",
    """
    leave.complete  section 3   leaves as COMPLETE after the step with a stop_reason
    leave.step      section 3   reports its final step
    leave.digest    section 3   reports the digest of its final weights, with their head
    leave.no-work   section 3   asks for no work after the last step
    leave.exit      section 14  ends with exit code 0
    """,
)
async def leaving(bench: Bench) -> None:
    """Two steps, and the second is the last."""
    line = await bench.started()
    await line.steps()
    before, current = await line.averaged()
    since = line.transcript.now
    line.commit(current, stop_reason="steps")
    leave = await line.must("leave.complete", _leave(line, since))
    right = leave.reason == pb.LEAVE_REASON_COMPLETE
    line.judge("leave.complete", right, pb.LeaveReason.Name(leave.reason))
    line.judge("leave.step", leave.final_step == 2, f"final step {leave.final_step}")
    head, sha256 = key_in(leave.digest.head), leave.digest.sha256
    right = head == line.head and len(sha256) == 32 and sha256 != before.digest.sha256
    line.judge("leave.digest", right, f"digest {short(sha256)} of {head}")
    asked = line.transcript.find(line.on_train("request_work"), since)
    line.judge("leave.no-work", not asked, f"{len(asked)} RequestWork came after the last step")
    await _judge_exit(line, "leave.exit", since)


@scenario(
    "shutdown",
    """
    shutdown.final  section 3  does not join again after Shutdown
    shutdown.leave  section 3  leaves after Shutdown with a stop_reason, as DRAINED if that is
                               `drained`
    shutdown.exit   section 3  then ends with exit code 0
    """,
)
async def dismissed(bench: Bench) -> None:
    """A line that dismisses the client, and a run that is over for all workers."""
    line = await bench.started()
    await line.asks()
    since = line.transcript.now
    line.train.send(pb.TrainResponse(shutdown=pb.Shutdown(message="the judge needs it no more")))
    line.train.end()
    try:
        event = await line.transcript.wait(
            "anything", lambda event: _ends(event) or _tries(event), since, patience_s=_FAREWELL_S
        )
        evidence = "it ended" if _ends(event) else "it joined again"
    except Overdue:
        # The client may also wait for a person: only another Join is wrong.
        evidence = f"it neither ended nor joined again within {_FAREWELL_S:g} s"
    if line.judge("shutdown.final", evidence != "it joined again", evidence):
        await _end_all(bench)


async def _end_all(bench: Bench) -> None:
    """The run ends without a last step for the client."""
    line = await bench.started()
    await line.asks()
    since = line.transcript.now
    ending = pb.Shutdown(message="an operator drains the line", stop_reason="drained")
    line.train.send(pb.TrainResponse(shutdown=ending))
    leave = await line.must("shutdown.leave", _leave(line, since))
    head = key_in(leave.digest.head)
    right = leave.reason == pb.LEAVE_REASON_DRAINED and leave.final_step == line.step
    right = right and head == line.head and len(leave.digest.sha256) == 32
    evidence = f"{pb.LeaveReason.Name(leave.reason)}, step {leave.final_step}, digest of {head}"
    line.judge("shutdown.leave", right, evidence)
    await _judge_exit(line, "shutdown.exit", since)


async def _leave(line: ScriptedLine, since: int) -> pb.Leave:
    leave: pb.Leave = (await line.transcript.wait("Leave", line.on_train("leave"), since)).message
    return leave


async def _judge_exit(line: ScriptedLine, name: str, since: int) -> None:
    """The stream ends, after which the client's process must end as a success."""
    line.train.end()
    ended = await line.must(name, line.transcript.wait("the end", _ends, since))
    line.judge(name, ended.message == 0, f"exit code {ended.message}")
