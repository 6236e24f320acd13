"""Transfers: state on its way from a worker in sync to one that is behind (rule 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from andon.protocol.records import Key

__all__ = ["Setback", "Transfer", "Transfers"]

_U32 = 2**32
_LONGEST_PAUSE_S = 600.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """State of `head` moves from worker `donor` to worker `joiner`."""

    id: int
    head: Key
    donor: int
    joiner: int
    relay: str
    """The address of the reducer that it goes through."""
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Setback:
    """State that did not reach a slot. A process that comes back to the slot inherits it.

    A try stops the line for as long as it lasts, so a slot that is behind a slow link must not be
    tried without end: the line trains on in between, each time for longer.
    """

    host: str
    failures: int
    """In a row."""
    not_before: float
    step: int
    """The line's, at the last try."""
    why: str


class Transfers:
    """Transfers under way; a worker is at one end of one of them at most."""

    def __init__(self) -> None:
        """Starts with none."""
        self._active: dict[int, Transfer] = {}
        self._begun = 0
        self.setbacks: dict[int, Setback] = {}
        """By slot; a slot whose state arrived has none."""

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    @property
    def joiners(self) -> list[int]:
        """Workers that receive, by id."""
        return sorted(transfer.joiner for transfer in self._active.values())

    def busy(self, worker: int) -> bool:
        """Whether a worker is at an end of one."""
        return any(worker in (each.donor, each.joiner) for each in self._active.values())

    def may_begin(self, worker: int, host: str, step: int, now: float, *, trains: bool) -> bool:
        """Whether a worker on `host` may be tried now.

        From the second failure on there is a step between two tries, if the line `trains` at all.
        """
        setback = self.setbacks.get(worker)
        if setback is None or setback.host != host:
            return True
        stepped = setback.failures < 2 or setback.step != step or not trains
        return now >= setback.not_before and stepped

    def fail(
        self, transfer: Transfer, why: str, *, host: str, step: int, now: float, least_s: float
    ) -> Setback:
        """Notes that a state did not reach its joiner, on `host`.

        The pause is as long as the try was, doubled with each failure: the line spends less of its
        time on each further try. `least_s` is the first pause if the try took no time.
        """
        known = self.setbacks.get(transfer.joiner)
        failures = known.failures + 1 if known is not None and known.host == host else 1
        # The exponent is bounded because floats are.
        spent_s = max(now - transfer.began_at, least_s)
        pause_s = min(spent_s * 2.0 ** min(failures - 1, 30), _LONGEST_PAUSE_S)
        setback = Setback(host, failures, now + pause_s, step, why)
        self.setbacks[transfer.joiner] = setback
        return setback

    def begin(
        self, head: Key, donor: int, joiner: int, *, term: int, relay: str, now: float = 0.0
    ) -> Transfer:
        """Begins one, through the reducer at `relay`.

        Its id has the random bits of this coordinator's `term` in it. So what a reducer still
        holds of another coordinator's transfer is never taken for it.
        """
        assert not self.busy(donor)
        assert not self.busy(joiner)
        self._begun += 1
        number = term % _U32 * _U32 + self._begun
        transfer = Transfer(number, head, donor, joiner, relay, now)
        self._active[transfer.id] = transfer
        return transfer

    def get(self, transfer_id: int) -> Transfer | None:
        """The transfer with this id, if it is under way."""
        return self._active.get(transfer_id)

    def through(self, relay: str) -> Sequence[Transfer]:
        """Those that go through the reducer at an address."""
        return [each for each in self._active.values() if each.relay == relay]

    def end(self, transfer: Transfer) -> None:
        """Ends one."""
        del self._active[transfer.id]

    def cancel(self, worker: int) -> Transfer | None:
        """Ends the one that a lost worker was at an end of, if there is one."""
        mine = (each for each in self._active.values() if worker in (each.donor, each.joiner))
        ended = next(mine, None)
        self._active = {
            key: each
            for key, each in self._active.items()
            if worker not in (each.donor, each.joiner)
        }
        return ended

    def cancel_all(self) -> None:
        """Ends all: the head that they move is the line's no more."""
        self._active.clear()
