"""State transfers: the line's state on its way from a worker in sync to one behind (rule 10).

This is the bookkeeping; `syncing` has the rules.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from andon.protocol.records import Key

__all__ = ["Setback", "StateTransfer", "StateTransfers", "TransferRole"]

_U32 = 2**32
_LONGEST_PAUSE_S = 600.0
"""The longest pause between two tries to bring a slot its state."""


class TransferRole(enum.Enum):
    """Which end of a transfer; values are those of `andon.v1.TransferRole`."""

    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """State of `head` moves from worker `donor` to worker `joiner`.

    They are the same one if it reads the state from a checkpoint.
    """

    id: int
    head: Key
    donor: int
    joiner: int
    relay: str
    """The address of the reducer that passes it on."""
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Setback:
    """A slot's failed transfers. A new process in the slot, on the same host, inherits them.

    The line does not train while a transfer runs. So a slot behind a slow link must not be tried
    without a break: the line trains on in between, longer each time.
    """

    host: str
    failures: int
    """Consecutive ones."""
    not_before: float
    step: int
    """The line's step at the last failure."""
    why: str


class StateTransfers:
    """The transfers under way. A worker takes part in one of them at most."""

    def __init__(self, begun: int = 0) -> None:
        """Starts with none; the first one's id has the number after `begun`."""
        self._active: dict[int, StateTransfer] = {}
        self._of_worker: dict[int, StateTransfer] = {}
        """The transfer that each worker takes part in."""
        self._begun = begun
        self.setbacks: dict[int, Setback] = {}
        """By slot; a slot that got its state has none."""

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    @property
    def joiners(self) -> list[int]:
        """Workers that receive, by id."""
        return sorted(transfer.joiner for transfer in self._active.values())

    def busy(self, worker: int) -> bool:
        """Whether a worker takes part in one."""
        return worker in self._of_worker

    def donates(self, worker: int) -> bool:
        """Whether a worker sends its state in one."""
        transfer = self._of_worker.get(worker)
        return transfer is not None and transfer.donor == worker

    def may_begin(self, worker: int, host: str, step: int, now: float, *, trains: bool) -> bool:
        """Whether a transfer to a worker on `host` may begin now.

        From the second failure on, the line must commit a step between two tries, if it `trains`
        at all.
        """
        setback = self.setbacks.get(worker)
        if setback is None or setback.host != host:
            return True
        stepped = setback.failures < 2 or setback.step != step or not trains
        return now >= setback.not_before and stepped

    def fail(
        self,
        transfer: StateTransfer,
        why: str,
        *,
        host: str,
        step: int,
        now: float,
        least_s: float,
    ) -> Setback:
        """Notes that a joiner on `host` did not get its state.

        The pause before the next try is as long as this try took, doubled with each failure, so
        that the line spends an ever smaller part of its time on tries. `least_s` is the first pause
        after a try that took no time.
        """
        # By slot and host: a process that is started again there has the same link.
        known = self.setbacks.get(transfer.joiner)
        failures = known.failures + 1 if known is not None and known.host == host else 1
        # The exponent is bounded because a float overflows at 2**1024.
        spent_s = max(now - transfer.began_at, least_s)
        pause_s = min(spent_s * 2.0 ** min(failures - 1, 30), _LONGEST_PAUSE_S)
        setback = Setback(host, failures, now + pause_s, step, why)
        self.setbacks[transfer.joiner] = setback
        return setback

    def begin(
        self, head: Key, donor: int, joiner: int, *, term: int, relay: str, now: float = 0.0
    ) -> StateTransfer:
        """Begins a transfer that the reducer at `relay` passes on."""
        assert not self.busy(donor)
        assert not self.busy(joiner)
        self._begun += 1
        # The term's random bits are part of the id, so state that a reducer still holds for a
        # transfer of another coordinator is never taken for this one.
        number = term % _U32 * _U32 + self._begun
        transfer = StateTransfer(number, head, donor, joiner, relay, now)
        self._active[transfer.id] = transfer
        self._of_worker[donor] = self._of_worker[joiner] = transfer
        return transfer

    def get(self, transfer_id: int) -> StateTransfer | None:
        """The transfer with this id, if it is under way."""
        return self._active.get(transfer_id)

    def through(self, relay: str) -> Sequence[StateTransfer]:
        """Those that the reducer at an address passes on."""
        return [each for each in self._active.values() if each.relay == relay]

    def end(self, transfer: StateTransfer) -> None:
        """Ends one."""
        del self._active[transfer.id]
        for worker in {transfer.donor, transfer.joiner}:
            del self._of_worker[worker]

    def cancel(self, worker: int) -> StateTransfer | None:
        """Ends and returns the transfer that a lost worker took part in, if there is one."""
        ended = self._of_worker.get(worker)
        if ended is not None:
            self.end(ended)
        return ended

    def cancel_all(self) -> None:
        """Ends all: the head whose state they move is no longer the line's."""
        self._active.clear()
        self._of_worker.clear()
