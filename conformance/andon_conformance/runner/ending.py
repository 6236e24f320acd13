"""Ending: the run's last step, and what is left of the line after it. Played once, judged here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from andon.v1 import coordinator_pb2 as pb
from andon_conformance.runner.checks import Broken, check, same
from andon_conformance.runner.line import Line
from andon_conformance.runner.player import Player
from andon_conformance.runner.talk import Status

__all__ = ["CHECKS", "Ending"]

_WHY = "the suite has seen enough"


@dataclass
class Ending:
    """What was seen as the run ended; None where it did not come so far."""

    commits: dict[Player, Any] = field(default_factory=dict)
    status: pb.LineStatus | None = None
    late: Status | None = None
    """How a Join after the end was ended."""
    broken: Broken | None = None
    played: bool = False

    async def play(self, line: Line) -> None:
        """Takes the last step and leaves, once."""
        if self.played:
            return
        self.played = True
        try:
            round_ = await line.deal()
            from andon_conformance.runner.gradients import exchange

            await exchange(line, round_)
            for rank, player in enumerate(round_.players):
                await line.ready(round_, player, stop_reason=_WHY if rank == 0 else "")
            self.commits = await line.committed(round_)
            for player in line.players:
                await player.leave(pb.LEAVE_REASON_COMPLETE, bytes(range(32)))
            self.status = await self._await_end(line)
            stranger = Player(line.target, 0)
            talk = stranger.open_train()
            await talk.send(stranger.join_message())
            self.late = await talk.end()
            await stranger.close()
        except Broken as broken:
            self.broken = broken

    async def _await_end(self, line: Line) -> pb.LineStatus:
        """The status once the line is over, or what it is when patience ends."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + line.target.patience_s
        while True:
            status = await line.status()
            if status.state == pb.LINE_STATE_COMPLETE or loop.time() > deadline:
                return status
            await asyncio.sleep(0.02)

    def reached(self, seen: Any, what: str) -> Any:
        """Something that was seen.

        Raises:
            Broken: the run did not end so far.
        """
        if not seen:
            raise self.broken or Broken(what, "nothing")
        return seen


@check(
    "end.stop",
    "22",
    "The stop_reason of a StepReady is in everybody's StepCommitted",
    scene="ending",
)
async def a_stop_is_told_to_all(line: Line) -> None:
    await line.ending.play(line)
    commits = line.ending.reached(line.ending.commits, "the last record")
    for player, committed in commits.items():
        same(f"the stop reason at {player.name}:", _WHY, committed.stop_reason)


@check(
    "end.complete",
    "22",
    "When all left as COMPLETE with equal digests, GetStatus says COMPLETE",
    scene="ending",
)
async def the_line_is_complete(line: Line) -> None:
    await line.ending.play(line)
    status = line.ending.reached(line.ending.status, "a status after the end")
    same("the line's state", "LINE_STATE_COMPLETE", pb.LineState.Name(status.state))


@check(
    "end.refused",
    "20",
    "A line that is over refuses a Join: COMPLETE",
    scene="ending",
)
async def nobody_joins_after_the_end(line: Line) -> None:
    await line.ending.play(line)
    status = line.ending.reached(line.ending.late, "a Join after the end to be ended")
    same("the refusal", "FAILED_PRECONDITION COMPLETE", f"{status.code.name} {status.reason}")


CHECKS = (a_stop_is_told_to_all, the_line_is_complete, nobody_joins_after_the_end)
