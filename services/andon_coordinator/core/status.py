"""Status: a snapshot of the line for people, and what the line waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from andon.protocol.arithmetic import is_one
from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import MeanKind
from andon.protocol.slowness import Slowness
from andon_coordinator.core import lost_state, suspects
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.events import Activity, Device, ProcessUse, StepTimings
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.machine_time import RunCost
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.session_status import SessionSnapshot
from andon_coordinator.core.spikes import SpikeAction
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.verification import VerifiedTotals

__all__ = [
    "LineSnapshot",
    "WorkerSnapshot",
    "holds_up",
    "take_snapshot",
    "waiting_for",
]

_SILENT_S = 1.0
"""People are told of a worker that has not answered for so long."""
_LATE = 0.05
"""A worker holds the line up if another one waits for more than this part of a step longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker; the fields are those of `andon.v1.WorkerStatus`, and `use`."""

    worker: int
    rank: int | None
    node_id: str
    device: str
    hardware: Device | None
    """The first device that it described; None: it described none."""
    speed_hint: float | None
    activity: Activity
    detail: str
    step: int
    samples_per_second: float
    waiting_ratio: float
    heartbeat_age_s: float
    live: bool
    in_sync: bool
    learns: bool
    """Whether it gets the line's state while the line trains."""
    steps_behind: int
    """Committed steps that it has not applied, as far as it has told."""
    patience_s: float
    """For how long it may be silent while a round waits for it."""
    metrics_address: str
    final_digest: bytes
    share: float
    micro_batches: int
    timings: StepTimings
    step_s: float
    """How long its last step took, from the assignment to the commit; 0 before its first one."""
    use: ProcessUse
    late_records: int | None = None
    """How many records in a row were made without it while it computes; None: it is not late."""
    owed_positions: int = 0
    """How many positions it owes: it has them, and they are in no record yet."""
    slowness: Slowness | None = None
    """Why it was slow the last time that others waited for it."""
    notice: str = ""
    """Why its machine is about to go, or has gone, by its own notice; empty if it gave none."""
    slow: str = ""
    """What the line does about it because it is slow, and how slow it is; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSnapshot:
    """The line; the fields are those of `andon.v1.LineStatus` that the core knows."""

    run_id: str
    state: LineState
    term: int
    head: Key | None
    step: int
    attempt: int
    cursor: Cursor
    loss: float | None
    total_steps: int | None
    live: int
    participating: int
    workers: tuple[WorkerSnapshot, ...]
    halt: HaltEvidence | None
    stop_reason: str
    samples: int
    correct: int | None
    samples_per_second: float
    exchange_s: float
    hidden_ratio: float
    expect_workers: int
    expect_reducers: int
    reducers: tuple[tuple[str, int], ...]
    """The address of each reducer that is here, and how many elements it averages."""
    waiting_for: str
    checkpoints: RunCheckpoints | None
    """A copy; None if no worker could ever write one."""
    checkpoints_elsewhere: bool
    schedule: str
    schedule_note: str
    noise_scale: float | None
    """Of the gradients, in samples; None if it is not known."""
    grain: int
    """Positions of a grain, if bits are the same on any number of workers; else 0."""
    fragments: int
    """In how many parts the model is exchanged; 1: as a whole."""
    fragment: int | None
    """Which of them the present step exchanges, from 0; None: the whole model."""
    mix: float
    """Of fragments: how much of its own weights a worker keeps where an average arrives."""
    mean: MeanKind
    """Which mean gradients have."""
    trimmed: int | None
    """How many of each element's contributions the last step's mean left out at each end; 0 if they
    were too few. None: the line trims nothing, or made no step."""
    spikes_left: Mapping[SpikeAction, int]
    """How often the line may still deal with a spike by itself, by action; empty: it halts."""
    one_arithmetic: bool
    """Whether all live workers have stated one arithmetic."""
    quorum: float | None = None
    """The part of its workers that a window waits for; None: all."""
    verify: float = 0.0
    """The part of all steps that is computed twice."""
    verified: VerifiedTotals = field(default_factory=VerifiedTotals)
    """How much was; a copy."""
    slowness: tuple[Slowness, ...] = ()
    """Who was slow last and why, the oldest first."""
    session: SessionSnapshot | None = None
    """The run's sessions, if it is one of sessions."""
    cost: RunCost = field(default_factory=RunCost)
    """What the run has taken; the core does not know, its task fills it in."""


def take_snapshot(core: CoreState, now: float) -> LineSnapshot:
    """What the line is doing at `now`."""
    checkpoints = core.checkpoints
    ranks = _ranks(core)
    result = core.chain.last_result
    timings = [each.last_step.timings for each in core.members if each.worker in ranks]
    slowest = max(timings, key=lambda each: each.exchange_s, default=None)
    exchange_s = slowest.exchange_s if slowest is not None else 0.0
    # The part of the slowest exchange that its worker waited for was not hidden behind computing.
    exposed = slowest.wait_s / exchange_s if slowest is not None and exchange_s > 0 else 1.0
    live = core.members.live()
    shows_checkpoints = checkpoints.incarnation is not None or checkpoints.reported > 0
    return LineSnapshot(
        run_id=core.settings.run_id,
        state=core.line_state,
        term=core.keys.term,
        head=core.chain.head,
        step=core.chain.step,
        attempt=core.attempts.attempt,
        cursor=core.chain.cursor,
        loss=result.loss if result is not None else None,
        total_steps=_total_steps(core),
        live=len(live),
        participating=len(ranks),
        workers=tuple(_worker(core, each, ranks, now) for each in core.members),
        halt=core.halt,
        stop_reason=core.stop_reason,
        samples=result.samples if result is not None else 0,
        correct=result.correct if result is not None else None,
        samples_per_second=_rate(result.samples, result.seconds) if result is not None else 0.0,
        exchange_s=exchange_s,
        hidden_ratio=1.0 - _ratio(exposed),
        expect_workers=core.settings.expect_workers,
        expect_reducers=core.settings.expect_reducers,
        reducers=_reducers(core),
        waiting_for=waiting_for(core),
        checkpoints=replace(checkpoints) if shows_checkpoints else None,
        checkpoints_elsewhere=checkpoints.elsewhere,
        schedule=core.pacing.schedule.value,
        schedule_note=core.pacing.note,
        noise_scale=core.pacing.noise_scale,
        grain=core.plan.grain if core.plan is not None else 0,
        fragments=core.settings.policy.fragments,
        fragment=core.attempts.fragment,
        mix=core.settings.policy.mix,
        mean=core.settings.policy.mean,
        trimmed=result.trimmed if result is not None else None,
        spikes_left=core.spikes.left(core.chain.step + 1),
        one_arithmetic=bool(live) and is_one(*(each.arithmetic for each in live)),
        quorum=core.settings.policy.quorum,
        verify=core.settings.verify.fraction,
        verified=replace(core.verified, convicted=list(core.verified.convicted)),
        slowness=tuple(core.slowness.recent),
    )


def holds_up(waits: Mapping[int, float]) -> int | None:
    """The worker that the others wait for; None if nobody waits much longer than another.

    The last worker of a step waits for the exchange alone, so it is the one that waits least.

    Args:
        waits: of each worker of the last step, the part of the step that it waited, from 0 to 1.
    """
    if len(waits) < 2:
        return None
    last = min(waits, key=lambda worker: (waits[worker], worker))
    return last if max(waits.values()) - waits[last] > _LATE else None


def _worker(
    core: CoreState, member: LineMember, ranks: dict[int, int], now: float
) -> WorkerSnapshot:
    last = member.last_step
    waited = last.timings.wait_s / last.seconds if last.seconds > 0 else 0.0
    learning = member.learning
    at_head = member.head is not None and member.head == core.chain.head
    in_sync = at_head and learning is None and not member.spare
    behind = 0 if in_sync else _steps_behind(core, member)
    return WorkerSnapshot(
        worker=member.worker,
        rank=ranks.get(member.worker),
        node_id=member.request.node_id,
        device=member.request.backend,
        hardware=next(iter(member.request.devices), None),
        speed_hint=member.request.speed_hint,
        activity=member.activity if learning is None or learning.late else Activity.SYNCING,
        detail=_detail(core, member, now),
        step=member.step if learning is None else core.chain.step - behind,
        samples_per_second=_rate(last.samples, last.seconds),
        waiting_ratio=_ratio(waited),
        heartbeat_age_s=max(0.0, now - member.heard_at),
        live=member.stream is not None,
        in_sync=in_sync,
        learns=learning is not None,
        steps_behind=behind,
        patience_s=suspects.patience_s(core, member),
        metrics_address=member.request.metrics_address,
        final_digest=member.final_digest,
        share=last.share,
        micro_batches=last.micro_batches,
        timings=last.timings,
        step_s=last.seconds,
        use=member.use,
        late_records=member.left_out if learning is not None and learning.late else None,
        owed_positions=_owed(core, member),
        slowness=_slowness(core, member.worker),
        notice=member.notice,
        slow=_slow(core, member),
    )


def _slowness(core: CoreState, worker: int) -> Slowness | None:
    """Why it was slow the last time; with its stacks if it is one of the last ones."""
    slow = core.slowness.latest.get(worker)
    # A status has room for the stacks of a few workers.
    if slow is None or any(each is slow for each in core.slowness.recent):
        return slow
    return replace(slow, stacks=(), facts=None)


def _detail(core: CoreState, member: LineMember, now: float) -> str:
    """What a worker reports of itself; if its state did not arrive, why, and when to try again."""
    detail, slow = _progress(core, member, now), _slow(core, member)
    if slow and member.stream is not None:
        detail = f"{slow} ({detail})" if detail else slow
    if member.doubted is None:
        return detail
    return f"{detail or 'waits for the state'} (its weights differed from the others')"


def _progress(core: CoreState, member: LineMember, now: float) -> str:
    if member.learning is not None and member.learning.late:
        what = f"late: {_count(member.left_out, 'record')} without it"
        return f"{what}, owes {_count(_owed(core, member), 'position')}"
    if member.learning is not None:
        # Newer than its last heartbeat.
        return _spare(member) if member.spare else member.learning.in_words
    silent_s = member.answers.silent_s(now, core.lag_s, member.heard_at)
    if member.stream is not None and silent_s >= _SILENT_S:
        return f"does not answer, for {silent_s:.0f} s"
    setback = core.transfers.setbacks.get(member.worker)
    here = setback is not None and setback.host == member.request.node_id
    if setback is None or not here or member.worker in core.transfers.joiners:
        return _spare(member) if member.spare else member.detail
    when = f"next try in {max(0.0, setback.not_before - now):.0f} s"
    times = f" ({setback.failures} times)" if setback.failures > 1 else ""
    what = "spare: the line's state" if member.spare else "the line's state"
    return f"{what} did not arrive{times}: {setback.why}; {when}"


def _owed(core: CoreState, member: LineMember) -> int:
    """How many positions a late worker has that no record covers."""
    late = member.learning is not None and member.learning.late
    return sum(map(len, core.attempts.assigned.get(member.worker, ()))) if late else 0


def _slow(core: CoreState, member: LineMember) -> str:
    """What the line does about a worker that is slow, and how slow it is; empty: nothing."""
    why = core.evicted.get(member.request.incarnation)
    if why is not None:
        return f"follows: {why}"
    slow = core.pacing.slow
    why = slow.eased(member.process) if slow is not None else ""
    return why and f"eased: {why}"


def _spare(member: LineMember) -> str:
    """That a worker is a spare, so that nobody takes it for one that hangs; and how far it is."""
    learning = member.learning
    if learning is None:
        return "spare: waits until the line trains"
    if not learning.installed:
        return "spare: gets the line's state"
    behind = len(learning.behind)
    # It makes up a step while the others are in the next one.
    return "spare: ready" if behind <= 1 else f"spare: {behind} steps behind"


def _steps_behind(core: CoreState, member: LineMember) -> int:
    learning = member.learning
    if learning is not None and learning.installed:
        return len(learning.behind)
    return max(0, core.chain.step - member.step)


def _reducers(core: CoreState) -> tuple[tuple[str, int], ...]:
    elements = dict.fromkeys(core.reducers.addresses, 0)
    shares = core.round.terms.reducers if core.round is not None else core.reducer_map
    for share in shares:
        if share.address in elements:
            elements[share.address] += share.stop - share.start
    return tuple(elements.items())


def _ranks(core: CoreState) -> dict[int, int]:
    """Ranks in the open round; between two rounds, ranks in the next one."""
    if core.round is not None:
        workers = list(core.round.roster)
    elif core.pending_record is not None and core.pending_record.result is not None:
        workers = list(core.pending_record.record.roster)
    elif core.line_state in (LineState.RUNNING, LineState.DRAINING):
        workers = [member.worker for member in core.members.in_sync(core.chain.head)]
    else:
        workers = []
    return {worker: rank for rank, worker in enumerate(workers)}


def _total_steps(core: CoreState) -> int | None:
    limits = [core.settings.policy.max_steps]
    if core.plan is not None:
        limits.append(core.plan.total_steps)
    return min((limit for limit in limits if limit is not None), default=None)


def waiting_for(core: CoreState) -> str:
    """What the line waits for, in words that continue "waiting for"."""
    live = core.members.live()
    # The order is that of `progress.go_on`: what the line waits for is the first thing in its way.
    if core.line_state is LineState.COMPLETE:
        return ""
    if core.line_state is LineState.HALTED:
        return f"an answer to halt {core.halt.id}" if core.halt is not None else ""
    if core.pending_record is not None or not core.keys.saved:
        return "the journal"
    if core.round is not None:
        missing = [each for each in core.round.roster if each not in core.round.ready]
        return f"{_names(missing)} to finish step {core.round.terms.step}"
    if core.stop_reason:
        if live:
            return f"{_names([each.worker for each in live])} to leave"
        return f"{_names(list(core.last_roster))} to come back with the weights of the last step"
    if len(core.transfers):
        joiners = core.transfers.joiners
        members = [core.members.get(worker) for worker in joiners]
        details = ", ".join(each.detail for each in members if each is not None and each.detail)
        so_far = f" ({details})" if details else ""
        return f"{_names(joiners)} to receive the line's state{so_far}"
    return _participants_missing(core) or _work_missing(core)


def _participants_missing(core: CoreState) -> str:
    if not core.workers_ready_once:
        here = core.members.worker_count
        return f"{_count(core.expected, 'worker')}, {here} of them here"
    if not core.reducers_ready_once:
        wanted = _count(core.settings.expect_reducers, "reducer")
        return f"{wanted}, {len(core.reducers)} of them here"
    return "" if len(core.reducers) else "a reducer to come back"


def _work_missing(core: CoreState) -> str:
    in_sync = core.members.in_sync(core.chain.head)
    if not in_sync and core.chain.step and (away := lost_state.awaited(core)):
        return f"{_names(away)} to come back with the weights of step {core.chain.step}"
    late = core.members.late()
    if len(in_sync) + len(late) < core.needed:
        away = [each.worker for each in core.members if each.stream is None]
        return (
            f"{_names(away)} to come back" if away else f"{_count(core.needed, 'worker')} in sync"
        )
    idle = [each.worker for each in in_sync if not each.wants_work]
    if late and not idle:
        return f"{_names([each.worker for each in late])} to compute what is owed"
    return f"{_names(idle)} to ask for work"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _names(workers: list[int]) -> str:
    if not workers:
        return "nobody"
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds > 0 else 0.0


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))
