"""The sessions of this process: its groups share them, and the last group of one leaves it.

Theory of operation. The first group forms a session of its ranks. A later group whose ranks are all
of one session uses that: its calls take the same lanes. As all ranks of a script make their groups
in the same order, they choose alike.

A script may destroy its last group and make groups again: that is another session, by another key.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from andon.protocol.limits import clipped
from andon.protocol.sessions import RankFault, RankReport, SessionEnd
from andon_torch.engine import Engine, open_engine
from andon_torch.gate import GradientWatch, gate_mode
from andon_torch.places import Meeting, configuration, located
from andon_torch.process_group import AndonProcessGroup
from andon_torch.recording import Recording
from andon_trainer.errors import JoinRefused
from andon_trainer.peers.attending import Attending

__all__ = ["NewGroup", "TorchSession", "group_of", "living", "session_of"]

_MOST_NUMBERS = 4096
"""Logged numbers that are kept until a report takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A group that PyTorch wants."""

    name: str
    rank: int
    """This process's place in it."""
    ranks: tuple[int, ...]
    """Its ranks, as the script numbers them."""
    whole: bool
    """Whether it is the script's default group, or has all of its ranks."""
    timeout: timedelta
    store: Any
    """A `torch.distributed.Store` of its own."""


class TorchSession:
    """This process's part in one session. Any thread may use it."""

    def __init__(self, engine: Engine, ranks: tuple[int, ...], watch: GradientWatch) -> None:
        """Takes a session that was formed.

        Args:
            engine: its lanes and calls.
            ranks: the script's ranks that it has, in its order.
            watch: decides about gates, and counts steps.
        """
        self.ranks = ranks
        self.owner = os.getpid()
        self._engine = engine
        self.watch = watch
        self._lock = threading.Lock()
        self._groups = 0
        self._numbers: deque[tuple[str, int, float]] = deque(maxlen=_MOST_NUMBERS)
        engine.attending.report_from(self.report)

    @property
    def attending(self) -> Attending:
        """Its control stream."""
        return self._engine.attending

    @property
    def recording(self) -> Recording | None:
        """Its trace; None: nothing is recorded."""
        return self._engine.recording

    def group(self, name: str, wanted: NewGroup) -> AndonProcessGroup:
        """A group of some of the session's ranks; `name` was never used before."""
        places = [self.ranks.index(rank) for rank in wanted.ranks]
        with self._lock:
            self._groups += 1
        return AndonProcessGroup(
            self._engine.group(name, places, self.watch),
            wanted.name,
            wanted.timeout,
            self.watch,
            self._leave_group,
        )

    def note(self, name: str, value: float, step: int | None) -> None:
        """Keeps a number for the next report."""
        with self._lock:
            self._numbers.append((name, self.watch.steps if step is None else step, value))

    def report(self) -> RankReport:
        """What this rank did, and does; takes the numbers that were logged."""
        with self._lock:
            numbers = tuple(self._numbers)
            self._numbers.clear()
        return replace(
            self._engine.report(),
            steps=self.watch.steps,
            overflows=self.watch.overflows,
            numbers=numbers,
        )

    def _leave_group(self) -> None:
        with self._lock:
            self._groups -= 1
            if self._groups or os.getpid() != self.owner:
                return
        with _lock:
            if self in _living:
                _living.remove(self)
        failure = _failure()
        attending = self._engine.attending
        if failure is not None and attending.over is None:
            attending.fault(
                RankFault(
                    end=SessionEnd.SCRIPT_FAILED,
                    culprit=attending.rank,
                    message=clipped(f"{type(failure).__name__}: {failure}"),
                )
            )
        attending.leave(done=failure is None)


def _failure() -> BaseException | None:
    """The error that is on its way out of the script, through whoever destroys the group."""
    error = sys.exception()
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return error


_lock = threading.Lock()
_living: list[TorchSession] = []
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""How often this process made a group of this name and these ranks."""


def living() -> list[TorchSession]:
    """The sessions that this process is in, in the order in which they were formed."""
    with _lock:
        return [each for each in _living if each.owner == os.getpid()]


def group_of(wanted: NewGroup) -> AndonProcessGroup:
    """The group that PyTorch wants, in a session that has its ranks, or in one of its own.

    Raises:
        JoinRefused: this process can't be that rank.
        LineLost: no coordinator was found.
        CallTimedOut: ranks are missing.
    """
    number = _made[wanted.name, wanted.ranks]
    _made[wanted.name, wanted.ranks] += 1
    # Peers number a group by its name and ranks; one that was destroyed may be made again.
    name = f"{wanted.name}#{number}" if number else wanted.name
    return _session_of(wanted, f"andon/{number}").group(name, wanted)


def session_of(wanted: NewGroup) -> TorchSession:
    """A session that has the ranks of a group which another backend moves; raises as `group_of`."""
    number = _made[wanted.name, wanted.ranks]
    _made[wanted.name, wanted.ranks] += 1
    return _session_of(wanted, f"andon/watch{number}")


def _session_of(wanted: NewGroup, prefix: str) -> TorchSession:
    session = next((each for each in living() if set(wanted.ranks) <= set(each.ranks)), None)
    if session is None:
        session = _form(wanted, prefix)
        with _lock:
            _living.append(session)
    return session


def _form(wanted: NewGroup, prefix: str) -> TorchSession:
    watch = GradientWatch(gate_mode(os.environ))
    config = configuration(os.environ)
    meeting = Meeting(
        store=wanted.store,
        rank=wanted.rank,
        ranks=wanted.ranks,
        whole=wanted.whole,
        timeout=wanted.timeout,
        prefix=prefix,
    )
    _refuse_several(config.address, wanted)
    with located(config, meeting) as place:
        engine = open_engine(config, place, meeting, device=_device())
    return TorchSession(engine, wanted.ranks, watch)


def _refuse_several(address: str, wanted: NewGroup) -> None:
    """Refuses what would bring different groups' ranks together at one coordinator."""
    if address and not wanted.whole:
        raise JoinRefused(
            "other_use",
            f"ANDON_ADDRESS names one run, and this group has ranks {_text(wanted.ranks)} of the "
            "script only: unset it, and each such group serves itself; or make the default group "
            "with init_process_group('andon')",
        )
    if others := living():
        raise JoinRefused(
            "other_use",
            f"this process has a session of ranks {_text(others[0].ranks)}, and is to join one of "
            f"ranks {_text(wanted.ranks)}: make the default group with "
            "init_process_group('andon'), and its parts share its session",
        )


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _device() -> tuple[str, str]:
    """Where this process computes, and the name of the device."""
    if torch.cuda.is_available():
        return "cuda", str(torch.cuda.get_device_name())
    return "cpu", ""
