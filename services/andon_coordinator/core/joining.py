"""Joining: whether a worker may be on the line, and in which slot; a refusal names what differs."""

from __future__ import annotations

import dataclasses
import hmac

from andon.protocol.layout import first_difference
from andon.protocol.limits import COUNT_LIMIT, PROTOCOL_VERSION
from andon.protocol.reasons import Reason
from andon.protocol.records import TERM_AHEAD_S, Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import LineState, Refusal
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.core.roster import Member

__all__ = ["adopts", "greatest_term", "judge"]

_TOTALS = ("total_steps", "total_epochs")

_ADOPTED_LIMIT = COUNT_LIMIT // 2
"""What is taken over from a worker is below it: the line counts on from there, and what it then
says of itself comes back in later Joins, where COUNT_LIMIT is the limit."""


def judge(board: Board, request: JoinRequest) -> int | Refusal:
    """The slot that a worker gets, or why it gets none."""
    return (
        _no_token(board, request)
        or _other_run(board, request)
        or _other_protocol(board, request)
        or _run_over(board, request)
        or _other_layout(board, request)
        or _other_plan(board, request)
        or _made_up(board, request)
        or _slot(board, request)
    )[0]


def greatest_term(request: JoinRequest) -> int:
    """The greatest term that a worker shows anywhere in its Join."""
    keys: list[Key | None] = [request.head, request.held_key]
    if request.halt is not None:
        keys.append(request.halt.key)
    return max([request.greatest_term, *(key.term for key in keys if key is not None)])


def adopts(board: Board, request: JoinRequest) -> bool:
    """Whether the worker's head is to be the line's: it is newer, and nothing was built yet."""
    head, ours = request.head, board.chain.head
    return not board.settled and head is not None and (ours is None or head > ours)


def _no_token(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    wanted = board.settings.token
    if not wanted or hmac.compare_digest(request.token, wanted):
        return None
    shown = "another" if request.token else "none"
    message = (
        f"the line asks for the run's token, and the worker shows {shown}: give it "
        "the line's file by ANDON_TOKEN_FILE (or --token-file of `andon run`)"
    )
    return (Refusal(reason=Reason.TOKEN, message=message, component="token"),)


def _other_run(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    settings = board.settings
    if request.run_id not in ("", settings.run_id):
        return _differs(
            Reason.WRONG_RUN,
            f"run {settings.run_id} is served here, not {request.run_id}",
            ("run_id", request.run_id, settings.run_id),
        )
    return None


def _other_protocol(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    if request.protocol_version != PROTOCOL_VERSION:
        mine, theirs = str(request.protocol_version), str(PROTOCOL_VERSION)
        return _differs(
            Reason.VERSION,
            f"the worker speaks protocol version {mine}, the line {theirs}",
            ("protocol_version", mine, theirs),
        )
    missing = sorted(board.settings.capabilities - request.capabilities)
    if missing:
        return _differs(
            Reason.CAPABILITY,
            f"the line needs {missing[0]}, which the worker lacks",
            (missing[0], "missing", "required"),
        )
    return None


def _run_over(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    over = board.state is LineState.COMPLETE or board.shut_down
    if board.stop and not over:
        record = board.chain.record
        missed = (
            record is not None
            and request.head == record.parent
            and (record.kind is RecordKind.MARK or request.held_key == record.key)
        )
        over = request.head != board.chain.head and not missed
    if not over:
        return None
    message = f"run {board.settings.run_id} is over after step {board.chain.step}"
    return (Refusal(reason=Reason.COMPLETE, message=message),)


def _other_layout(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    if board.layout is None or request.layout.digest == board.layout.digest:
        return None
    found = first_difference(request.layout, board.layout)
    assert found is not None, "layouts of different digests differ"
    return _differs(
        Reason.LAYOUT_DIFFERS,
        f"{found.component} is {found.mine} at the worker and {found.theirs} on the line",
        (found.component, found.mine, found.theirs),
    )


def _other_plan(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    if board.plan is not None:
        for name in (field.name for field in dataclasses.fields(RunPlan)):
            if board.totals_open and name in _TOTALS:
                continue
            mine, theirs = getattr(request.plan, name), getattr(board.plan, name)
            if name == "data_digest":
                if mine and theirs and mine != theirs:
                    return _other_data(mine, theirs)
            elif mine != theirs:
                here, there = _shown(mine), _shown(theirs)
                return _differs(
                    Reason.PLAN_DIFFERS,
                    f"{name} is {here} at the worker and {there} on the line",
                    (name, here, there),
                )
    size, workers = request.plan.dataset_size, board.settings.expect_workers
    if size is not None and size < workers:
        return _differs(
            Reason.DATASET_TOO_SMALL,
            f"a dataset of {size} samples is smaller than the {workers} workers of the line",
            ("dataset_size", str(size), str(workers)),
        )
    return None


def _other_data(mine: str, theirs: str) -> tuple[Refusal]:
    return _differs(
        Reason.PLAN_DIFFERS,
        "the training set has other samples at the worker than on the line, in as many positions: "
        "seed what splits, shuffles or makes it, as in random_split(data, lengths, "
        "torch.Generator().manual_seed(0)); ANDON_CHECK_DATA=0 if samples may differ",
        ("data_digest", mine, theirs),
    )


def _made_up(board: Board, request: JoinRequest) -> tuple[Refusal] | None:
    """Numbers that no worker of this run could have: what would be believed of it is looked at
    before any of it is (rules 1, 8 and 9)."""
    term, wall = greatest_term(request), board.wall
    if not board.keys.may_be(term, wall):
        text = (
            f"the worker shows the term {term}, whose counter {term >> 32} is more than "
            f"{TERM_AHEAD_S} s ahead of the coordinator's clock, {int(wall)}: set the clock that "
            "is wrong"
        )
        return _invalid(text, ("greatest_term", str(term), str(board.keys.term)))
    size, cursor = request.plan.epoch_size, request.cursor
    if size is not None and cursor.position >= size:
        text = (
            f"the worker's cursor is at position {cursor.position} of epoch {cursor.epoch}, and "
            f"an epoch of this data set has {size} positions"
        )
        return _invalid(text, ("cursor", str(cursor.position), str(size)))
    counts = {"step": request.step, "cursor.epoch": cursor.epoch} if adopts(board, request) else {}
    if request.halt is not None and request.halt.id >= board.next_halt_id:
        counts["halt.id"] = request.halt.id
    for name, count in counts.items():
        if count >= _ADOPTED_LIMIT:
            text = f"{name} is {count}, and what a line goes on from is below {_ADOPTED_LIMIT}"
            return _invalid(text, (name, str(count), str(_ADOPTED_LIMIT)))
    return None


def _slot(board: Board, request: JoinRequest) -> tuple[int | Refusal]:
    same = board.roster.of_incarnation(request.incarnation)
    if request.launch_slot is None:
        if same is not None:
            return (same.worker,)
        for slot in range(board.settings.max_workers):
            holder = board.roster.get(slot)
            if holder is None or not _holds(holder):
                return (slot,)
        most = str(board.settings.max_workers)
        message = f"all {most} slots are taken"
        return (Refusal(reason=Reason.FULL, message=message, theirs=most),)
    slot = request.launch_slot
    if slot >= board.settings.max_workers:
        most = str(board.settings.max_workers)
        return _differs(
            Reason.SLOT,
            f"slot {slot} is beyond the {most} workers that the line may have",
            ("launch_slot", str(slot), most),
        )
    holder = board.roster.get(slot)
    if holder is not None and holder is not same and holder.stream is not None:
        return _differs(
            Reason.SLOT,
            f"another process on {holder.request.node_id or 'some host'} holds slot {slot}",
            ("launch_slot", str(slot), "taken"),
        )
    return (slot,)


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def _holds(member: Member) -> bool:
    return member.stream is not None or member.grace_until is not None


def _invalid(message: str, what: tuple[str, str, str]) -> tuple[Refusal]:
    return _differs(Reason.INVALID_MESSAGE, message, what)


def _differs(reason: Reason, message: str, what: tuple[str, str, str]) -> tuple[Refusal]:
    component, mine, theirs = what
    return (Refusal(reason=reason, message=message, component=component, mine=mine, theirs=theirs),)
