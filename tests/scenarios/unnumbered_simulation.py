"""The line with simulated workers that no launcher numbered: the line gives them their slots."""

from __future__ import annotations

from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_coordinator.core import effects as do
from scenarios.line_simulation import Process, Simulation

__all__ = ["UnnumberedSimulation"]


class UnnumberedSimulation(Simulation):
    """A worker asks for no slot, later for the one that it had, and for any if that is taken."""

    def __init__(self, seed: int) -> None:
        """There are fewer workers than slots, so that a newcomer finds one."""
        super().__init__(seed, spare=2)
        self._in_round: dict[tuple[Key, int], int] = {}
        """Which process a round's worker was, by its incarnation."""
        self.moved = 0
        """Times that a worker on the line got another slot."""

    def _asks_for(self, process: Process) -> int | None:
        return process.worker

    def _post(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, do.Assign):
                work = effect.assignment
                found = [each for each in self.processes if each.stream == effect.stream]
                for process in found:  # None if it has hung up.
                    self._in_round[work.key, work.roster[work.rank]] = process.incarnation
        super()._post(effects)

    def _survived(self, before: Key, key: Key, worker: int) -> bool:
        # Whoever has a slot now need not be who had it.
        now = self._in_round.get((key, worker))
        return now is not None and now == self._in_round.get((before, worker))

    def _hear(self, process: Process, effect: do.Effect) -> None:
        if isinstance(effect, do.RefuseJoin) and effect.refusal.reason is Reason.SLOT:
            process.worker = None
            self.moved += process.head is not None
        super()._hear(process, effect)
