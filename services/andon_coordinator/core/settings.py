"""Settings and history: what the core is given once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic, ArithmeticRule
from andon.protocol.halts import HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.limits import MAX_WORKERS
from andon.protocol.records import Key, Record
from andon.protocol.reducers import MAX_REDUCERS
from andon.protocol.run_settings import Liveness, Policy, RunPlan, Topology
from andon.protocol.schedules import LearningRateScaling, Schedule
from andon_coordinator.core.cadence import CadenceRules
from andon_coordinator.core.events import Checkpoint
from andon_coordinator.core.eviction import EvictionRules
from andon_coordinator.core.spikes import SpikeAction, SpikeDecision
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.core.verification import VerifiedTotals

__all__ = ["History", "LearningRateScaling", "LineSettings", "PacingSettings", "VerifySettings"]

_ABOVE_0 = {
    "forming_timeout_s": "s",
    "straggler_timeout_s": "s",
    "loss_spike": "deviations",
    "gradient_norm_spike": "deviations",
    "worker_gradient_norm": "times",
}
"""Settings that are switched off by None, and their units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingSettings:
    """How an operator wants work to be divided."""

    schedule: Schedule | None = Schedule.EVERY_STEP
    """What lies between two exchanges; None: cadence if the devices differ, else every step."""
    balanced: bool = False
    """Whether shares follow the workers' throughput; a cadence's counts do so anyway."""
    interleaved: bool = False
    """Whether neighbouring positions go to different ranks."""
    cadence: CadenceRules = field(default_factory=CadenceRules)
    """For the schedule CADENCE."""
    learning_rate_scaling: LearningRateScaling = LearningRateScaling.NONE
    """Likewise."""
    growth_cost: float = 0.05
    """Likewise: the part of samples that longer windows may waste; 1: any."""
    eviction: EvictionRules | None = None
    """When a slow worker is dealt less, and follows; None: never."""

    def __post_init__(self) -> None:
        """Refuses a cost that is no part."""
        if not 0 < self.growth_cost <= 1:
            raise ValueError(f"growth_cost must be above 0 and at most 1, not {self.growth_cost}")

    @property
    def asks_for_noise(self) -> bool:
        """Whether windows may grow by the noise of the gradients, which workers must report."""
        return (
            self.schedule in (None, Schedule.CADENCE)
            and self.cadence.max_anchor > 1
            and self.growth_cost < 1
            and self.learning_rate_scaling is not LearningRateScaling.NONE
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How much is computed twice before it is committed."""

    fraction: float = 0.0
    """With which probability a step is verified; 0 never is."""
    drops: bool = False
    """Whether a worker that is convicted is dropped, rather than the line halted."""
    key: bytes = field(default=b"", repr=False)
    """Decides which steps are drawn; nobody who computes may know it."""

    def __post_init__(self) -> None:
        """Refuses what is no probability."""
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"verify must be from 0 to 1, not {self.fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """How a line is run. They do not change while the process lives."""

    run_id: str
    """The run that is served."""
    expect_workers: int = 1
    """How many workers the line waits for before it bootstraps or recovers."""
    min_workers: int = 1
    """With fewer workers in sync than this, no round opens."""
    max_workers: int = MAX_WORKERS
    """Worker ids are below this."""
    expect_reducers: int = 1
    """How many reducers the line waits for before its first round."""
    own_reducer: bool = True
    """Whether the coordinator's process is one of them."""
    policy: Policy = field(default_factory=Policy)
    """Handed to every worker."""
    liveness: Liveness = field(default_factory=Liveness)
    """The lease, handed to every worker, and what derives from it."""
    rejoin_grace_s: float = 0.2
    """How long a worker whose stream broke may take to come back before it counts as lost."""
    recovery_window_s: float = 30.0
    """How long after the first join a line with a head waits for all expected workers."""
    max_attempts: int = 3
    """The line halts once this many attempts of one step lost a worker."""
    forming_timeout_s: float | None = None
    """How long the line waits for workers or reducers before it halts; None: for ever."""
    straggler_timeout_s: float | None = None
    """How long the others wait for a slow worker before it is cut off; None: for ever."""
    host: str = ""
    """Where the service runs; checkpoints are best written there."""
    token: bytes = field(default=b"", repr=False)
    """The secret that a Join must carry; empty asks for none."""
    capabilities: frozenset[str] = frozenset()
    """What every worker must be capable of."""
    workers_may_stop: bool = True
    """Whether the run ends once a worker's script wants it to; operators may drain it anyway."""
    loss_spike: float | None = None
    """How many deviations above the median a loss may be; None: any. See `detectors`."""
    gradient_norm_spike: float | None = None
    """Likewise for the norm of the averaged gradients; the policy must ask for it."""
    arithmetic: ArithmeticRule = ArithmeticRule.REQUIRE
    """What becomes of a worker of another arithmetic, if the plan has a grain."""
    worker_gradient_norm: float | None = None
    """How many times the median of the others' norms a worker's own may be; None: any number."""
    on_spike: SpikeAction = SpikeAction.HALT
    """How far the line may go by itself about a spike."""
    pacing: PacingSettings = field(default_factory=PacingSettings)
    """How work is divided."""
    grace_s: float | None = None
    """With a quorum, how long those that have computed wait for the others; None: as long as that
    is worth (`quorum`)."""
    same_bits: bool = False
    """Whether every worker's plan must have a grain; one that has makes the line such a one."""
    verify: VerifySettings = field(default_factory=VerifySettings)
    """Which steps are computed twice, and what follows from differences."""

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other."""
        if not 1 <= self.min_workers <= self.expect_workers <= self.max_workers <= MAX_WORKERS:
            raise ValueError(
                "needs 1 <= min_workers <= expect_workers <= max_workers <= "
                f"{MAX_WORKERS}, not {self.min_workers}, {self.expect_workers}, {self.max_workers}"
            )
        if not 1 <= self.expect_reducers <= MAX_REDUCERS:
            raise ValueError(
                f"expect_reducers must be from 1 to {MAX_REDUCERS}, not {self.expect_reducers}"
            )
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        for name in ("rejoin_grace_s", "recovery_window_s", "grace_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
        for name, unit in _ABOVE_0.items():
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} must be above 0 {unit}, not {number}")
        self._check_policy()

    def _check_policy(self) -> None:
        """Refuses what the policy handed to the workers does not provide for."""
        if self.gradient_norm_spike is not None and not self.policy.gradient_norm:
            raise ValueError("gradient_norm_spike needs a policy that asks for gradient_norm")
        if self.worker_gradient_norm is not None and not self.policy.own_gradient_norm:
            raise ValueError("worker_gradient_norm needs a policy that asks for own_gradient_norm")
        if (self.pacing.schedule is Schedule.LOCAL) != (self.policy.local_steps > 0):
            raise ValueError("the schedule LOCAL and a policy with local_steps need each other")
        if self.pacing.eviction is not None and (why := self._obstacle_to_eviction()):
            raise ValueError(f"no worker can be made a follower: {why}")
        if self.policy.quorum is not None and (other := self._beside_quorum()):
            raise ValueError(f"a quorum and {other} exclude each other")

    @property
    def comparison_factor(self) -> float | None:
        """From how many times the others' median on a worker stands out; None: nobody is compared.

        Those that a quorum leaves out send the changes of several windows: nothing compares to
        them.
        """
        return self.worker_gradient_norm if self.policy.quorum is None else None

    def _obstacle_to_eviction(self) -> str:
        """Why a slow worker could never follow; empty if it could."""
        if self.policy.topology is Topology.RING:
            return "a ring can't be followed"
        if self.policy.local_steps:
            return "local steps can't be followed by a spare"
        # Two stay, and two others are what tells that one is slow.
        return "the line has no more than two" if self.max_workers < 3 else ""

    def _beside_quorum(self) -> str:
        """What can't go with a quorum; empty if nothing of it is set."""
        if self.policy.overlap:
            return "overlapped windows"
        if self.policy.in_fragments:
            return "fragments"
        return "interleaved shares" if self.pacing.interleaved else ""


@dataclass(frozen=True, slots=True)
class JournalledCheckpoint:
    """A checkpoint that a worker reported to an earlier coordinator."""

    worker: int
    joined: str
    """What the journal says of that worker's join before it: `on HOST (DEVICE)`; empty: nothing."""
    checkpoint: Checkpoint

    def was_on(self, host: str, worker: int) -> bool:
        """Whether it was written on a host; where nobody knows that, whether by that worker."""
        if not (host and self.joined):
            return worker == self.worker
        return self.joined.startswith(f"on {host} (")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the journal holds when a coordinator starts; all defaults for a new run."""

    head: Record | None = None
    """The last record."""
    result: StepResult | None = None
    """The result of that record, if it is a STEP; sent again to workers that missed it."""
    greatest_term: int = 0
    """The greatest term that was ever made durable."""
    halt: HaltEvidence | None = None
    """The halt that still needs an answer."""
    next_halt_id: int = 1
    """One above every halt's id."""
    plan: RunPlan | None = None
    """What the run is, if a worker was ever accepted."""
    layout: Layout | None = None
    """What the run exchanges, if a worker was ever accepted."""
    dropped: frozenset[int] = frozenset()
    """Slots of workers that operators dropped, and that nobody took since."""
    barred: frozenset[int | str] = frozenset()
    """Incarnations of workers that operators dropped, and names of their own tokens."""
    revoked: frozenset[int] = frozenset()
    """Slots that dropped workers ever had, whoever has them now."""
    last_roster: tuple[int, ...] = ()
    """Workers of the last STEP since the run was started or resumed; empty if there is none."""
    departed: Mapping[int, bool] = field(default_factory=dict)
    """Workers that are gone since then; True if one left in order (`departures.is_complete`)."""
    recent: tuple[StepResult, ...] = ()
    """The results of the last steps, oldest first, for the detectors; without contributions."""
    accepted_step: int | None = None
    """The step whose spike a person accepted last."""
    roll_back: bool = False
    """Whether the line is to be rolled back to `head` by a MARK (rule 12)."""
    pacing: bytes = b""
    """What the last coordinator knew of its workers' pace; see `pacing_state`."""
    abandoned: Key | None = None
    """No rolled-back record has a greater key; a worker with such a head is merely behind."""
    scalar_names: frozenset[str] = frozenset()
    """Names of the scalars that were logged."""
    arithmetic: Arithmetic | None = None
    """That of the first worker that was ever accepted; None: the plan has no grain."""
    arithmetics: Mapping[int, Arithmetic] = field(default_factory=dict)
    """What each worker stated when it joined last."""
    evicted: Mapping[int, str] = field(default_factory=dict)
    """Why processes follow that were slow for long, by incarnation."""
    stand: int = 0
    """How many were in sync after the last of them went."""
    sessions: int = 0
    """How many sessions of ranks the run had; above 0 it never is a line."""
    verified: VerifiedTotals = field(default_factory=VerifiedTotals)
    """How much was computed twice."""
    spikes: tuple[SpikeDecision, ...] = ()
    """What the line did by itself about spikes, oldest first."""
    comparison: bytes = field(default=b"", repr=False)
    """What was remembered of how workers compare; see `comparison`."""
    checkpoints: tuple[JournalledCheckpoint, ...] = ()
    """The last checkpoints of the head's history, by rising steps."""

    def __post_init__(self) -> None:
        """Refuses a plan without a layout, and a roll-back without a record."""
        if self.roll_back and self.head is None:
            raise ValueError("a roll-back needs the record to go back to")
        if (self.plan is None) != (self.layout is None):
            raise ValueError("plan and layout must be given together")
