"""Joining: what a client reports of itself, and what it must not send yet."""

from __future__ import annotations

from andon.protocol.limits import PROTOCOL_VERSION
from andon.v1 import coordinator_pb2 as pb
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.control import LineSetting, layout_of
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.scenarios.unknown import UNKNOWN
from andon_conformance.judge.server import TRAIN
from andon_conformance.judge.transcript import HEARTBEAT, OPENED

__all__ = ["JOINING"]

_CHECKS = (
    Check("join.first", "sends Join as the first message of its stream", "section 3"),
    Check("join.patience", "sends nothing else before JoinAccepted", "section 3"),
    Check("join.version", f"sends protocol version {PROTOCOL_VERSION}", "section 3"),
    Check("join.run", "names the run of its environment", "section 3"),
    Check("join.incarnation", "sends a random incarnation other than 0", "section 3"),
    Check("join.layout", "sends a layout of unique names", "section 7"),
    Check("join.layout-digest", "sends the digest of its layout's text", "section 7"),
    Check("join.plan", "sends a plan with samples in a step", "section 9"),
    Check("join.fresh", "reports no head, no held key and no term at first", "rule 11"),
    Check("join.slot", "asks for the slot that its launcher gave it", "section 3"),
    Check("join.token", "sends the token, without the line break at its file's end", "section 3"),
    Check("join.no-work", "asks for no work while the line is fresh", "section 3"),
    Check("join.heartbeat", "sends heartbeats, counted from 1, within the lease", "section 3"),
    Check("join.unknown", "ignores unknown cases and fields", "section 3"),
)

_TOKEN = b"a-token-of-the-judge"
_BEATS = 4
_LEASE_S = 1.5


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(LineSetting(slot=1, workers=3, token=_TOKEN, lease_s=_LEASE_S))
    transcript = line.transcript
    with verdicts.deciding("join.first"):
        await transcript.wait("a Train stream", lambda event: event.kind == OPENED)
        first = await transcript.wait(
            "the first message",
            lambda event: event.kind != OPENED and event.stream and event.stream.method == TRAIN,
        )
    if not verdicts.judge("join.first", first.kind == "join", f"the first was {first.kind}"):
        return
    await line.joins()
    early = await transcript.pause(beats=0)
    beats = transcript.find(lambda event: event.kind == HEARTBEAT)
    evidence = ", ".join(map(str, [*beats, *early])) or "nothing"
    verdicts.judge("join.patience", not early and not beats, f"{evidence} came before the answer")
    _judge_join(bench, line)

    since = transcript.now
    line.accept(pb.JOIN_STATUS_FRESH)
    line.train.send(UNKNOWN)
    answer = pb.TrainResponse(heartbeat_answer=pb.HeartbeatAnswer(sequence=1))
    line.train.send(answer.SerializeToString() + UNKNOWN)
    with verdicts.deciding("join.heartbeat"):
        await transcript.wait(
            f"heartbeat {_BEATS}",
            lambda event: event.kind == HEARTBEAT and event.message.sequence >= _BEATS,
            since,
            patience_s=_BEATS * line.setting.lease_s,
        )
    _judge_heartbeats(bench, line)
    asked = transcript.find(line.on_train("request_work"))
    verdicts.judge("join.no-work", not asked, f"{len(asked)} RequestWork came")
    with verdicts.deciding("join.unknown"):
        line.send_initial_record()
        line.train.send(UNKNOWN)
        await line.asks()
    verdicts.judge("join.unknown", line.train.is_open, "its stream stayed open, and it went on")


def _judge_join(bench: Bench, line: ScriptedLine) -> None:
    verdicts, join = bench.verdicts, line.join
    version = join.protocol_version
    verdicts.judge("join.version", version == PROTOCOL_VERSION, f"version {version}")
    verdicts.judge("join.run", join.run_id == line.run_id, f"run {join.run_id!r}")
    verdicts.judge("join.incarnation", join.incarnation, f"incarnation {join.incarnation:#x}")
    try:
        layout = layout_of(join.layout)
    except ValueError as error:
        verdicts.failed("join.layout", str(error))
    else:
        evidence = f"{len(layout.blocks)} blocks of {layout.elements} elements"
        verdicts.passed("join.layout", evidence)
        verdicts.judge(
            "join.layout-digest",
            join.layout.digest == layout.digest,
            f"it says {join.layout.digest.hex() or 'nothing'}, and it is {layout.digest.hex()}",
        )
    plan = join.plan
    sane = plan.global_batch and (plan.dataset_size or not plan.HasField("dataset_size"))
    verdicts.judge("join.plan", sane, f"{plan.global_batch} samples a step")
    known = [name for name in ("head", "held_key", "halt") if join.HasField(name)]
    known += ["greatest_term"] * bool(join.greatest_term)
    verdicts.judge("join.fresh", not known, f"{', '.join(known) or 'nothing'} was reported")
    slot = join.launch_slot if join.HasField("launch_slot") else None
    verdicts.judge("join.slot", slot == line.setting.slot, f"slot {slot}")
    verdicts.judge("join.token", join.token == _TOKEN, f"{len(join.token)} bytes of token")


def _judge_heartbeats(bench: Bench, line: ScriptedLine) -> None:
    beats = line.transcript.find(line.on_train(HEARTBEAT))
    numbers = [beat.message.sequence for beat in beats]
    pace_s = (beats[-1].at - beats[0].at) / (len(beats) - 1)
    bench.verdicts.judge(
        "join.heartbeat",
        numbers == list(range(1, len(numbers) + 1)) and pace_s < line.setting.lease_s,
        f"numbers {numbers}, one each {pace_s:.2f} s, with a lease of {line.setting.lease_s} s",
    )


JOINING = Scenario(
    name="join",
    summary="the first messages, with a token, and patience until the line is bootstrapped",
    checks=_CHECKS,
    play=_play,
)
