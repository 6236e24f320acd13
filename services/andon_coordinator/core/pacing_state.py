"""What is kept of a line's pace: as bytes in the journal, in commits and in checkpoints.

The bytes are JSON with a version. They come back from workers and from files, so everything is
checked when they are read: whatever is not as it was written gives nothing, and the line measures
its workers anew. A wrong state can make shares uneven for a few steps, and nothing worse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from andon.protocol.limits import MAX_PACING_BYTES, MAX_WORKERS
from andon.protocol.schedules import Schedule
from andon_coordinator.core.balance import SavedShare
from andon_coordinator.core.cadence import SavedPace
from andon_coordinator.core.noise_scale import SavedNoise
from andon_coordinator.core.readings import PacedProcess

__all__ = ["MOST_BYTES", "SavedPacing", "bytes_of", "saved_of"]

_VERSION = 2
"""An anchor of version 1 was counted in something else, and nothing else was different."""

MOST_BYTES = 2**14
"""A longer state is kept without the readings: it travels to every worker with every commit."""

_NOISE = ("noise", "signal", "noise_spread", "signal_spread")
_LONGEST_NOTE = 500
_LONGEST_MACHINE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPacing:
    """What one coordinator knows of its workers' pace, for the next one."""

    schedule: Schedule | None = None
    """The schedule that was chosen by itself; None: an operator chose."""
    note: str = ""
    """Why it was."""
    anchor: int = 1
    anchor_process: PacedProcess | None = None
    reports: int = 0
    paces: tuple[SavedPace, ...] = ()
    paced_roster: int = 0
    """How many of the last paces were the roster."""
    shares: tuple[SavedShare, ...] = ()
    noise: SavedNoise = field(default_factory=SavedNoise)


def bytes_of(saved: SavedPacing) -> bytes:
    """The state as bytes, `MOST_BYTES` at most."""
    whole = _written(saved)
    if len(whole) <= MOST_BYTES:
        return whole
    # The decisions are worth more than the measurements, which take a few steps to repeat.
    return _written(
        SavedPacing(
            schedule=saved.schedule,
            note=saved.note,
            anchor=saved.anchor,
            reports=saved.reports,
            noise=saved.noise,
        )
    )


def saved_of(data: bytes) -> SavedPacing | None:
    """The state that `bytes_of` wrote; None if these bytes are anything else."""
    if not data or len(data) > MAX_PACING_BYTES:
        return None
    try:
        return _read(json.loads(data))
    # What `json` raises for damage (deep nesting included), and `_read` for unexpected shapes.
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _written(saved: SavedPacing) -> bytes:
    paced = [each.process for each in saved.paces]
    anchor = paced.index(saved.anchor_process) if saved.anchor_process in paced else None
    state = {
        "v": _VERSION,
        "schedule": None if saved.schedule is None else saved.schedule.value,
        "note": saved.note[:_LONGEST_NOTE],
        "anchor": saved.anchor,
        "anchor_process": anchor,
        "reports": saved.reports,
        "roster": saved.paced_roster,
        "paces": [
            [*_process(each.process), each.count, [_short(value) for value in each.readings]]
            for each in saved.paces
        ],
        "shares": [
            [
                *_process(each.process),
                None if each.throughput is None else _short(each.throughput),
                each.target,
            ]
            for each in saved.shares
        ],
        "noise": [
            saved.noise.steps,
            *(_short(getattr(saved.noise, name)) for name in _NOISE),
        ],
    }
    return json.dumps(state, separators=(",", ":"), ensure_ascii=True).encode()


def _process(process: PacedProcess) -> tuple[int, int, str]:
    return process.worker, process.incarnation, process.machine


def _short(value: float) -> float:
    # Six digits are more than a clock is good for.
    return float(f"{value:.6g}")


def _read(state: Any) -> SavedPacing:
    if state["v"] not in (1, _VERSION):
        raise ValueError("another version")
    older = state["v"] == 1
    paces = tuple(
        SavedPace(
            _process_of(worker, incarnation, machine),
            _whole(count, 1, 2**21),
            tuple(_positive(value) for value in readings[:8]),
        )
        for worker, incarnation, machine, count, readings in _listed(state["paces"])
    )
    shares = tuple(
        SavedShare(
            _process_of(worker, incarnation, machine),
            None if throughput is None else _positive(throughput),
            None if target is None else _whole(target, 1, 2**32),
        )
        for worker, incarnation, machine, throughput, target in _listed(state["shares"])
    )
    _require_once(each.process for each in paces)
    _require_once(each.process for each in shares)
    anchor = state["anchor_process"]
    return SavedPacing(
        schedule=None if state["schedule"] is None else Schedule(state["schedule"]),
        note=_text(state["note"], _LONGEST_NOTE),
        anchor=1 if older else _whole(state["anchor"], 1, 2**16),
        anchor_process=(None if anchor is None else paces[_whole(anchor, 0, len(paces))].process),
        reports=_whole(state["reports"], 0, 2**53),
        paces=paces,
        paced_roster=_whole(state["roster"], 0, len(paces) + 1),
        shares=shares,
        noise=SavedNoise() if older else _noise_of(*state["noise"]),
    )


def _noise_of(steps: Any, *values: Any) -> SavedNoise:
    noise, signal, *spreads = (_number(value) for value in values)
    if len(spreads) != 2 or min(spreads) < 0:
        raise ValueError("not a noise scale")
    return SavedNoise(
        steps=_whole(steps, 0, 2**53),
        noise=noise,
        signal=signal,
        noise_spread=spreads[0],
        signal_spread=spreads[1],
    )


def _process_of(worker: Any, incarnation: Any, machine: Any) -> PacedProcess:
    return PacedProcess(
        _whole(worker, 0, MAX_WORKERS),
        _whole(incarnation, 0, 2**64),
        _text(machine, _LONGEST_MACHINE),
    )


def _listed(value: Any) -> list[Any]:
    # Two processes a slot: the present one, and the one before it.
    if not isinstance(value, list) or len(value) > 2 * MAX_WORKERS:
        raise ValueError("not a list of processes")
    return value


def _require_once(processes: Iterable[PacedProcess]) -> None:
    listed = list(processes)
    if len(set(listed)) != len(listed):
        raise ValueError("a process is listed twice")


def _whole(value: Any, least: int, below: int) -> int:
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"not a whole number from {least} below {below}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number")
    return float(value)


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and 1e-12 < value < 1e12):
        raise ValueError("not a number that was measured")
    return float(value)


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError("not a short text")
    return value
