"""Lanes: the client exchanges over TCP lanes, which then break, and meets a listener that lies."""

from __future__ import annotations

from collections.abc import Sequence

from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.lanes import CAPABILITY, DOWN, LANE, UP
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound
from andon_conformance.judge.transcript import Event

__all__ = ["LANING"]

_CHECKS = (
    Check("lanes.proof", "opens both lanes that it asked for, each with the right proof",
          "section 17"),
    Check("lanes.frames", "then sends all contributions on the lane up, and none over gRPC",
          "section 17"),
    Check("lanes.averages", "takes averages from the lane down, and goes on", "section 17"),
    Check("lanes.broken", "gives up a round in which its lanes break, and takes the next one",
          "rule 5"),
    Check("lanes.answer", "uses gRPC if the listener does not prove itself", "section 17"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(LineSetting(lanes="right"))
    await line.bootstrap()
    await line.asks()
    current = line.assign()
    await line.gives(current)
    if not _asked(line.transcript.events):
        for check in _CHECKS:
            verdicts.skip(check.name, f"the client does not offer {CAPABILITY}")
        return
    await _judge_opening(bench, line, current)
    line.average(current)
    with verdicts.deciding("lanes.averages"):
        await line.ready(current)
        line.commit(current)
        await line.steps()
    verdicts.passed("lanes.averages", "two steps were ready with averages from the lane")

    await line.asks()
    current = line.assign()
    await line.gives(current)
    for server in line.servers:
        for stream in line.reduce_streams():
            server.lanes.close_lanes_of(stream)
    with verdicts.deciding("lanes.broken"):
        did = await line.gives_up(current)
        await line.steps()
    verdicts.passed("lanes.broken", f"{did}, and took the next step")
    await _lie(bench)


async def _judge_opening(bench: Bench, line: ScriptedLine, current: ClientRound) -> None:
    verdicts, opened = bench.verdicts, _opened(line.transcript.events)
    directions = sorted(each.message.direction for each in opened)
    proven = all(each.message.proven for each in opened)
    said = f"{len(opened)} connections, of the directions {directions}, "
    said += "all proven" if proven else "not all proven"
    if not verdicts.judge("lanes.proof", directions == [UP, DOWN] and proven, said):
        raise Stopped("the client opened no lanes")
    streams = {each.stream for each in opened}
    sent = len(current.given) + len(current.abstained)
    framed = sum(line.servers[0].lanes.frames.get(stream, 0) for stream in streams)
    verdicts.judge("lanes.frames", framed == sent, f"{framed} of {sent} messages were frames")


async def _lie(bench: Bench) -> None:
    """Another client, on a line whose listener answers with 32 wrong bytes."""
    verdicts, name = bench.verdicts, "lanes.answer"
    line = await bench.start(LineSetting(lanes="liar"))
    await line.bootstrap()
    await line.asks()
    current = line.assign()
    with verdicts.deciding(name):
        await line.gives(current)
        line.average(current)
        await line.ready(current)
    framed = sum(line.servers[0].lanes.frames.values())
    tried = len(_opened(line.transcript.events))
    evidence = f"it tried {tried} lanes, sent {framed} frames, and was ready over gRPC"
    verdicts.judge(name, tried and not framed, evidence)


def _asked(events: Sequence[Event]) -> bool:
    return any(
        event.kind == "open_round" and CAPABILITY in event.message.capabilities for event in events
    )


def _opened(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == LANE]


LANING = Scenario(
    name="lanes",
    summary="the client exchanges over TCP lanes, which then break; another meets one that lies",
    checks=_CHECKS,
    play=_play,
)
