"""Transfers: state on its way from a worker in sync to one that is behind (rule 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from andon.records import Key

__all__ = ["Transfer", "Transfers"]

_U32 = 2**32


@dataclass(frozen=True, slots=True)
class Transfer:
    """State of `head` moves from worker `donor` to worker `joiner`."""

    id: int
    head: Key
    donor: int
    joiner: int
    relay: str
    """The address of the reducer that it goes through."""


class Transfers:
    """Transfers under way; a worker is at one end of one of them at most."""

    def __init__(self) -> None:
        """Starts with none."""
        self._active: dict[int, Transfer] = {}
        self._begun = 0

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

    def begin(self, head: Key, donor: int, joiner: int, *, term: int, relay: str) -> Transfer:
        """Begins one, through the reducer at `relay`.

        Its id has the random bits of this coordinator's `term` in it. So what a reducer still
        holds of another coordinator's transfer is never taken for it.
        """
        assert not self.busy(donor)
        assert not self.busy(joiner)
        self._begun += 1
        transfer = Transfer(term % _U32 * _U32 + self._begun, head, donor, joiner, relay)
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

    def cancel(self, worker: int) -> int | None:
        """Ends the one that a lost worker was at an end of; the worker at its other end."""
        mine = (each for each in self._active.values() if worker in (each.donor, each.joiner))
        ended = next(mine, None)
        self._active = {
            key: each
            for key, each in self._active.items()
            if worker not in (each.donor, each.joiner)
        }
        if ended is None:
            return None
        return ended.joiner if worker == ended.donor else ended.donor

    def cancel_all(self) -> None:
        """Ends all: the head that they move is the line's no more."""
        self._active.clear()
