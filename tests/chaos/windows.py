"""What workers were told about each window: the same to all, as the schedule says, never less.

Workers log every assignment. The judge compares those of a committed round with each other, with
the record, and with an independent implementation of the rule by which positions are dealt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from andon.protocol.records import Key
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport.reader import JournalEntry
from chaos.model import Task
from chaos.schedules import LONGEST_CADENCE, LineSchedule, dealt

__all__ = ["Logs", "judge_windows"]

Logs = Mapping[int, Sequence[dict[str, Any]]]
"""Each worker's events, by slot."""

_SAME = (
    *("step", "attempt", "epoch", "roster", "batch", "window", "targets", "interleaved"),
    *("rate_scale", "change_scale", "ahead_batch", "fragment"),
)
"""What must be equal in all assignments of a round."""


def judge_windows(
    chain: Iterable[JournalEntry], task: Task, schedule: LineSchedule, logs: Logs
) -> None:
    """Judges the assignments of all committed rounds, and what workers kept between attempts."""
    for entry in chain:
        if entry.result is not None:
            told = [_told(slot, entry, logs[slot]) for slot in entry.record.roster]
            where = f"the window of step {entry.record.step}"
            _judge_equal(told, where)
            _judge_shares(told, entry.result, where)
            _judge_size(told[0], task, schedule, where)
            _judge_fragment(told[0], task, schedule, entry.result.stop_reason, where)
            if _is_first(entry) and not (schedule.overlap or schedule.quorum):
                _judge_division(told, task, schedule, where)
            attending = _attending(entry, logs)
            _judge_attended(told[0], attending, where)
            owes = any(event["positions"] for event in attending.values())
            assert schedule.quorum or not owes, f"{where}: who attends it has a share"
    for slot, log in logs.items():
        assigned = [event for event in log if event["event"] == "assigned"]
        _judge_kept(slot, assigned)
        _judge_ahead(slot, assigned, schedule)
    _judge_attempts(logs)


def _told(slot: int, entry: JournalEntry, log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    key = entry.record.key
    found = [each for each in log if each["event"] == "assigned" and Key(*each["key"]) == key]
    assert len(found) == 1, f"C-COMMIT-001: worker {slot} was assigned {key} {len(found)} times"
    return found[0]


def _is_first(entry: JournalEntry) -> bool:
    """Whether a round is the first of its step, so that nobody keeps what it has computed.

    A round that was withdrawn before anybody began it, or that a halt ended, is no attempt.
    """
    key, parent = entry.record.key, entry.record.parent
    assert parent is not None
    return key.round == 1 + (parent.round if parent.term == key.term else 0)


def _attending(entry: JournalEntry, logs: Logs) -> dict[int, dict[str, Any]]:
    """What workers were told that were not on the roster, by slot."""
    return {
        slot: event
        for slot, log in logs.items()
        for event in log
        if event["event"] == "attending" and Key(*event["key"]) == entry.record.key
    }


def _judge_attended(
    told: dict[str, Any], attending: Mapping[int, dict[str, Any]], where: str
) -> None:
    """Whoever makes a round up was told what its members were."""
    for slot, event in attending.items():
        _judge_equal([told, event], f"{where}, that worker {slot} attends")
        mine = (event["rank"], slot in told["roster"])
        wanted = (len(told["roster"]), False)
        assert mine == wanted, f"{where}: worker {slot} attends it with {mine}"


def _judge_equal(told: Sequence[dict[str, Any]], where: str) -> None:
    for name in _SAME:
        values = [each[name] for each in told]
        assert all(value == values[0] for value in values), f"{where}: {name} differs: {values}"


def _judge_shares(told: Sequence[dict[str, Any]], result: StepResult, where: str) -> None:
    """What each worker was told is what the record says of it."""
    first = told[0]
    assert first["batch"] == [result.batch.start, result.batch.stop], f"{where}: another batch"
    assert first["epoch"] == result.epoch, f"{where}: another epoch"
    assert first["attempt"] == result.attempt, f"{where}: another attempt"
    for rank, (event, part) in enumerate(zip(told, result.contributions, strict=True)):
        positions = [[each.start, each.stop] for each in part.positions]
        assert event["rank"] == rank, f"{where}: worker {part.worker} has rank {event['rank']}"
        assert event["positions"] == positions, f"{where}: worker {part.worker} had other positions"


def _judge_size(event: dict[str, Any], task: Task, schedule: LineSchedule, where: str) -> None:
    """How many positions the window takes, and what that does to the learning rate."""
    start, stop = event["batch"]
    window = event["window"] or task.batch
    if schedule.quorum:
        # Who holds a share that it owes takes nothing in addition.
        assert stop - start <= window, f"{where}: {stop - start} positions"
        return
    assert stop - start == min(window, task.dataset - start), f"{where}: {stop - start} positions"
    if not schedule.cadence:
        wanted = task.batch * max(1, schedule.local_steps // schedule.fragments)
        assert window == wanted, f"{where}: it takes {window} positions, not {wanted}"
    scale = schedule.rate_scale(stop - start, task.batch)
    assert event["rate_scale"] == scale, f"{where}: the learning rate is scaled by {scale}"


def _judge_fragment(
    event: dict[str, Any], task: Task, schedule: LineSchedule, stop_reason: str, where: str
) -> None:
    """Which part of the model is exchanged: by the step's number, or all where all is needed."""
    fragment = event["fragment"]
    if fragment is None:
        return
    assert schedule.fragments > 1, f"{where}: it exchanges fragment {fragment}"
    assert fragment == event["step"] % schedule.fragments, f"{where}: fragment {fragment}"
    ends = event["batch"][1] == task.dataset or bool(stop_reason)
    assert not ends, f"{where}: something is left over at the epoch's or the run's end"
    assert bool(event["ahead_batch"]) is schedule.overlap, f"{where}: nothing is computed ahead"


def _judge_division(
    told: Sequence[dict[str, Any]], task: Task, schedule: LineSchedule, where: str
) -> None:
    """Shares and micro-batches of a first attempt."""
    event, world = told[0], len(told)
    targets, unit = event["targets"], math.ceil(task.batch / world)
    if schedule.cadence:
        size = event["window"] or task.batch
        longest = task.batch * LONGEST_CADENCE
        assert targets, f"{where}: a cadence divides by counts"
        assert task.batch <= size <= longest, f"{where}: {size} is not from a batch to {longest}"
    else:
        assert schedule.balanced or not targets, f"{where}: shares are uneven"
    assert event["interleaved"] == schedule.interleaved, where
    shares = dealt(range(*event["batch"]), targets or [1] * world, interleaved=schedule.interleaved)
    in_parts = schedule.cadence or schedule.local_steps
    for rank, (each, share) in enumerate(zip(told, shares, strict=True)):
        given = _positions(each)
        assert given == share, f"{where}: rank {rank} was given {given}, not {share}"
        parts = math.ceil(len(share) / unit) if in_parts else 0
        assert each["micro_batches"] == parts, f"{where}: rank {rank} makes {each['micro_batches']}"


def _judge_kept(slot: int, assigned: Sequence[dict[str, Any]]) -> None:
    """A worker that goes on from one attempt to the next keeps what it has computed."""
    for before, after in pairwise(assigned):
        same = (before["key"][0], before["parent"]) == (after["key"][0], after["parent"])
        if same and after["attempt"] == before["attempt"] + 1:
            piles = ("positions", "ahead")
            lost = [at for pile in piles for at in _lost(before[pile], after[pile])]
            where = f"step {after['step']}, attempt {after['attempt']}"
            assert not lost, f"{where}: worker {slot} computed {lost} for nothing"


def _judge_ahead(slot: int, assigned: Sequence[dict[str, Any]], schedule: LineSchedule) -> None:
    """What is computed ahead is the next window, and whoever computed it sends it."""
    for event in assigned:
        assert schedule.overlap or not event["ahead_batch"], f"step {event['step']}: too early"
        for start, _stop in event["ahead_batch"]:
            assert start == event["batch"][1], f"step {event['step']}: {event['ahead_batch']}"
    for before, after in pairwise(assigned):
        # A coordinator that starts again may deal other shares.
        if before["key"] == after["parent"] and before["key"][0] == after["key"][0]:
            batch = before["ahead_batch"] or [after["batch"]]
            assert batch == [after["batch"]], f"step {after['step']} took {after['batch']}"
            lost = _lost(before["ahead"], after["positions"])
            assert not lost, f"step {after['step']}: worker {slot} computed {lost} for nothing"


def _lost(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int]:
    return sorted(set(_all(before)) - set(_all(after)))


def _judge_attempts(logs: Logs) -> None:
    """All attempts that a coordinator makes at a step take the same positions."""
    batches: dict[tuple[int, ...], list[int]] = {}
    for log in logs.values():
        for event in log:
            if event["event"] == "assigned":
                step = (event["key"][0], *event["parent"])
                batch = batches.setdefault(step, event["batch"])
                where = f"step {event['step']}, attempt {event['attempt']}"
                assert event["batch"] == batch, f"{where}: the batch changed: {batch}"


def _positions(event: dict[str, Any]) -> list[int]:
    return _all(event["positions"])


def _all(ranges: Sequence[Sequence[int]]) -> list[int]:
    return [at for start, stop in ranges for at in range(start, stop)]
