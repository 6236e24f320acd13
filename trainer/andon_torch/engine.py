"""The engine of a session: its control stream, its lanes, and the calls of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from andon_torch.places import Meeting
from andon_torch.process_group import Caller
from andon_trainer.config import LineConfig
from andon_trainer.peers.attendance import RankReport
from andon_trainer.peers.attending import Attending
from andon_trainer.peers.serving import Located

__all__ = ["Engine", "open_engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a session of this process is made of."""

    attending: Attending
    peers: Any

    def group(self, name: str, places: Sequence[int]) -> Caller:
        """The group of these ranks of the session, this one among them."""
        caller: Caller = self.peers.group(name, places)
        return caller

    def report(self) -> RankReport:
        """What this rank did, and does."""
        report: RankReport = self.peers.report()
        return report


def open_engine(
    config: LineConfig, located: Located, meeting: Meeting, *, device: tuple[str, str]
) -> Engine:
    """Forms the session of the ranks that meet.

    Raises:
        JoinRefused: this process can't be that rank.
        LineLost: no coordinator answers.
        CallTimedOut: ranks are missing.
    """
    raise NotImplementedError
