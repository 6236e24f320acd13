"""A line whose workers have given speeds, for tests of balance and cadence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.cadence import Cadence
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.core.loss_trend import Stable, Verdict
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.readings import PacedProcess, Reading
from scenarios.line_bench import LAYOUT

__all__ = ["PLAN", "members", "processes", "readings_of", "windows"]

PLAN = RunPlan(global_batch=12, dataset_size=600)


def processes(number: int, **hints: float) -> tuple[PacedProcess, ...]:
    """`number` processes; `w1=4.0` is a hint for worker 1."""
    return tuple(
        PacedProcess(worker, 100 + worker, f"host-{worker}", hints.get(f"w{worker}", 0.0))
        for worker in range(number)
    )


def readings_of(
    roster: Sequence[PacedProcess], computed: Sequence[int], seconds: Sequence[float]
) -> list[Reading]:
    """What each rank reports of a step: so many samples in so many seconds."""
    return [
        Reading(process=process, computed=number, busy_s=busy)
        for process, number, busy in zip(roster, computed, seconds, strict=True)
    ]


def windows(
    cadence: Cadence,
    times: Mapping[PacedProcess, float],
    number: int,
    *,
    exchange_s: float = 0.0,
    verdict: Verdict | None = None,
) -> list[tuple[int, ...]]:
    """Trains `number` windows at these seconds per sample; the counts before each, and after."""
    roster = tuple(times)
    seen = [cadence.counts(roster)]
    for _ in range(number):
        busy = [count * times[each] for count, each in zip(seen[-1], roster, strict=True)]
        cadence.report(readings_of(roster, seen[-1], busy), exchange_s=exchange_s, unit=1)
        cadence.judge(verdict or Stable())
        seen.append(cadence.counts(roster))
    return seen


def members(number: int, **fields: Any) -> list[LineMember]:
    """`number` workers of a run with this plan."""
    return [
        LineMember(
            worker=worker,
            request=JoinRequest(
                run_id="7f3a", incarnation=worker + 1, layout=LAYOUT, plan=PLAN, **fields
            ),
            stream=worker,
            head=None,
            held=None,
            step=0,
            heard_at=0.0,
        )
        for worker in range(number)
    ]
