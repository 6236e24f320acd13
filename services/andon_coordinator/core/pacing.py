"""Pacing: how many positions the next step takes, and how they are divided among the ranks.

Theory of operation. A window is a round like any other; schedules differ in how many positions it
takes and how they are dealt (`andon.protocol.schedules`). `Pacing` puts the pieces together: the
schedule, which may have been chosen by itself; `balance`, which divides a batch by throughput; and
`cadence`, which counts micro-batches. It is asked when a step's first round opens, and the answer,
a `StepWindow`, stands for all attempts at that step: whoever has computed positions keeps them. It
learns when a complete round is given to the journal. What it knows then is a part of that record,
durable in the same transaction; if the record is not written after all, it is forgotten again.

A *micro-batch* is of equal size for every worker: the run's global batch divided by the workers,
rounded up. Nobody computes more at a time than it would without a cadence.

A cadence's window is the anchor times the global batch, and the counts say how it is divided. The
anchor is counted in sixteenths: at 16 of them, where it starts, the window is the batch that the
script asked for, however unequal the workers are. An anchor counted in whole micro-batches would
make it larger as soon as a worker has two: with counts of 3, 2 and 1, twice as large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from andon.protocol.capabilities import (
    LEARNING,
    MEAN_BUFFERS,
    NORMS,
    TRIMMED,
    capabilities_of,
)
from andon.protocol.limits import BATCH_LIMIT
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
    QUORUM_CAPABILITY,
    Schedule,
)
from andon.protocol.shards import Ranges, Split
from andon_coordinator.core.balance import Balance
from andon_coordinator.core.cadence import Cadence, CadenceRules
from andon_coordinator.core.events import StepTimings
from andon_coordinator.core.eviction import SlowWorkers
from andon_coordinator.core.growth import Growth
from andon_coordinator.core.members import LineMember, devices_of
from andon_coordinator.core.noise_scale import Contribution, SavedNoise
from andon_coordinator.core.pacing_state import SavedPacing, bytes_of, saved_of
from andon_coordinator.core.readings import PacedProcess, Reading
from andon_coordinator.core.settings import LearningRateScaling, PacingSettings

__all__ = ["Pacing", "StepWindow", "WindowReport", "capabilities_for", "reading_of"]

_LONGEST = BATCH_LIMIT - 1
"""The most positions that a step may take."""
PARTS = 16
"""An anchor of so many is a window of one global batch."""


def capabilities_for(settings: PacingSettings, policy: Policy) -> frozenset[str]:
    """What every worker must be capable of, as far as the operator chose."""
    needed = {
        BALANCE_CAPABILITY: (settings.balanced or settings.eviction is not None)
        and settings.schedule is not Schedule.CADENCE,
        CADENCE_CAPABILITY: settings.schedule is Schedule.CADENCE,
        LOCAL_CAPABILITY: policy.local_steps > 0,
        OVERLAP_CAPABILITY: policy.overlap,
        QUORUM_CAPABILITY: policy.quorum is not None,
        LEARNING: policy.quorum is not None,
        FRAGMENTS_CAPABILITY: policy.in_fragments,
        # A worker that does not know these fields would train on without what they ask for.
        NORMS: policy.max_grad_norm is not None or policy.own_gradient_norm,
        MEAN_BUFFERS: policy.average_buffers,
        TRIMMED: policy.trims,
    }
    chosen = frozenset(name for name, needs in needed.items() if needs)
    return chosen | frozenset(capabilities_of((policy.encoding, policy.answer_encoding)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """What one step takes, the same for all attempts at it."""

    size: int
    """Positions, unless the epoch ends before."""
    unit: int = 0
    """Positions of a micro-batch at most, or of a local step; 0: the workers decide."""
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
        # The short window at an epoch's end keeps the script's rate.
        return self.scaling.of(max(1.0, batch / global_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What the workers of a complete round reported of it."""

    readings: Sequence[Reading]
    """Of their speed, in rank order."""
    wait_s: float = 0.0
    """The least time that a worker stood still after its last backward."""
    loss: float = math.nan
    """Of the step; NaN if it has none."""
    contributions: Sequence[Contribution] = ()
    """Of the ranks that have a weight; a norm that does not count is NaN."""
    mean_norm: float | None = None
    """The norm of the averaged gradient; None if it was not reported."""
    at_s: float = 0.0
    """When it was complete, by the line's clock."""


class Pacing:
    """What is known of the workers' pace, and what it makes of the line's steps."""

    def __init__(self, settings: PacingSettings, policy: Policy, kept: bytes = b"") -> None:
        """Starts from what the journal has, or from nothing."""
        self._settings = settings
        self._policy = policy
        self.slow: SlowWorkers | None = None
        """Who is slow, and for how long; None: the line does nothing about it."""
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

    @property
    def noise_scale(self) -> float | None:
        """The noise scale of the gradients, in samples; None if it is not known."""
        return self._growth.noise.samples

    def restore(self, kept: bytes) -> None:
        """Starts again from kept bytes; those that can't be read count as none."""
        known = saved_of(kept)
        self.kept = b"" if known is None else kept
        saved = known or SavedPacing()
        self._chosen, self._note = saved.schedule, saved.note
        self._balance = Balance(max(1, self._policy.steps_a_round))
        self._balance.restore(saved.shares)
        self._cadence = Cadence(_in_parts(self._settings.cadence))
        if saved.reports or saved.paces:
            self._cadence.restore(
                saved.paces,
                roster=saved.paced_roster,
                anchor=saved.anchor,
                anchor_process=saved.anchor_process,
                reports=saved.reports,
            )
        self._growth = Growth(
            self._settings.growth_cost,
            scaled=self._settings.learning_rate_scaling is not LearningRateScaling.NONE,
            saved=saved.noise,
        )
        self._commit_s = 0.0
        self._watch_anew()

    def _watch_anew(self) -> None:
        rules = self._settings.eviction
        if rules is not None:
            by_speed = self._settings.balanced or self.schedule is Schedule.CADENCE
            self.slow = SlowWorkers(
                rules, batches=max(1, self._policy.steps_a_round), by_speed=by_speed
            )

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
        self._watch_anew()  # A cadence deals by speed.
        return self._note

    # -------------------------------------------------------------------------- asking

    def window(self, roster: Sequence[LineMember], plan: RunPlan) -> StepWindow:
        """What the next step takes, for its first attempt."""
        processes = [each.process for each in roster]
        unit = -(-plan.global_batch // len(roster))
        interleaved = self._settings.interleaved
        if self.schedule is Schedule.CADENCE:
            counts = self._cadence.counts(processes)
            return StepWindow(
                size=min(plan.global_batch * self._cadence.anchor // PARTS, _longest(plan)),
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
        elif self.slow is not None:
            targets = self.slow.targets(processes)
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

    def learn(self, report: WindowReport, window: StepWindow, plan: RunPlan) -> bytes:
        """Learns from a complete round that is given to the journal.

        Args:
            report: what its workers reported.
            window: what the step took.
            plan: of the run.

        Returns:
            What is to be kept with the record; empty if it is what is kept already.
        """
        # A change of the weights by local steps is no gradient.
        norm = None if self._policy.local_steps else report.mean_norm
        if self.slow is not None:
            self.slow.observe(report.readings, report.at_s)
        verdict = self._growth.observe(report.loss, report.contributions, norm)
        if self.schedule is Schedule.CADENCE:
            # In this order: the verdict applies the proposal that this report makes, or drops it.
            self._cadence.report(
                report.readings,
                exchange_s=report.wait_s + self._commit_s,
                unit=window.size / max(1, sum(window.targets.values())),
            )
            verdict = self._growth.too_large(plan.global_batch, window.size) or verdict
            self._cadence.judge(verdict, self._most_anchor(plan))
        elif self._settings.balanced:
            self._balance.observe(report.readings)
        saved = self.saved()
        return b"" if saved == self.kept else saved

    def _most_anchor(self, plan: RunPlan) -> int:
        """The greatest anchor that costs no more than it may, and takes no more than an epoch."""
        batch, longest = plan.global_batch, _longest(plan)
        largest = self._growth.largest(batch)
        # Rounded up, so that one window can take the whole epoch.
        return -(-longest * PARTS // batch) if largest >= longest else int(largest * PARTS / batch)

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
            # What changes at every step is kept only where something depends on it.
            noise=self._growth.noise.saved() if cadence else SavedNoise(),
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


def _in_parts(rules: CadenceRules) -> CadenceRules:
    """Rules in the batches of a script, as rules in their parts."""
    diff = rules.max_batch_diff
    return replace(
        rules,
        max_anchor=rules.max_anchor * PARTS,
        max_batch_diff=None if diff is None else diff * PARTS,
        initial_anchor=rules.initial_anchor * PARTS,
        least_anchor=rules.least_anchor * PARTS,
    )


def _longest(plan: RunPlan) -> int:
    return min(plan.epoch_size or _LONGEST, _LONGEST)


def _first_difference(names: Mapping[int, str]) -> tuple[int, int]:
    known = [worker for worker, name in names.items() if name]
    other = next(each for each in known if names[each] != names[known[0]])
    return known[0], other


def _by_worker(processes: Sequence[PacedProcess], values: Sequence[int]) -> dict[int, int]:
    return {each.worker: value for each, value in zip(processes, values, strict=True)}
