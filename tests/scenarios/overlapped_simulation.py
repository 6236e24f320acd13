"""A simulated line of overlapped windows: what is really in each worker's local weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from andon.protocol.records import Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import Policy
from andon.protocol.schedules import Schedule
from andon.protocol.shards import Ranges, subtract
from andon_coordinator.core import effects as do
from andon_coordinator.core.settings import History, PacingSettings
from andon_trainer.core.computed import Computed
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import doubted
from scenarios.line_simulation import Process, Simulation

__all__ = ["OverlappedSimulation"]

Positions = Counter[tuple[int, int]]
"""How often each position, with its epoch, is in something."""


@dataclass
class LocalWeights:
    """What one process has computed since its head, and its core's account of that."""

    change: Positions = field(default_factory=Counter)
    sent: Positions = field(default_factory=Counter)
    computed: Computed = field(default_factory=Computed)

    def forget(self) -> None:
        """The weights are the head's again."""
        self.change.clear()
        self.sent.clear()
        self.computed.drop()


class OverlappedSimulation(Simulation):
    """Epochs of three windows, the last of which is short, and a run that ends within one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bench.settings = replace(
            self.bench.settings,
            policy=Policy(max_steps=12, local_steps=1, overlap=True),
            pacing=PacingSettings(schedule=Schedule.LOCAL),
        )
        self.bench.line = self.bench._start(History())
        self.local: dict[int, LocalWeights] = {}
        """By process."""
        self.given: dict[Key, dict[int, Positions]] = {}
        """What each worker really sent in a round."""
        self.ahead: dict[Key, dict[int, Ranges]] = {}
        self.kept = self.dropped = 0
        """How often a void round's work served the next one, and how often it did not."""

    def check(self) -> None:
        super().check()
        for process in self.processes:
            local = self._local(process)
            assert max(local.change.values(), default=0) <= 1, "no position is computed twice"
            piles = (*local.computed.due, *local.computed.ahead)
            assert sum(map(len, piles)) == local.change.total()

    def _local(self, process: Process) -> LocalWeights:
        return self.local.setdefault(process.incarnation, LocalWeights())

    def _note(self, assignment: do.Assignment) -> None:
        super()._note(assignment)
        key, worker = assignment.key, assignment.roster[assignment.rank]
        self.ahead.setdefault(key, {})[worker] = assignment.ahead
        if key in self.before:
            kept = self.ahead[self.before[key]].get(worker, ())
            assert not subtract(kept, assignment.ahead), "a survivor keeps its positions ahead"

    def _hear(self, process: Process, effect: do.Effect) -> None:
        local = self._local(process)
        match effect:
            case do.SendHalt(_, evidence) if doubted(evidence, process.slot):
                local.forget()
            case do.SendTransfer():
                local.forget()
        super()._hear(process, effect)
        if isinstance(effect, do.Assign) and process.assignment is effect.assignment:
            self._begin(process, effect.assignment)

    def _begin(self, process: Process, work: do.Assignment) -> None:
        local, assigned = self._local(process), _assigned(work)
        if local.change:
            serves = local.computed.serves(assigned)
            self.kept, self.dropped = self.kept + serves, self.dropped + (not serves)
            if not serves:
                local.forget()
        missing = _counted(work.epoch, local.computed.missing(assigned))
        local.change += missing
        local.sent += missing
        local.computed.add(work.positions)
        self.given.setdefault(work.key, {})[process.slot] = local.sent.copy()

    def _work(self, process: Process) -> None:
        work = process.assignment
        # It has computed ahead before its round is void, or has not; but before it is ready.
        if work is not None and self.random.random() < 0.5:
            self._compute_ahead(process, work)
        super()._work(process)
        if work is not None and process.held == work.key:
            self._compute_ahead(process, work)

    def _compute_ahead(self, process: Process, work: do.Assignment) -> None:
        local = self._local(process)
        missing = local.computed.missing_ahead(_assigned(work))
        local.change += _counted(work.epoch, missing)
        local.computed.add_ahead(missing)

    def _apply(self, process: Process, record: Record, stop_reason: str) -> None:
        local = self._local(process)
        follows = process.head == record.parent
        if follows and record.kind is RecordKind.STEP and process.held == record.key:
            self._check_covered(record)
            local.change -= local.sent
            local.sent = local.change.copy()
            local.computed.committed()
        elif follows and record.kind is RecordKind.MARK:
            local.forget()
        super()._apply(process, record, stop_reason)

    def _check_covered(self, record: Record) -> None:
        """F-DP-002: the changes that were averaged are those of the record's positions, once."""
        results = [result for each, result in self.history if each.key == record.key]
        assert results, "only a durable record is applied"
        assert results[-1] is not None
        given = self.given[record.key]
        whole = sum((given[worker] for worker in record.roster), Counter[tuple[int, int]]())
        assert whole == _counted(results[-1].epoch, (results[-1].batch,))

    def _leave(self, process: Process) -> None:
        if process.head == self.history[-1][0].key:
            assert not self._local(process).change, "nothing that was computed is in no record"
        super()._leave(process)


def _assigned(work: do.Assignment) -> Assigned:
    return Assigned(
        key=work.key,
        parent=work.parent,
        roster=work.roster,
        rank=work.rank,
        step=work.step,
        attempt=work.attempt,
        epoch=work.epoch,
        positions=work.positions,
        batch=work.batch,
        ahead=work.ahead,
        ahead_batch=work.ahead_batch,
    )


def _counted(epoch: int, ranges: tuple[PositionRange, ...]) -> Positions:
    return Counter((epoch, at) for each in ranges for at in range(each.start, each.stop))
