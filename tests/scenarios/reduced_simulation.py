"""A simulated line whose coordinator averages nothing itself: reducers come and go at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from andon.protocol.records import Key, RecordKind
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import History
from scenarios.line_simulation import Process, Simulation

__all__ = ["ReducedSimulation"]

_ADDRESSES = ("beta:1", "gamma:1", "delta:1")
_FIRST_STREAM = 10**6


class ReducedSimulation(Simulation):
    """Three reducers, of which the line waits for two at first."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bench.settings = replace(self.bench.settings, own_reducer=False, expect_reducers=2)
        self.bench.line = self.bench._start(History())
        self.registered: dict[str, int] = {}
        self.used: dict[Key, frozenset[str]] = {}
        self.broken: set[Key] = set()
        """Rounds that a reducer was lost to before all had their averages."""
        self.losses = 0
        self._last = _FIRST_STREAM

    def check(self) -> None:
        super().check()
        for record, _ in self.bench.journal.records:
            assert record.kind is not RecordKind.STEP or record.key not in self.broken

    def _moves(self) -> list[Callable[[], None]]:
        return [*super()._moves(), self._register]

    def _faults(self) -> list[Callable[[], None]]:
        return [*super()._faults(), *[self._lose_reducer] * 4, self._come_back_unmissed]

    def _register(self) -> None:
        away = [each for each in _ADDRESSES if each not in self.registered]
        if away:
            self._offer(self.random.choice(away))

    def _come_back_unmissed(self) -> None:
        if self.registered:
            address = self.random.choice(sorted(self.registered))
            older = self.registered[address]
            self._break_rounds(address)
            self._offer(address)
            self._deliver(on.ReducerLost(older))

    def _lose_reducer(self) -> None:
        if self.registered:
            address = self.random.choice(sorted(self.registered))
            self._break_rounds(address)
            self._deliver(on.ReducerLost(self.registered.pop(address)))

    def _restart_coordinator(self) -> None:
        super()._restart_coordinator()
        self.registered.clear()

    def _offer(self, address: str) -> None:
        self._last += 1
        self.registered[address] = self._last
        self._deliver(on.ReducerRegistered(self._last, address))

    def _break_rounds(self, address: str) -> None:
        self.losses += 1
        for key, addresses in self.used.items():
            whole = self.averages.get(key) == set(self.rosters[key])
            if address in addresses and not whole:
                self.broken.add(key)

    def _work(self, process: Process) -> None:
        assignment = process.assignment
        if assignment is not None and assignment.key in self.broken:
            process.assignment = None
            assert process.stream is not None
            seen = on.Fault(kind=on.FaultKind.DATA_STREAM_LOST, key=assignment.key)
            process.up.append(on.FaultReported(process.stream, seen))
            return
        super()._work(process)

    def _note(self, assignment: do.Assignment) -> None:
        super()._note(assignment)
        addresses = frozenset(share.address for share in assignment.reducers)
        assert addresses, "a round has reducers"
        assert addresses <= self.registered.keys(), "no round is given to a reducer that is gone"
        assert self.used.setdefault(assignment.key, addresses) == addresses, "one map a round"
