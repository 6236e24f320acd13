"""Configuration of a coordinator."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from andon.host.settings import (
    EVERYDAY,
    Count,
    Factor,
    Seconds,
    Whole,
    Within,
    Workers,
    check,
    seconds,
    whole,
)
from andon.protocol.announcements import Announcement
from andon.protocol.arithmetic import ArithmeticRule
from andon.protocol.encoding import Encoding
from andon.protocol.limits import CHUNK_ELEMENTS, MAX_COMPONENTS, MAX_WORKERS
from andon.protocol.records import Key
from andon.protocol.reducers import MAX_REDUCERS
from andon.protocol.ring import RING_CAPABILITY
from andon.protocol.run_settings import LEAST_TRIMMED, Liveness, MeanKind, Policy, Topology
from andon.protocol.schedules import AVERAGING, NESTEROV, Schedule
from andon.protocol.sparse import KEPT, MOST_KEPT
from andon_coordinator.core.cadence import CadenceRules
from andon_coordinator.core.eviction import EvictionRules
from andon_coordinator.core.machine_time import Price
from andon_coordinator.core.pacing import capabilities_for
from andon_coordinator.core.same_bits import obstacle_in
from andon_coordinator.core.settings import (
    LearningRateScaling,
    LineSettings,
    PacingSettings,
    VerifySettings,
)
from andon_coordinator.core.spikes import SpikeAction
from andon_coordinator.transport.opening import JournalSync

__all__ = ["CoordinatorConfig", "LineOptions", "too_few_to_trim"]

_MAX_ANCHOR = CadenceRules().max_anchor
_SPIKE_FACTOR = 10.0
"""Of a line that acts on spikes by itself, where nobody gave one."""

_ONE_WORKER = 2.0**-20
"""A quorum of one worker, of as many as a line may have."""

_LONGEST_CURRENCY = 8

_SCHEDULES = {"auto": None, "async": Schedule.LOCAL} | {each.value: each for each in Schedule}


_NARROW = frozenset(each.label for each in Encoding if each.loses_much)


def too_few_to_trim(workers: int, flag: str = "--workers") -> str:
    """Why a line of at most so many workers, by that flag, can't have a trimmed mean."""
    return (
        f"--mean trimmed needs {LEAST_TRIMMED} contributions, and {flag} {workers} brings fewer: "
        "raise it, or leave --mean out"
    )


def _check_grace(type_: Any, text: str) -> None:
    try:
        grace_s = 0.0 if text == "auto" else float(text)
    except ValueError:
        grace_s = math.nan
    if not 0.0 <= grace_s < math.inf:
        raise ValueError(f"must be auto, or seconds from 0 on, not {text!r}")


def _check_currency(type_: Any, text: str) -> None:
    if len(text) > _LONGEST_CURRENCY or not text.isprintable():
        raise ValueError(f"must be at most {_LONGEST_CURRENCY} printable characters, not {text!r}")


@Parameter(name="*", group=Group("The line", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """What an operator may choose about a line.

    Each field is a setting of `andon serve` and `andon run`, and its docstring is the setting's
    help. A setting is added here, and nowhere else.
    """

    min_workers: Workers = 1
    """Wait for more workers while fewer than N are in sync."""
    max_workers: Workers | None = None
    """Refuse more than N workers. Default: as many as the line waits for at first."""
    reducers: Annotated[int, whole(1, MAX_REDUCERS)] = 1
    """Wait for N reducers before the first round, the service's own included."""
    max_steps: Annotated[
        Count | None, Parameter(name=("--max-steps", "--steps"), group=EVERYDAY)
    ] = None
    """End after N steps. Default: the scripts decide."""
    encoding: Literal["float32", "bfloat16", "float16", "int8", "int4", "int2", "topk"] = "float32"
    """How gradients travel. 16 bits halve the traffic and lose digits; int8, int4, int2 and topk
    are for slow links. What these lose of a gradient is sent with the next one."""
    topk_kept: Annotated[int | None, whole(1, MOST_KEPT)] = None
    """Of topk: send N of each 256 elements, those of greatest magnitude. Default: 4."""
    answer_encoding: Literal["same", "float32", "bfloat16", "float16", "int8", "int4"] = "same"
    """How averages travel back; `same` is as gradients do, and int4 with int2. Nothing makes up for
    what they lose."""
    mean: Literal["weighted", "trimmed"] = "weighted"
    """The mean of gradients: of all workers' by their weights, or of five workers or more without
    the lowest and highest fifth of each element. It is no defence against an adversary."""
    topology: Topology = Topology.STAR
    """How gradients travel: to the reducers and back, or around a ring of workers."""
    may_stop: Literal["workers", "operators"] = "workers"
    """Who may end the run early: every worker's script (`line.stop`), or operators alone."""
    digest_every: Whole = Policy().digest_every
    """Compare the workers' weights every N steps; 0 never does."""
    journal_sync: JournalSync = "normal"
    """With `full`, committed steps survive a power loss, not only a crash."""
    liveness_s: Annotated[float, seconds(0.1)] = Liveness().lease_s
    """Count a worker as lost after this long without a sign of life."""
    forming_timeout_s: Seconds | None = None
    """Halt after waiting this long for workers or reducers. Default: wait forever."""
    straggler_timeout_s: Seconds | None = None
    """Go on without a worker after the others waited this long for it. Default: never."""
    loss_spike: Factor | None = None
    """Halt if a step's loss is FACTOR deviations above the last 64. Default: off."""
    grad_norm_spike: Factor | None = None
    """Halt if the norm of the averaged gradient is FACTOR deviations above. Default: off."""

    worker_grad_norm: Factor | None = None
    """Halt if a worker's own gradient is FACTOR times the others' median, or a block of it FACTOR
    times its usual, or if a worker drifts. Default: off."""
    on_spike: SpikeAction = SpikeAction.HALT
    """About a spike: halt; or go on by itself, and scale the averaged gradient down (limit), leave
    the step's samples out (skip), go back to a checkpoint and leave out what was trained since, if
    the spike stays (back), or send a worker away that stands out again and again, or drifts (drop).
    Each includes those before it. Without a FACTOR of the three above, each is 10."""
    evict_slower_than: Annotated[
        float | None, Parameter(validator=Within(above=1.0, most=1000.0), metavar="FACTOR")
    ] = None
    """Deal a worker less that takes FACTOR times the others' median for a sample, for long; if it
    holds them up all the same, let it follow and compute nothing. Default: off."""
    max_grad_norm: Factor | None = None
    """Scale each worker's own gradient down to this norm. Default: no limit."""
    average_buffers: bool = False
    """Average running statistics such as BatchNorm's; if not, all take those of rank 0."""
    schedule: Literal["auto", "every-step", "cadence", "local", "async"] = "auto"
    """When workers exchange: after equal work, work by speed (cadence), or several local steps.
    `auto` is cadence if the workers' devices differ, else every-step; `async` is local, and each
    worker's change enters as soon as it is there."""
    shares: Literal["equal", "balanced", "interleaved", "balanced-interleaved"] = "equal"
    """Divide a step's samples equally or by measured speed, in one run each or interleaved."""
    overhead_target: Annotated[float, Parameter(validator=Within(0.01, 0.5), metavar="PART")] = 0.05
    """Of a cadence: the part of its time that exchanging may take, before windows grow."""
    max_anchor: Annotated[int | None, whole(1, 1000)] = None
    """Of a cadence: a window is N times the script's batch at most. Default: 16; 1 if the line
    chose the cadence by itself."""
    max_batch_diff: Count | None = None
    """Of a cadence: change a worker's part of a window by at most N times what the slowest computes
    of a batch. Default: no limit."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Of a cadence: how learning rates follow the size of a window, which does not grow without."""
    growth_cost: Annotated[float, Parameter(validator=Within(0.001, 1.0), metavar="PART")] = 0.05
    """Of a cadence: the part of samples that windows may waste by growing, judged by the gradients'
    noise; 1 lets them grow whatever it costs."""
    noise_scale: bool = False
    """Measure the noise scale of the gradients, which says what a larger batch would be worth:
    workers report the norms of theirs. A cadence that may grow measures it anyway."""
    local_steps: Count = 16
    """Of the schedule local: a worker's own optimizer steps between two exchanges."""
    outer: Literal["average", "nesterov"] = "average"
    """Of the schedule local: average the weights, or apply their change by SGD (0.7) with
    Nesterov's momentum (0.9)."""
    overlap: bool = False
    """Of the schedule local: exchange one window while the next one is computed."""
    overlap_steps: Annotated[int | None, whole(1)] = None
    """Of overlap: compute N local steps of the next window while one is exchanged, and then wait:
    the sooner a mean arrives, the less loss it costs. Default: all of them."""
    fragments: Annotated[int, whole(1, MAX_COMPONENTS)] = 1
    """Of the schedule local: exchange one of N parts of the model, N times as often. N must divide
    the local steps."""
    mix: Annotated[float, Parameter(validator=Within(0.0, 0.99), metavar="PART")] = 0.0
    """Of fragments and overlapped windows: how much of its own weights a worker keeps where an
    average arrives."""
    quorum: Annotated[
        float | None, Parameter(validator=Within(above=0.0, most=1.0), metavar="PART")
    ] = None
    """Of the schedule local: a window goes on once this part of its workers has computed; the
    others' changes are in a later one. Default: it waits for all."""
    grace: Annotated[str, Parameter(validator=_check_grace, metavar="auto|SECONDS")] = "auto"
    """Of a quorum: how long those that have computed wait for the others; `auto` is as long as
    their changes are worth."""
    max_late: Annotated[int | None, whole(1, 1000)] = None
    """Of a quorum: leave a worker out of at most N windows in a row, then wait for it. Default: 8.
    """
    same_bits: bool = False
    """Make the weights the same, bit for bit, on any number of workers, whatever is lost. Scripts
    must pass `prepare` a `micro_batch_size`."""
    arithmetic: ArithmeticRule = ArithmeticRule.REQUIRE
    """Of same bits: refuse a worker whose processor, versions or threads differ from the line's, or
    tell people."""
    verify: Annotated[float, Parameter(validator=Within(0.0, 1.0), metavar="PART")] = 0.0
    """Compute this part of all steps twice, and commit none while results differ; with `same_bits`
    in the scripts. It costs as much more computing."""
    on_wrong_arithmetic: Literal["halt", "drop"] = "halt"
    """Halt if a worker computes wrong, or drop it if two others prove it and enough remain."""

    price_per_hour: Annotated[float | None, Parameter(validator=Within(0), metavar="PRICE")] = None
    """What an hour of one worker's machine costs: status, board and report then say what the run
    does. The journal keeps it. Default: what the journal has."""
    currency: Annotated[str, Parameter(validator=_check_currency, metavar="NAME")] = ""
    """Of the price: up to 8 characters for people."""

    def __post_init__(self) -> None:
        """Refuses values beyond their limits."""
        check(self)

    def spike_factor(self, given: float | None) -> float | None:
        """One of the FACTORs of spikes: as given, or the default of a line that acts by itself."""
        acts = self.on_spike is not SpikeAction.HALT
        return _SPIKE_FACTOR if given is None and acts else given

    @property
    def grace_s(self) -> float | None:
        """How long those that have computed wait for the others; None: as long as it is worth."""
        if self.schedule == "async":
            return 0.0
        return None if self.grace == "auto" else float(self.grace)

    @property
    def contradiction(self) -> str:
        """What nothing would obey, and the remedy; empty if there is no such setting."""
        only_local = {
            "outer nesterov": self.outer != "average",
            "overlap": self.overlap,
            "overlap-steps": self.overlap_steps is not None,
            "fragments": self.fragments > 1,
            "mix": self.mix > 0,
            "quorum": self.quorum is not None,
        }
        for flag, given in only_local.items():
            if given and not self.is_local:
                return (
                    f"--{flag} applies to local steps, and the schedule is {self.schedule}: "
                    "pass --schedule local too, or leave it out"
                )
        if self.overlap_steps is not None and not self.overlap:
            return "--overlap-steps are those of --overlap: pass that too, or leave them out"
        if self.quorum is not None and self.on_spike is SpikeAction.BACK:
            return (
                "--on-spike back does not apply to a quorum, where samples are owed from before "
                "and after a checkpoint: pass --on-spike skip, or leave --quorum out"
            )
        if (no_fragments := self._obstacle_to_fragments) or (no_quorum := self._beside_quorum):
            return no_fragments or no_quorum
        if other := self._beside_topk or self._beside_trimmed_mean:
            return other
        if self.currency and self.price_per_hour is None:
            return "--currency is that of a price: pass --price-per-hour too, or leave it out"
        refused = self._beside_noise_scale or self._obstacle_to_eviction or self._beside_max_anchor
        if refused:
            return refused
        wanted = "--verify" if self.verify else "--same-bits" if self.same_bits else ""
        if wanted and (obstacle := obstacle_in(_policy_of(self), _pacing_of(self))):
            return (
                f"{wanted} can't go with {obstacle.setting}, which {obstacle.why}: "
                f"{obstacle.remedy}"
            )
        return ""

    @property
    def price(self) -> Price | None:
        """What an hour of a machine costs; None: as the journal says."""
        return None if self.price_per_hour is None else Price(self.price_per_hour, self.currency)

    @property
    def policy(self) -> Policy:
        """The policy of a line with these options, as its workers get it."""
        return _policy_of(self)

    @property
    def is_local(self) -> bool:
        """Whether workers make several steps of their own between two exchanges."""
        return self.schedule in ("local", "async")

    @property
    def _beside_quorum(self) -> str:
        """What can't go with a quorum, or needs one, and the remedy; empty if nothing is so."""
        late = {"grace": self.grace != "auto", "max-late": self.max_late is not None}
        given = [flag for flag, is_given in late.items() if is_given]
        if self.schedule == "async":
            if self.quorum is not None or self.grace != "auto":
                flag = "quorum" if self.quorum is not None else "grace"
                return (
                    f"--schedule async is a quorum of one worker and no grace: leave out --{flag}, "
                    "or pass --schedule local"
                )
        elif self.quorum is None:
            flag = next(iter(given), "")
            return flag and f"--{flag} applies to a quorum: pass --quorum too, or leave it out"
        what = "--schedule async" if self.schedule == "async" else "--quorum"
        others = {
            "--overlap": self.overlap,
            "--fragments": self.fragments > 1,
            "--topology ring": self.topology is Topology.RING,
            f"--shares {self.shares}": self.shares.endswith("interleaved"),
        }
        for other, is_set in others.items():
            if is_set:
                return f"{what} can't go with {other}: leave one of them out"
        return ""

    @property
    def _beside_noise_scale(self) -> str:
        """What can't go with measuring the noise scale, and the remedy; empty: nothing."""
        if not self.noise_scale:
            return ""
        if self.is_local:
            return (
                f"--noise-scale measures gradients, and with --schedule {self.schedule} workers "
                "exchange changes of the weights: leave one of them out"
            )
        if self.same_bits or self.verify:
            other = "--same-bits" if self.same_bits else "--verify"
            return (
                f"--noise-scale compares gradients of workers' shares, and {other} adds those of "
                "grains: leave one of them out"
            )
        return ""

    @property
    def _beside_topk(self) -> str:
        """What can't go with the encoding topk, or without it, and the remedy; empty: nothing."""
        if self.topk_kept is not None and self.encoding != "topk":
            return (
                f"--topk-kept applies to the encoding topk, and the encoding is {self.encoding}: "
                "pass --encoding topk too, or leave it out"
            )
        if self.encoding == "topk" and self.topology is Topology.RING:
            return (
                "--encoding topk sends few elements, and a ring adds sums of all of them: use "
                "--topology star, or --encoding int4"
            )
        return ""

    @property
    def _beside_trimmed_mean(self) -> str:
        """What can't go with a trimmed mean, and the remedy; empty: nothing."""
        if self.mean != "trimmed":
            return ""
        narrow = _NARROW.intersection((self.encoding, self.answer_encoding))
        if self.max_workers is not None and self.max_workers < LEAST_TRIMMED:
            return too_few_to_trim(self.max_workers, "--max-workers")
        if self.topology is Topology.RING:
            other, why = "--topology ring", "adds contributions as they pass by"
            remedy = "use --topology star"
        elif self.is_local:
            other, why = f"--schedule {self.schedule}", "exchanges changes of the weights"
            remedy = "use --schedule every-step"
        elif narrow:
            flag = "encoding" if self.encoding in narrow else "answer-encoding"
            other, why = f"--{flag} {min(narrow)}", "rounds so coarsely that many contributions tie"
            remedy = f"use --{flag} float32 or bfloat16"
        elif self.noise_scale or _pacing_of(self).asks_for_noise:
            other = "--noise-scale" if self.noise_scale else "--max-anchor with --lr-scaling"
            why, remedy = "compares contributions with their whole mean", "leave one of them out"
        else:
            return ""
        return f"--mean trimmed can't go with {other}, which {why}: {remedy}"

    @property
    def _beside_max_anchor(self) -> str:
        """Why windows would never grow up to what was asked for; empty if they may."""
        longer = self.max_anchor is not None and self.max_anchor > 1
        if not longer or self.lr_scaling != "none" or self.growth_cost >= 1:
            return ""
        if self.schedule not in ("auto", "cadence"):
            return ""  # There is no cadence.
        return (
            f"--max-anchor {self.max_anchor} has no effect without --lr-scaling: a window does not "
            "grow while learning rates don't follow it. Pass --lr-scaling sqrt or linear (or "
            "--growth-cost 1, to let windows grow all the same), or leave it out"
        )

    @property
    def _obstacle_to_eviction(self) -> str:
        """Why a slow worker could never follow, and the remedy; empty if it could."""
        if self.evict_slower_than is None:
            return ""
        if self.is_local:
            return (
                f"--evict-slower-than can't go with --schedule {self.schedule}, which nobody can "
                "follow without computing: use --quorum, with which nobody waits for slow workers"
            )
        if self.topology is Topology.RING:
            return (
                "--evict-slower-than can't go with --topology ring, which nobody can follow: use "
                "--topology star"
            )
        return ""

    @property
    def _obstacle_to_fragments(self) -> str:
        """What can't go with fragments, and the remedy; empty if nothing is in the way."""
        if self.fragments == 1:
            needless = self.mix > 0 and not self.overlap
            return (
                "--mix applies to fragments and to overlapped windows: pass --fragments or "
                "--overlap too, or leave it out"
            ) * needless
        if self.local_steps % self.fragments:
            return (
                f"--fragments {self.fragments} does not divide --local-steps {self.local_steps}: "
                "choose numbers of which one divides the other"
            )
        if self.topology is Topology.RING:
            return (
                "--fragments can't go with --topology ring, which passes on the whole model: use "
                "--topology star"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How one run's coordinator works: the operator's choices, and what the process adds."""

    run_id: str
    """The run that is served."""
    journal: Path
    """The database file, `runs/<run_id>/journal.sqlite`; created if it does not exist."""
    line: LineOptions = field(default_factory=LineOptions)
    """What the operator chose."""
    expect_workers: int = 1
    """How many workers the line waits for before step 0."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements in a chunk, the same for the line and its reducers."""
    own_reducer: bool = True
    """Whether this process serves a reducer too, at the coordinator's address."""
    registers: bool = False
    """Whether reducers in other processes may register: they share the secret."""
    rejoin_grace_s: float = 0.2
    """How long a worker whose stream broke may take to come back before it counts as lost."""
    join_s: float = 30.0
    """How long a stream has to send Join."""
    recovery_window_s: float = 30.0
    """How long a restarted line waits for missing workers before it goes on without them."""
    max_attempts: int = 3
    """The line halts once this many attempts at one step lost a worker."""
    token: bytes = field(default=b"", repr=False)
    """The run's token, for workers that join and people who look; empty: none."""
    operator_token: bytes = field(default=b"", repr=False)
    """The token of operators, who halt, resume and drain; empty: the run's token is enough."""
    viewer_token: bytes = field(default=b"", repr=False)
    """The token that may look and do nothing else; empty: none."""
    withdrawn_file: Path | None = None
    """Names of worker tokens that open nothing any more; None: all of them do."""
    resume_from: Key | None = None
    """Go on from this record of the journal, and roll back what came after; None: the last one."""
    metrics_url: str = ""
    """Where the service's metrics are, for statuses."""
    shared_dir: Path | None = None
    """The folder in which workers of this host are offered sockets; None: they use gRPC."""
    tcp_port: int = 0
    """The port of the own reducer's TCP lanes, for statuses; 0: it offers none."""
    announce: Callable[[Announcement], None] | None = field(default=None, repr=False)
    """Tells the own reducer what it may serve; None: there is none, or it serves everything."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if not self.run_id or any(character in self.run_id for character in "/\\\0\n"):
            raise ValueError(f"a run id is a short name without separators, not {self.run_id!r}")
        if not self.registers and (self.line.reducers > 1 or not self.own_reducer):
            raise ValueError("reducers that are processes of their own need `registers`")
        if not self.join_s > 0:
            raise ValueError(f"join_s must be above 0, not {self.join_s}")
        if self.line.journal_sync not in ("normal", "full"):
            raise ValueError(f"journal_sync must be normal or full, not {self.line.journal_sync!r}")
        if self.line.contradiction:
            raise ValueError(self.line.contradiction)
        if self.policy.trims and self.max_workers < LEAST_TRIMMED:
            raise ValueError(too_few_to_trim(self.max_workers))
        self.line_settings()

    @property
    def policy(self) -> Policy:
        """How the line works; sent to every worker."""
        return _policy_of(self.line, self.chunk_elements)

    @property
    def pacing(self) -> PacingSettings:
        """How work is divided among the workers."""
        return _pacing_of(self.line)

    @property
    def liveness(self) -> Liveness:
        """How long to wait for a silent worker; sent to every worker."""
        return Liveness.of_line(self.line.liveness_s, self.max_workers)

    @property
    def max_workers(self) -> int:
        """Worker ids are below this."""
        most = self.line.max_workers
        return min(self.expect_workers, MAX_WORKERS) if most is None else most

    def line_settings(self) -> LineSettings:
        """The settings of the line's core.

        Raises:
            ValueError: values contradict each other.
        """
        return LineSettings(
            run_id=self.run_id,
            expect_workers=self.expect_workers,
            min_workers=self.line.min_workers,
            max_workers=self.max_workers,
            expect_reducers=self.line.reducers,
            own_reducer=self.own_reducer,
            policy=self.policy,
            liveness=self.liveness,
            rejoin_grace_s=self.rejoin_grace_s,
            recovery_window_s=self.recovery_window_s,
            max_attempts=self.max_attempts,
            forming_timeout_s=self.line.forming_timeout_s,
            straggler_timeout_s=self.line.straggler_timeout_s,
            host=socket.gethostname(),
            token=self.token,
            workers_may_stop=self.line.may_stop == "workers",
            loss_spike=self.line.spike_factor(self.line.loss_spike),
            gradient_norm_spike=self.line.spike_factor(self.line.grad_norm_spike),
            worker_gradient_norm=self.line.spike_factor(self.line.worker_grad_norm),
            on_spike=self.line.on_spike,
            pacing=self.pacing,
            grace_s=self.line.grace_s,
            arithmetic=self.line.arithmetic,
            same_bits=self.line.same_bits or self.line.verify > 0,
            verify=VerifySettings(
                fraction=self.line.verify, drops=self.line.on_wrong_arithmetic == "drop"
            ),
            capabilities=frozenset({RING_CAPABILITY} if self.line.topology is Topology.RING else ())
            | capabilities_for(self.pacing, self.policy),
        )


def _policy_of(line: LineOptions, chunk_elements: int = CHUNK_ELEMENTS) -> Policy:
    answer = line.answer_encoding
    if answer == "same" and line.encoding == "int2":
        answer = "int4"
    noise = _pacing_of(line).asks_for_noise or line.noise_scale
    return Policy(
        chunk_elements=chunk_elements,
        encoding=Encoding.of(line.encoding),
        answer_encoding=None if answer == "same" else Encoding.of(answer),
        digest_every=line.digest_every,
        max_steps=line.max_steps,
        gradient_norm=line.spike_factor(line.grad_norm_spike) is not None or noise,
        topology=line.topology,
        local_steps=line.local_steps if line.is_local else 0,
        quorum=_ONE_WORKER if line.schedule == "async" else line.quorum,
        max_late=Policy().max_late if line.max_late is None else line.max_late,
        outer=NESTEROV if line.outer == "nesterov" else AVERAGING,
        overlap=line.overlap,
        overlap_steps=line.overlap_steps or 0,
        fragments=line.fragments if line.is_local else 1,
        mix=line.mix,
        max_grad_norm=line.max_grad_norm,
        own_gradient_norm=line.spike_factor(line.worker_grad_norm) is not None or noise,
        average_buffers=line.average_buffers,
        topk_kept=KEPT if line.topk_kept is None else line.topk_kept,
        mean=MeanKind[line.mean.upper()],
    )


def _pacing_of(line: LineOptions) -> PacingSettings:
    # Longer windows are larger batches, which a loss may not bear. Nobody gets them unasked.
    unasked = 1 if line.schedule == "auto" else _MAX_ANCHOR
    return PacingSettings(
        schedule=_SCHEDULES[line.schedule],
        balanced=line.shares.startswith("balanced"),
        interleaved=line.shares.endswith("interleaved"),
        cadence=CadenceRules(
            overhead_target=line.overhead_target,
            max_anchor=unasked if line.max_anchor is None else line.max_anchor,
            max_batch_diff=line.max_batch_diff,
        ),
        learning_rate_scaling=LearningRateScaling(line.lr_scaling),
        growth_cost=line.growth_cost,
        eviction=None
        if line.evict_slower_than is None
        else EvictionRules(slower_than=line.evict_slower_than),
    )
