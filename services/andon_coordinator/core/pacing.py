"""Pacing: how many positions the next step takes, and how they are divided among the ranks.

Theory of operation. A window is a round like any other; schedules differ in how many positions it
takes and how they are dealt (`andon.protocol.schedules`). `Pacing` puts the pieces together: the
schedule, which may have been chosen by itself; `balance`, which divides a batch by throughput; and
`cadence`, which counts micro-batches. It is asked when a step's first round opens, and the answer,
a `StepWindow`, stands for all attempts at that step: whoever has computed positions keeps them. It
learns when a complete round is given to the journal. What it knows then is a part of that record,
durable in the same transaction; if the record is not written after all, it is forgotten again.

A *unit* is a micro-batch of equal size for every worker: the run's global batch divided by the
workers, rounded up. With all counts at 1 a cadence's window is the global batch (rounded up), so
the window is never shorter than what the script asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from andon.protocol.capabilities import MEAN_BUFFERS, NORMS, capabilities_of
from andon.protocol.limits import BATCH_LIMIT
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
    Schedule,
)
from andon.protocol.shards import Ranges, Split
from andon_coordinator.core.balance import Balance
from andon_coordinator.core.cadence import Cadence
from andon_coordinator.core.events import StepTimings
from andon_coordinator.core.loss_trend import LossTrend
from andon_coordinator.core.members import LineMember, devices_of
from andon_coordinator.core.pacing_state import SavedPacing, bytes_of, saved_of
from andon_coordinator.core.readings import PacedProcess, Reading
from andon_coordinator.core.settings import LearningRateScaling, PacingSettings

__all__ = ["Pacing", "StepWindow", "capabilities_for", "reading_of"]

_LONGEST = BATCH_LIMIT - 1
"""The most positions that a step may take."""


def capabilities_for(settings: PacingSettings, policy: Policy) -> frozenset[str]:
    """What every worker must be capable of, as far as the operator chose."""
    needed = {
        BALANCE_CAPABILITY: settings.balanced and settings.schedule is not Schedule.CADENCE,
        CADENCE_CAPABILITY: settings.schedule is Schedule.CADENCE,
        LOCAL_CAPABILITY: policy.local_steps > 0,
        OVERLAP_CAPABILITY: policy.overlap,
        FRAGMENTS_CAPABILITY: policy.in_fragments,
        # A worker that does not know these fields would train on without what they ask for.
        NORMS: policy.max_grad_norm is not None or policy.own_gradient_norm,
        MEAN_BUFFERS: policy.average_buffers,
    }
    chosen = frozenset(name for name, needs in needed.items() if needs)
    return chosen | frozenset(capabilities_of((policy.encoding, policy.answer_encoding)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """What one step takes, the same for all attempts at it."""

    size: int
    """Positions, unless the epoch ends before."""
    unit: int = 0
    """Positions of a micro-batch, or of a local step; 0: the workers decide."""
    targets: Mapping[int, int] = field(default_factory=dict)
    """For each worker, its part; empty: equal shares."""
    interleaved: bool = False
    scaling: LearningRateScaling = LearningRateScaling.NONE

    def split(self, workers: Sequence[int]) -> Split:
        """The split for a roster. A worker that came after the first attempt has a usual part."""
        if not self.targets:
            return Split((), self.interleaved)
        usual = statistics.median_low(self.targets.values())
        return Split(tuple(self.targets.get(each, usual) for each in workers), self.interleaved)

    def micro_batches(self, shares: Sequence[Ranges]) -> tuple[int, ...]:
        """How many micro-batches each rank makes of its share; empty: each as it likes."""
        if not self.unit:
            return ()
        return tuple(-(-sum(map(len, share)) // self.unit) for share in shares)

    def learning_rate_scale(self, batch: int, global_batch: int) -> float:
        """What a learning rate is multiplied with in a step of `batch` positions."""
        return self.scaling.of(batch / global_batch)


class Pacing:
    """What is known of the workers' pace, and what it makes of the line's steps."""

    def __init__(self, settings: PacingSettings, policy: Policy, kept: bytes = b"") -> None:
        """Starts from what the journal has, or from nothing."""
        self._settings = settings
        self._policy = policy
        self.kept = b""
        """What belongs to the line's head: durable, and sent with its record."""
        self._saved: tuple[SavedPacing | None, bytes] = None, b""
        """What was to be kept last, and its bytes."""
        self.restore(kept)

    @property
    def schedule(self) -> Schedule:
        """What lies between two exchanges."""
        chosen = self._settings.schedule or self._chosen
        return chosen or Schedule.EVERY_STEP

    @property
    def note(self) -> str:
        """Why it is that one, if nobody chose it."""
        return self._note if self._settings.schedule is None else ""

    @property
    def capabilities(self) -> frozenset[str]:
        """What every worker must be capable of, because the schedule was chosen by itself."""
        by_itself = self._settings.schedule is None and self._chosen is Schedule.CADENCE
        return frozenset({CADENCE_CAPABILITY} if by_itself else ())

    def restore(self, kept: bytes) -> None:
        """Starts again from kept bytes; those that can't be read count as none."""
        known = saved_of(kept)
        self.kept = b"" if known is None else kept
        saved = known or SavedPacing()
        self._chosen, self._note = saved.schedule, saved.note
        self._balance = Balance(max(1, self._policy.steps_a_round))
        self._balance.restore(saved.shares)
        self._cadence = Cadence(self._settings.cadence)
        if saved.reports or saved.paces:
            self._cadence.restore(
                saved.paces,
                roster=saved.paced_roster,
                anchor=saved.anchor,
                anchor_process=saved.anchor_process,
                reports=saved.reports,
            )
        self._trend = LossTrend()
        self._commit_s = 0.0

    def adopt(self, kept: bytes) -> None:
        """Takes what a worker kept, if nothing is known here."""
        if not self.kept:
            self.restore(kept)

    def choose(self, members: Sequence[LineMember]) -> str:
        """Chooses the schedule once, by the devices of the line's first workers.

        Returns:
            A sentence for people; empty if there was nothing to choose.
        """
        if self._settings.schedule is not None or self._chosen is not None:
            return ""
        names = {each.worker: devices_of(each.request) for each in members}
        lacking = [
            each.worker for each in members if CADENCE_CAPABILITY not in each.request.capabilities
        ]
        self._chosen = Schedule.EVERY_STEP
        if any(each.request.plan.grain for each in members):
            self._note = "bits must not depend on the workers' speed"
        elif len(set(filter(None, names.values()))) < 2:
            self._note = "the workers' devices are alike"
        elif self._settings.balanced:
            self._note = "the workers' devices differ, and each step is divided by their speed"
        elif lacking:
            self._note = (
                f"the workers' devices differ, but worker {lacking[0]} lacks {CADENCE_CAPABILITY}"
            )
        else:
            self._chosen = Schedule.CADENCE
            one, other = _first_difference(names)
            self._note = f"worker {one} has {names[one]}, worker {other} has {names[other]}"
        return self._note

    # -------------------------------------------------------------------------- asking

    def window(self, roster: Sequence[LineMember], plan: RunPlan) -> StepWindow:
        """What the next step takes, for its first attempt."""
        processes = [each.process for each in roster]
        unit = -(-plan.global_batch // len(roster))
        interleaved = self._settings.interleaved
        if self.schedule is Schedule.CADENCE:
            longest = min(plan.epoch_size or _LONGEST, _LONGEST)
            counts = self._cadence.counts(processes, longest // unit)
            return StepWindow(
                size=min(sum(counts) * unit, _LONGEST),
                unit=unit,
                targets=_by_worker(processes, counts),
                interleaved=interleaved,
                scaling=self._settings.learning_rate_scaling,
            )
        targets: Mapping[int, int] = {}
        if self._settings.balanced:
            parts = self._balance.targets(processes)
            # Equal shares need no targets, and every worker knows them.
            targets = _by_worker(processes, parts) if len(set(parts)) > 1 else {}
        local_steps = self._policy.local_steps
        if plan.epoch_size is not None:
            # A stream of unknown length may end in any round, so each exchanges the whole model.
            local_steps = self._policy.steps_a_round
        return StepWindow(
            size=min(plan.global_batch * max(1, local_steps), _LONGEST),
            unit=unit if local_steps else 0,
            targets=targets,
            interleaved=interleaved,
        )

    # ------------------------------------------------------------------------- learning

    def learn(self, readings: Sequence[Reading], *, wait_s: float, unit: int, loss: float) -> bytes:
        """Learns from a complete round that is given to the journal.

        Args:
            readings: what its workers reported, in rank order.
            wait_s: the least time that a worker stood still after its last backward.
            unit: of the step's window.
            loss: of the step; NaN if it has none.

        Returns:
            What is to be kept with the record; empty if it is what is kept already.
        """
        if self.schedule is Schedule.CADENCE:
            # In this order: the verdict applies the proposal that this report makes, or drops it.
            self._cadence.report(readings, exchange_s=wait_s + self._commit_s, unit=unit)
            self._cadence.judge(self._trend.observe(loss))
        elif self._settings.balanced:
            self._balance.observe(readings)
        saved = self.saved()
        return b"" if saved == self.kept else saved

    def saved(self) -> bytes:
        """What the next coordinator needs; empty if it needs nothing."""
        cadence = self.schedule is Schedule.CADENCE
        if not (cadence or self._settings.balanced or self._chosen):
            return b""
        paces = self._cadence.saved() if cadence else []
        state = SavedPacing(
            schedule=self._chosen,
            note=self._note,
            anchor=self._cadence.anchor,
            anchor_process=self._cadence.anchor_process,
            reports=self._cadence.reports if cadence else 0,
            paces=tuple(paces),
            paced_roster=self._cadence.roster_size if cadence else 0,
            shares=tuple(self._balance.saved()),
        )
        # Without a cadence or balanced shares, it is the same at every step.
        if state != self._saved[0]:
            self._saved = state, bytes_of(state)
        return self._saved[1]

    def committed(self, kept: bytes, commit_s: float) -> None:
        """The record that `kept` belongs to is durable, after `commit_s` seconds."""
        # Only now: what was learnt from a record that is not written must go (`restore`).
        self.kept = kept or self.kept
        self._commit_s = max(0.0, commit_s)


def reading_of(member: LineMember, computed: int, timings: StepTimings) -> Reading:
    """What a worker reported of its speed in a step."""
    return Reading(
        process=member.process,
        computed=computed,
        busy_s=timings.busy_s,
        data_s=timings.data_s,
    )


def _first_difference(names: Mapping[int, str]) -> tuple[int, int]:
    known = [worker for worker, name in names.items() if name]
    other = next(each for each in known if names[each] != names[known[0]])
    return known[0], other


def _by_worker(processes: Sequence[PacedProcess], values: Sequence[int]) -> dict[int, int]:
    return {each.worker: value for each, value in zip(processes, values, strict=True)}
