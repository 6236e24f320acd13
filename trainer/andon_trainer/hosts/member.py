"""A host's membership: the leader has a place on the line, and tells its followers what it learns.

Theory of operation. The processes of a host run the same script, and so the same steps, in
lockstep. Where a step asks the line (for work, a commit, a mean), the leader asks and tells the
followers the answer, together with where the line stands now. An answer may be an exception: the
followers raise the same one. If the leader got the line's state by a transfer, it is passed on
before the answer is used. Calls that a script makes by itself begin with a meeting; see `calls`.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from andon_trainer.core.events import Assigned, Committed, TransferAsked
from andon_trainer.core.reports import Digest, StepReport
from andon_trainer.exchange.control.transfer import State
from andon_trainer.hosts.calls import (
    Failure,
    failing_together,
    meet,
    refuse_other_weights,
    told_by_leader,
)
from andon_trainer.hosts.group import HostGroup
from andon_trainer.place.member import WorkerMember
from andon_trainer.place.position import Position
from andon_trainer.place.talk import Silence
from andon_trainer.timeline import Timeline

__all__ = ["FollowerMember", "LeaderMember"]

_T = TypeVar("_T")
_NEXT = "the next step of the loader"
_NEW = "the next epoch of line.epochs"
_OVER = "the end of an epoch"
_MEAN = "line.mean"
_END = "the end of the run"


@dataclass(frozen=True, slots=True)
class _Told:
    """The leader's answer to a call; with `has_state` a state follows."""

    result: Any
    position: Position
    has_state: bool = False


class Led(WorkerMember, Protocol):
    """A membership that a leader can have."""

    @property
    def leaves(self) -> bool:
        """Whether its worker was asked to leave."""

    def left_behind(self) -> bool:
        """Whether the line has gone on without this worker."""


class LeaderMember:
    """The place on the line of a host: process 0 has it, and tells the others all that it learns.

    Calls of which the others need not hear go straight to its membership.
    """

    def __init__(self, group: HostGroup, member: Led, state: State) -> None:
        """Tells nothing yet: `joined` is first."""
        self._group = group
        self._member = member
        self._state = state
        self._passed_on: TransferAsked | None = None
        self.talk, self.timeline = member.talk, member.timeline
        self.report, self.abandon, self.hold = member.report, member.abandon, member.hold
        self.all_gather = member.all_gather

    @property
    def position(self) -> Position:
        """Where this host stands."""
        return self._member.position

    def joined(self, line: Any) -> None:
        """Tells the others that the host has joined, what the line is, and gives them its state."""
        self._passed_on = self.position.installed_from
        self._group.tell(_Told(line, self.position, has_state=True))
        self._group.tell(bytes(self._state.packed()))

    def next_round(self) -> Assigned:
        """Asks the line for the host's work."""
        called = meet(self._group, _NEXT, None)
        if any(each.terminated for each in called) and not self._member.leaves:
            # A launcher signals all processes of a host. If one alone was signalled, all leave by
            # the signal's own way.
            os.kill(os.getpid(), signal.SIGTERM)
        return self._tell(self._member.next_round)

    def catch_up(self) -> None:
        """Gets the line's state, if it has gone on without this host, in all of its processes."""
        meet(self._group, _NEW, None)
        if self._tell(self._member.left_behind):
            self.next_round()

    def leave_epoch(self) -> None:
        """Ends the current epoch on all workers."""
        meet(self._group, _OVER, None)
        self._tell(self._member.leave_epoch)

    def await_commit(self) -> Committed | None:
        """Waits for the round's record."""
        return self._tell(self._member.await_commit)

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The mean over all processes of all hosts; it counts hosts."""
        called = meet(self._group, _MEAN, (value, weight))
        given = [each.given for each in called if each.given[1]]
        total = math.fsum(part for _, part in given)
        mean = math.fsum(number * (part / total) for number, part in given)
        return self._tell(lambda: self._member.scalar_all_reduce(mean, total))

    def compare(self, digest: Digest) -> None:
        """Compares the weights inside the host, and the host's with all others'.

        Raises:
            RuntimeError: two processes of the host have other weights.
        """
        called = meet(self._group, _END, digest.sha256)
        refuse_other_weights([each.given for each in called], self.position.step)
        self._tell(lambda: self._member.compare(digest))

    def stop_line(self, kind: str, message: str) -> bool:
        """Halts the line between two steps; the others wait in their next call meanwhile."""
        try:
            return self._member.stop_line(kind, message)
        except BaseException as error:
            self._group.meet(Failure.of(error))
            raise

    def _tell(self, ask: Callable[[], _T]) -> _T:
        """Asks the line, and tells the others what it said."""
        with failing_together(self._group):
            result = ask()
        transfer = self.position.installed_from
        has_state = transfer is not self._passed_on
        self._passed_on = transfer
        self._group.tell(_Told(result, self.position, has_state))
        if has_state:
            self._group.tell(bytes(self._state.packed()))
        return result


class FollowerMember:
    """The place of another process of the host: it stands where the leader stands."""

    def __init__(self, group: HostGroup, state: State) -> None:
        """Knows nothing yet."""
        self._group = group
        self._state = state
        self.position = Position()
        """The leader's, except that this process is not assigned to write a checkpoint."""
        self.talk = Silence()
        self.timeline: Timeline | None = None
        self.terminated = False
        """Whether this process was asked to terminate: the leader is told with the next call."""

    def ask_to_leave(self, why: str = "") -> bool:
        """Has the whole host leave, once its step is over; a signal handler calls it."""
        self.terminated = True
        return True

    def join(self) -> Any:
        """Waits until the host has joined; returns what the leader said about the line.

        Raises:
            JoinRefused, CheckpointRefused, LineLost: as the leader does.
        """
        return self._hear()

    def next_round(self) -> Assigned:
        """Waits for the host's work."""
        assigned: Assigned = self._follow(_NEXT, None)
        return replace(assigned, writes_checkpoint=False)

    def catch_up(self) -> None:
        """Gets the line's state, with the leader, if the line has gone on without this host."""
        if self._follow(_NEW, None):
            self.next_round()

    def leave_epoch(self) -> None:
        """Ends the current epoch, with the leader."""
        self._follow(_OVER, None)

    def await_commit(self) -> Committed | None:
        """Waits for what the leader waits for."""
        committed: Committed | None = self._hear()
        return committed

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The mean over all processes of all hosts."""
        result: tuple[float, float, int] = self._follow(_MEAN, (value, weight))
        return result

    def compare(self, digest: Digest) -> None:
        """Has these weights compared with the leader's."""
        self._follow(_END, digest.sha256)

    def hold(self) -> bool:
        """True: the leader holds the averages."""
        return True

    def report(self, report: StepReport) -> None:
        """Does nothing: the leader reports the host's step."""

    def abandon(self, message: str) -> None:
        """Does nothing: a process that fails ends its host's part in the round."""

    def _follow(self, name: str, given: Any) -> Any:
        called = meet(self._group, name, given, terminated=self.terminated)
        if name == _END:
            refuse_other_weights([each.given for each in called], self.position.step)
        return self._hear()

    def _hear(self) -> Any:
        told = told_by_leader(self._group)
        assert isinstance(told, _Told)
        if told.has_state:
            self._state.install(self._group.hear())
        here, before = told.position, self.position.installed_from
        if here.assigned is not None:
            here = replace(here, assigned=replace(here.assigned, writes_checkpoint=False))
        if here.installed_from == before:
            # The same object: `Position.installed_from` is compared by identity.
            here = replace(here, installed_from=before)
        self.position = here
        return told.result
