"""Outages: a line that refuses the client, that is not there yet, or that sends it away."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon_cli.conformance.judge.bench import Bench, Scenario
from andon_cli.conformance.judge.checks import Check
from andon_cli.conformance.judge.scenarios.paces import QUIET_S
from andon_cli.conformance.judge.server import TRAIN
from andon_cli.conformance.judge.streams import refusal
from andon_cli.conformance.judge.transcript import EXITED, OPENED, Event, Transcript

__all__ = ["ABSENCE", "REFUSAL", "SHUTDOWN"]

_MOST_A_SECOND = 20
_AWAY_S = 1.5


async def _refuse(bench: Bench) -> None:
    findings = bench.findings
    line = await bench.start()
    await line.joins()
    line.train.end_with(
        refusal("LAYOUT_DIFFERS", "the layouts differ", component="w0", mine="(7,)", theirs="(8,)")
    )
    transcript, name = line.transcript, "refusal.final"
    since = transcript.now
    with findings.deciding(name):
        event = await transcript.wait(
            "the end of the process", lambda event: event.kind == EXITED or _joins(event), since
        )
    if event.kind != EXITED:
        findings.failed(name, "it joined again, though it was refused")
        return
    findings.judge(name, event.message, f"it ended with exit code {event.message}")


async def _stay_away(bench: Bench) -> None:
    findings = bench.findings
    line = await bench.start(away=True)
    transcript = line.transcript
    with findings.deciding("absence.patience"):
        await transcript.wait("a Train stream", _joins)
        await transcript.pause(_AWAY_S, beats=0)
    tries = [event.at for event in transcript.find(_joins)]
    most = max(sum(at <= other < at + 1.0 for other in tries) for at in tries)
    since = transcript.now
    line.server.away = False
    with findings.deciding("absence.patience"):
        await transcript.wait("a try after the coordinator came back", _joins, since)
    findings.passed("absence.patience", f"it tried {len(tries)} times, and came")
    findings.judge(
        "absence.pace",
        most <= _MOST_A_SECOND,
        f"{most} tries within a second; at most {_MOST_A_SECOND} are borne",
    )


async def _dismiss(bench: Bench) -> None:
    findings = bench.findings
    line = await bench.start()
    await line.founded()
    await line.asks()
    since = line.transcript.now
    line.train.send(pb.TrainResponse(shutdown=pb.Shutdown(message="the judge needs it no more")))
    line.train.end()
    told = await _later_joins(line.transcript, since)
    findings.judge("shutdown.final", not told, f"{told} joins came after Shutdown")


async def _later_joins(transcript: Transcript, since: int) -> int:
    await transcript.pause(2 * QUIET_S, beats=0)
    return len(transcript.find(_joins, since))


def _joins(event: Event) -> bool:
    return event.kind == OPENED and event.stream.method == TRAIN


REFUSAL = Scenario(
    name="refusal",
    summary="a line that the client does not fit",
    checks=(
        Check(
            "refusal.final",
            "ends with an exit code other than 0 when it is refused, and does not join again",
            "section 3",
        ),
    ),
    play=_refuse,
)

ABSENCE = Scenario(
    name="absence",
    summary="a coordinator that is not there yet",
    checks=(
        Check("absence.patience", "keeps trying while nobody answers", "section 13"),
        Check(
            "absence.pace", f"tries at most {_MOST_A_SECOND} times a second to join", "section 13"
        ),
    ),
    play=_stay_away,
)

SHUTDOWN = Scenario(
    name="shutdown",
    summary="a line that sends the client away",
    checks=(Check("shutdown.final", "does not join again after Shutdown", "section 3"),),
    play=_dismiss,
)
