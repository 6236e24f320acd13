"""A run of sessions where people look at lines: its ranks are shown as workers are."""

from __future__ import annotations

from dataclasses import replace

from andon_coordinator.core.events import Activity, Device, ProcessUse, StepTimings
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.session_status import RankSnapshot, RankState, SessionSnapshot
from andon_coordinator.core.status import LineSnapshot, WorkerSnapshot

__all__ = ["with_session"]

_ACTIVITIES = {
    RankState.WAITING: Activity.IDLE,
    RankState.RUNNING: Activity.COMPUTING,
    RankState.IN_CALL: Activity.EXCHANGING,
    RankState.LEFT: Activity.IDLE,
    RankState.OVER: Activity.IDLE,
}


def with_session(line: LineSnapshot, session: SessionSnapshot | None) -> LineSnapshot:
    """The status of a run of sessions; that of its line if it has none."""
    if session is None:
        return line
    goes_on = session.key is not None
    workers = tuple(_worker(each) for each in session.ranks)
    state = _state(session)
    waits = session.waiting_for or "ranks to attend"
    live = sum(each.live for each in workers)
    return replace(
        line,
        state=state,
        step=session.steps,
        live=live,
        participating=live if goes_on else 0,
        workers=workers,
        expect_workers=session.world_size or line.expect_workers,
        waiting_for=waits if state is LineState.FORMING else "",
        halt=None,
        session=session,
    )


def _state(session: SessionSnapshot) -> LineState:
    if session.key is not None:
        return LineState.RUNNING
    in_order = session.formed and session.last is None and not session.awaited
    return LineState.COMPLETE if in_order and session.ranks else LineState.FORMING


def _worker(rank: RankSnapshot) -> WorkerSnapshot:
    request, report = rank.request, rank.report
    device = request.device or request.backend
    return WorkerSnapshot(
        worker=request.rank,
        rank=request.rank if rank.state in (RankState.RUNNING, RankState.IN_CALL) else None,
        node_id=request.node_id,
        device=request.backend,
        hardware=Device(request.backend, device, 0, 0) if device else None,
        speed_hint=None,
        activity=_ACTIVITIES[rank.state],
        detail=rank.in_words,
        step=report.steps,
        samples_per_second=0.0,
        waiting_ratio=rank.exchange_ratio,
        heartbeat_age_s=rank.silent_s,
        live=rank.state not in (RankState.LEFT, RankState.OVER),
        in_sync=True,
        learns=False,
        steps_behind=0,
        patience_s=0.0,
        metrics_address=request.metrics_address,
        final_digest=b"",
        share=0.0,
        micro_batches=0,
        timings=StepTimings(exchange_s=report.exchange_s),
        step_s=0.0,
        use=ProcessUse(),
    )
