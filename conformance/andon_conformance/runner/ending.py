"""The ending: the last step and what remains after it. Played once; several checks look at it."""

from __future__ import annotations

import asyncio
from typing import Any

from andon.v1 import coordinator_pb2 as pb
from andon_conformance.runner.checks import Checks, Violation, same
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import refused_join

__all__ = ["CHECKS"]

CHECKS = Checks()

_WHY = "the suite has seen enough"


async def end(line: LineUnderTest) -> None:
    """Takes the last step and leaves, once."""
    seen = line.ending
    if seen.played:
        return
    seen.played = True
    try:
        round_ = await line.averaged()
        for rank, player in enumerate(round_.players):
            await line.ready(round_, player, stop_reason=_WHY if rank == 0 else "")
        seen.commits = await line.committed(round_)
        for player in line.players:
            await player.leave(pb.LEAVE_REASON_COMPLETE, bytes(range(32)))
        seen.status = await _await_end(line)
        seen.late = await refused_join(line.target, slot=0)
    except Violation as broken:
        seen.broken = broken


async def _await_end(line: LineUnderTest) -> pb.LineStatus:
    """The status once the line is complete, or at the end of the patience."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + line.target.patience_s
    while True:
        status = await line.status()
        if status.state == pb.LINE_STATE_COMPLETE or loop.time() > deadline:
            return status
        await asyncio.sleep(0.02)


def _reached(line: LineUnderTest, seen: Any, what: str) -> Any:
    """Something that the suite saw; `Violation` if the run did not end so far."""
    if not seen:
        raise line.ending.broken or Violation(what, "nothing")
    return seen


@CHECKS.add("end.stop", "22", scene="ending")
async def a_stop_is_told_to_all(line: LineUnderTest) -> None:
    """The stop_reason of a StepReady is in everybody's StepCommitted."""
    await end(line)
    commits = _reached(line, line.ending.commits, "the last record")
    for player, committed in commits.items():
        same(f"the stop reason at {player.name}:", _WHY, committed.stop_reason)


@CHECKS.add("end.complete", "22", scene="ending")
async def the_line_is_complete(line: LineUnderTest) -> None:
    """When all left as COMPLETE with equal digests, GetStatus says COMPLETE."""
    await end(line)
    status = _reached(line, line.ending.status, "a status after the end")
    same("the line's state", "LINE_STATE_COMPLETE", pb.LineState.Name(status.state))


@CHECKS.add("end.refused", "20", scene="ending")
async def nobody_joins_after_the_end(line: LineUnderTest) -> None:
    """A line that is over refuses a Join: COMPLETE."""
    await end(line)
    status = _reached(line, line.ending.late, "a Join after the end to be ended")
    same("the refusal", "FAILED_PRECONDITION COMPLETE", status.named)
