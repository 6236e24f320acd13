"""Outages: a line that refuses the client, is not reachable yet, or dismisses the client."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Overdue
from andon_conformance.judge.server import TRAIN
from andon_conformance.judge.streams import refusal
from andon_conformance.judge.transcript import EXITED, OPENED, Event

__all__ = ["ABSENCE", "REFUSAL", "SHUTDOWN"]

_MOST_A_SECOND, _MOST_LATER = 20, 6
_AWAY_S, _LATER_S = 3.0, 2.0
_FAREWELL_S = 5.0


async def _refuse(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start()
    await line.joins()
    line.train.end_with(
        refusal("LAYOUT_DIFFERS", "the layouts differ", component="w0", mine="(7,)", theirs="(8,)")
    )
    transcript, name = line.transcript, "refusal.final"
    since = transcript.now
    with verdicts.deciding(name):
        event = await transcript.wait(
            "the end of the process", lambda event: event.kind == EXITED or _joins(event), since
        )
    if event.kind != EXITED:
        verdicts.failed(name, "it joined again, though it was refused")
        return
    verdicts.judge(name, event.message, f"it ended with exit code {event.message}")


async def _stay_away(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(away=True)
    transcript = line.transcript
    with verdicts.deciding("absence.patience"):
        await transcript.wait("a Train stream", _joins)
        await transcript.pause(_AWAY_S, beats=0)
    tries = [event.at for event in transcript.find(_joins)]
    most = max(sum(at <= other < at + 1.0 for other in tries) for at in tries)
    late = sum(at >= tries[0] + _LATER_S for at in tries)
    verdicts.judge(
        "absence.pace",
        most <= _MOST_A_SECOND and late <= _MOST_LATER,
        f"{most} tries in a second, {late} in the second after {_LATER_S:g} s",
    )
    since = transcript.now
    line.servers[0].away = False
    with verdicts.deciding("absence.patience"):
        await transcript.wait("a try after the coordinator came back", _joins, since)
    verdicts.passed("absence.patience", f"it tried {len(tries)} times, and came")


async def _dismiss(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start()
    await line.bootstrap()
    await line.asks()
    since = line.transcript.now
    line.train.send(pb.TrainResponse(shutdown=pb.Shutdown(message="the judge needs it no more")))
    line.train.end()
    try:
        event = await line.transcript.wait(
            "anything", lambda event: event.kind == EXITED or _joins(event), since,
            patience_s=_FAREWELL_S,
        )  # fmt: skip
        evidence = "it ended" if event.kind == EXITED else "it joined again"
    except Overdue:
        evidence = f"it neither ended nor joined again within {_FAREWELL_S:g} s"
    if verdicts.judge("shutdown.final", evidence != "it joined again", evidence):
        await _end_all(bench)


async def _end_all(bench: Bench) -> None:
    """The run ends without a last step for the client."""
    verdicts = bench.verdicts
    line = await bench.start()
    await line.bootstrap()
    await line.asks()
    since = line.transcript.now
    ending = pb.Shutdown(message="an operator drains the line", stop_reason="drained")
    line.train.send(pb.TrainResponse(shutdown=ending))
    with verdicts.deciding("shutdown.leave"):
        event = await line.transcript.wait("Leave", line.on_train("leave"), since)
    leave: pb.Leave = event.message
    head = conversion.optional_key_from_proto(leave.digest.head)
    right = leave.reason == pb.LEAVE_REASON_DRAINED and leave.final_step == line.step
    right = right and head == line.head and len(leave.digest.sha256) == 32
    evidence = f"{pb.LeaveReason.Name(leave.reason)}, step {leave.final_step}, digest of {head}"
    verdicts.judge("shutdown.leave", right, evidence)
    line.train.end()
    with verdicts.deciding("shutdown.exit"):
        ended = await line.transcript.wait("the end", lambda event: event.kind == EXITED, since)
    verdicts.judge("shutdown.exit", ended.message == 0, f"exit code {ended.message}")


def _joins(event: Event) -> bool:
    return event.kind == OPENED and event.stream.method == TRAIN


REFUSAL = Scenario(
    name="refusal",
    summary="a line that refuses the client",
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
    summary="a coordinator that does not answer yet",
    checks=(
        Check("absence.patience", "keeps trying while nobody answers", "section 3"),
        Check(
            "absence.pace",
            f"tries to join at most {_MOST_A_SECOND} times in a second, and {_MOST_LATER} after "
            f"{_LATER_S:g} s",
            "section 3",
        ),
    ),
    play=_stay_away,
)

SHUTDOWN = Scenario(
    name="shutdown",
    summary="a line that dismisses the client, and a run that is over for all workers",
    checks=(
        Check("shutdown.final", "does not join again after Shutdown", "section 3"),
        Check(
            "shutdown.leave",
            "leaves after Shutdown with a stop_reason, as DRAINED if that is `drained`",
            "section 3",
        ),
        Check("shutdown.exit", "then ends with exit code 0", "section 3"),
    ),
    play=_dismiss,
)
