"""Status: what people see of the line, taken from the board at one moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key
from andon_coordinator.core.board import Board, Checkpoints
from andon_coordinator.core.effects import LineState
from andon_coordinator.core.events import Activity
from andon_coordinator.core.roster import Member

__all__ = ["LineStatus", "WorkerStatus", "take_status", "waiting_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker; fields as in `andon.v1.WorkerStatus`."""

    worker: int
    rank: int | None
    node_id: str
    device: str
    activity: Activity
    detail: str
    step: int
    samples_per_second: float
    waiting_ratio: float
    heartbeat_age_s: float
    live: bool
    in_sync: bool
    metrics_address: str
    final_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStatus:
    """The line; fields as in `andon.v1.LineStatus`, save for what only the adapter knows."""

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
    workers: tuple[WorkerStatus, ...]
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
    """The address of each reducer that is there, and how many elements it averages."""
    waiting_for: str
    checkpoints: Checkpoints | None
    """None if nobody ever could write one. What it holds is of this moment."""
    checkpoints_elsewhere: bool


def take_status(board: Board, now: float) -> LineStatus:
    """What the line is doing at `now`."""
    known = board.checkpoints
    ranks = _ranks(board)
    result = board.chain.last_result
    timings = [each.last_step.timings for each in board.roster if each.worker in ranks]
    slowest = max(timings, key=lambda each: each.exchange_s, default=None)
    exchange_s = slowest.exchange_s if slowest is not None else 0.0
    exposed = slowest.wait_s / exchange_s if slowest is not None and exchange_s > 0 else 1.0
    return LineStatus(
        run_id=board.settings.run_id,
        state=board.state,
        term=board.keys.term,
        head=board.chain.head,
        step=board.chain.step,
        attempt=board.tries.attempt,
        cursor=board.chain.cursor,
        loss=result.loss if result is not None else None,
        total_steps=_total_steps(board),
        live=len(board.roster.live()),
        participating=len(ranks),
        workers=tuple(_worker(board, each, ranks, now) for each in board.roster),
        halt=board.halt,
        stop_reason=board.stop,
        samples=result.samples if result is not None else 0,
        correct=result.correct if result is not None else None,
        samples_per_second=_rate(result.samples, result.seconds) if result is not None else 0.0,
        exchange_s=exchange_s,
        hidden_ratio=1.0 - _ratio(exposed),
        expect_workers=board.settings.expect_workers,
        expect_reducers=board.settings.expect_reducers,
        reducers=_reducers(board),
        waiting_for=waiting_for(board),
        checkpoints=replace(known) if known.incarnation is not None or known.told else None,
        checkpoints_elsewhere=board.writes_elsewhere,
    )


def _worker(board: Board, member: Member, ranks: dict[int, int], now: float) -> WorkerStatus:
    last = member.last_step
    waited = last.timings.wait_s / last.seconds if last.seconds > 0 else 0.0
    return WorkerStatus(
        worker=member.worker,
        rank=ranks.get(member.worker),
        node_id=member.request.node_id,
        device=member.request.backend,
        activity=member.activity,
        detail=_detail(board, member, now),
        step=member.step,
        samples_per_second=_rate(last.samples, last.seconds),
        waiting_ratio=_ratio(waited),
        heartbeat_age_s=max(0.0, now - member.heard_at),
        live=member.stream is not None,
        in_sync=member.head is not None and member.head == board.chain.head,
        metrics_address=member.request.metrics_address,
        final_digest=member.final_digest,
    )


def _detail(board: Board, member: Member, now: float) -> str:
    """What a worker says of itself; of one that waits for state, why it did not come."""
    setback = board.transfers.setbacks.get(member.worker)
    here = setback is not None and setback.host == member.request.node_id
    if setback is None or not here or member.worker in board.transfers.joiners:
        return member.detail
    when = f"next try in {max(0.0, setback.not_before - now):.0f} s"
    times = f" ({setback.failures} times)" if setback.failures > 1 else ""
    return f"the line's state did not arrive{times}: {setback.why}; {when}"


def _reducers(board: Board) -> tuple[tuple[str, int], ...]:
    elements = dict.fromkeys(board.reducers.addresses, 0)
    shares = board.round.reducers if board.round is not None else board.reducer_map
    for share in shares:
        if share.address in elements:
            elements[share.address] += share.stop - share.start
    return tuple(elements.items())


def _ranks(board: Board) -> dict[int, int]:
    """Ranks of the present round; between rounds of a line that runs, those of the next one."""
    if board.round is not None:
        workers = list(board.round.roster)
    elif board.saving is not None and board.saving.result is not None:
        workers = list(board.saving.record.roster)
    elif board.state in (LineState.RUNNING, LineState.DRAINING):
        workers = [member.worker for member in board.roster.in_sync(board.chain.head)]
    else:
        workers = []
    return {worker: rank for rank, worker in enumerate(workers)}


def _total_steps(board: Board) -> int | None:
    limits = [board.settings.policy.max_steps]
    if board.plan is not None:
        limits.append(board.plan.total_steps)
    return min((limit for limit in limits if limit is not None), default=None)


def waiting_for(board: Board) -> str:
    """What the line waits for, as the end of a sentence that begins with "waiting for"."""
    live = board.roster.live()
    if board.state is LineState.COMPLETE:
        return ""
    if board.state is LineState.HALTED:
        return f"an answer to halt {board.halt.id}" if board.halt is not None else ""
    if board.saving is not None or not board.keys.saved:
        return "the journal"
    if board.round is not None:
        missing = [each for each in board.round.roster if each not in board.round.ready]
        return f"{_names(missing)} to finish step {board.round.step}"
    if board.stop:
        if live:
            return f"{_names([each.worker for each in live])} to leave"
        return f"{_names(list(board.last_roster))} to come back with the weights of the last step"
    if len(board.transfers):
        joiners = board.transfers.joiners
        members = [board.roster.get(worker) for worker in joiners]
        details = ", ".join(each.detail for each in members if each is not None and each.detail)
        so_far = f" ({details})" if details else ""
        return f"{_names(joiners)} to receive the line's state{so_far}"
    return _company_missing(board, live) or _work_missing(board)


def _company_missing(board: Board, live: list[Member]) -> str:
    if not board.formed:
        return f"{board.expected} workers, {len(live)} of them here"
    if not board.equipped:
        return f"{board.settings.expect_reducers} reducers, {len(board.reducers)} of them here"
    return "" if len(board.reducers) else "a reducer to come back"


def _work_missing(board: Board) -> str:
    in_sync = board.roster.in_sync(board.chain.head)
    if len(in_sync) < board.needed:
        away = [each.worker for each in board.roster if each.stream is None]
        return f"{_names(away)} to come back" if away else f"{board.needed} workers in sync"
    return f"{_names([each.worker for each in in_sync if not each.asked])} to ask for work"


def _names(workers: list[int]) -> str:
    if not workers:
        return "nobody"
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds > 0 else 0.0


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))
