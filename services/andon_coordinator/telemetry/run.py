"""The run and the state of its line: what was chosen, whether it goes on, and what stopped it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from andon.host.telemetry import FollowedCounter, OptionalGauge
from andon.protocol.encoding import Encoding
from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.run_settings import Topology
from andon.protocol.slowness import SlowPhase
from andon_coordinator.core.effects import Assignment
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.spikes import SpikeAction
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.core.verification import VerifiedTotals

__all__ = [
    "CostMetrics",
    "HaltMetrics",
    "RunMetrics",
    "ScheduleMetrics",
    "ServedRun",
    "SlownessMetrics",
    "Totals",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What does not change while a run is served."""

    run_id: str = ""
    topology: Topology = Topology.STAR
    encoding: Encoding = Encoding.FLOAT32
    answer_encoding: Encoding | None = None
    """How averages travel; None: as gradients do."""
    local_steps: int = 0
    """Optimizer steps between two exchanges; 0: gradients are exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the journal holds when the process starts."""

    steps: int = 0
    samples: int = 0
    halts: Mapping[HaltReason, int] = field(default_factory=dict)
    answers: Mapping[HaltAnswer, int] = field(default_factory=dict)
    departures: Mapping[str, int] = field(default_factory=dict)
    """By the label of `andon_departures_total`."""
    verified: VerifiedTotals = field(default_factory=VerifiedTotals)
    spikes: Mapping[SpikeAction, int] = field(default_factory=dict)
    """What the line did by itself about spikes."""


class RunMetrics:
    """Which run this is, and what its line does."""

    def __init__(self, registry: CollectorRegistry, run: ServedRun) -> None:
        """Registers the metrics; every state is there from the start."""
        self._run = run
        self._info = Info(
            "andon_run",
            "The run that is served, its schedule and topology, and the encodings of both ways.",
            registry=registry,
        )
        self._schedule = ""
        self._show_run("")
        self._state = Gauge(
            "andon_line_state",
            "1 for the line's state, and 0 for the others.",
            ["state"],
            registry=registry,
        )
        self._states = {each: self._state.labels(each.name.lower()) for each in LineState}
        self._planned = OptionalGauge(
            registry,
            "andon_steps_planned",
            "Steps after which the run ends; absent if nobody said.",
        )

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status."""
        if status.schedule != self._schedule:
            self._schedule = status.schedule
            self._show_run(status.schedule)
        for state, gauge in self._states.items():
            gauge.set(state is status.state)
        self._planned.set(status.total_steps)

    def _show_run(self, schedule: str) -> None:
        self._info.info(
            {
                "run": self._run.run_id,
                "schedule": schedule,
                "topology": self._run.topology.name.lower(),
                "encoding": self._run.encoding.label,
                "answers": (self._run.answer_encoding or self._run.encoding).label,
            }
        )


class CostMetrics:
    """What the run has taken."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics; they show what the last status had."""
        self._machine_s = 0.0
        self._cost: float | None = None
        FollowedCounter(
            registry,
            "andon_machine_seconds_total",
            "Time that the machines of all workers were on the line together, each from its join "
            "to its end; a restart of the service keeps it.",
        ).follow(lambda: self._machine_s)
        FollowedCounter(
            registry,
            "andon_cost_total",
            "What these machine seconds cost, in the currency of --price-per-hour; absent without "
            "a price.",
        ).follow(lambda: self._cost)

    def tick(self, status: LineSnapshot) -> None:
        """Shows what a status has."""
        # A clock that is set back must not look like a restarted process.
        self._machine_s = max(self._machine_s, status.cost.machine_seconds)
        if status.cost.cost is not None:
            self._cost = max(self._cost or 0.0, status.cost.cost)


class HaltMetrics:
    """Halts and their answers: the counters are history, the gauge is what stands now."""

    def __init__(self, registry: CollectorRegistry, totals: Totals) -> None:
        """Registers the metrics; every label exists from the start."""
        # A counter alone would not do: the first scrape may find it at 1 already, and then nothing
        # ever increased.
        halted = Gauge(
            "andon_halted",
            "1 for the reason of the present halt, and 0 for the others.",
            ["reason"],
            registry=registry,
        )
        self._halted = {each: halted.labels(each.label) for each in HaltReason}
        halts = Counter(
            "andon_jidoka_halts_total",
            "Times that the line stopped, by reason; `operator` is a person's. Counted since the "
            "run began.",
            ["reason"],
            registry=registry,
        )
        self._halts = {each: halts.labels(each.label) for each in HaltReason}
        answers = Counter(
            "andon_halt_answers_total",
            "Answers to halts, by what a person chose. Counted since the run began.",
            ["answer"],
            registry=registry,
        )
        self._answers = {each: answers.labels(each.name.lower()) for each in HaltAnswer}
        spikes = Counter(
            "andon_spikes_total",
            "Spikes about which the line did something by itself, by what it did. Counted since "
            "the run began.",
            ["action"],
            registry=registry,
        )
        acts: list[SpikeAction] = [each for each in SpikeAction if each is not SpikeAction.HALT]
        self._spikes = {each: spikes.labels(each.value) for each in acts}
        for action, spike in self._spikes.items():
            spike.inc(totals.spikes.get(action, 0))
        for reason, halt in self._halts.items():
            halt.inc(totals.halts.get(reason, 0))
        for choice, answer in self._answers.items():
            answer.inc(totals.answers.get(choice, 0))

    def halted(self, reason: HaltReason) -> None:
        """Counts a halt."""
        self._halts[reason].inc()
        self._show(reason)

    def acted(self, action: SpikeAction) -> None:
        """Counts what the line did by itself about a spike."""
        self._spikes[action].inc()

    def answered(self, answer: HaltAnswer) -> None:
        """Counts an answer."""
        self._answers[answer].inc()

    def tick(self, status: LineSnapshot) -> None:
        """Shows the halt that a status has."""
        self._show(status.halt.reason if status.halt is not None else None)

    def _show(self, present: HaltReason | None) -> None:
        for reason, gauge in self._halted.items():
            gauge.set(reason is present)


class SlownessMetrics:
    """In which part of their work workers were slow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric; every label exists from the start."""
        slow = Counter(
            "andon_slowness_total",
            "Times that the others waited for a worker long enough to ask it why, by the part of "
            "its work that it was in.",
            ["phase"],
            registry=registry,
        )
        self._slow = {each: slow.labels(each.label) for each in SlowPhase}

    def told(self, phase: SlowPhase) -> None:
        """Counts one."""
        self._slow[phase].inc()


class ScheduleMetrics:
    """What lies between two exchanges."""

    def __init__(self, registry: CollectorRegistry, run: ServedRun) -> None:
        """Registers the metrics; no round was opened yet."""
        Gauge(
            "andon_local_steps",
            "Optimizer steps that each worker makes between two exchanges, if the schedule is "
            "local; 0 if gradients are exchanged.",
            registry=registry,
        ).set(run.local_steps)
        self._window = Gauge(
            "andon_window_samples",
            "Positions of the last round that opened: the global batch, or a longer window.",
            registry=registry,
        )
        self._ahead = Gauge(
            "andon_window_ahead_samples",
            "Positions that the workers compute while the last round's exchange travels; 0 "
            "without overlap.",
            registry=registry,
        )
        self._scale = Gauge(
            "andon_learning_rate_scale",
            "Factor of the learning rate in the last round that opened; 1 unless the line scales "
            "it with the window.",
            registry=registry,
        )
        self._scale.set(1.0)
        self._shown: tuple[int, int, float] | None = None
        """What the last three show; None: no round was opened yet. Most rounds are alike."""
        self._owed = Gauge(
            "andon_owed_positions",
            "Positions that windows have taken and no committed step has yet: late workers compute "
            "them. 0 without a quorum.",
            registry=registry,
        )
        self._noise = OptionalGauge(
            registry,
            "andon_gradient_noise_scale_samples",
            "Noise scale of the gradients: in a batch far above it, a sample brings little. Absent "
            "until it is known, and if workers do not report the norms of their gradients.",
        )

    def tick(self, status: LineSnapshot) -> None:
        """Shows the noise scale that a status has, and what is owed."""
        self._owed.set(sum(map(len, status.cursor.owed)))
        self._noise.set(status.noise_scale)

    def assigned(self, assignment: Assignment) -> None:
        """A round opened."""
        batch, ahead = assignment.batch, assignment.ahead_batch
        shown = (
            batch.stop - batch.start,
            0 if ahead is None else ahead.stop - ahead.start,
            assignment.learning_rate_scale,
        )
        if shown != self._shown:
            self._shown = shown
            for gauge, value in zip((self._window, self._ahead, self._scale), shown, strict=True):
                gauge.set(value)
