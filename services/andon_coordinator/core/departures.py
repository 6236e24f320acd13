"""Departures: a worker is lost, or leaves on purpose (rule 5: a loss voids)."""

from __future__ import annotations

from andon.protocol.halts import HaltReason
from andon_coordinator.core import checkpoints
from andon_coordinator.core.board import Board
from andon_coordinator.core.defects import Defect
from andon_coordinator.core.effects import CloseStream, SaveDeparture
from andon_coordinator.core.ending import WELL
from andon_coordinator.core.events import LeaveReason, StreamEnded, WorkerLeft
from andon_coordinator.core.roster import Member

__all__ = ["cancel_transfer", "cut_off", "detach", "ended", "left", "lose", "release", "watch"]


def ended(board: Board, member: Member, event: StreamEnded) -> None:
    """A stream broke: its round is void at once, its worker lost after the grace."""
    why = "its process is gone" if event.gone else "its stream ended"
    # Once the run is over nobody waits for a decision, and to refuse a worker that comes back would
    # spoil its end: a blip may last as long as a lease.
    over = bool(board.stop) or any(board.ended.values())
    if over:
        grace_s = board.settings.liveness.lease_s
    else:
        grace_s = 0.0 if event.gone else board.settings.rejoin_grace_s
    detach(board, member, why, grace_s=grace_s)


def left(board: Board, member: Member, event: WorkerLeft) -> None:
    """A worker goes away on purpose."""
    checkpoints.written(board, member, event.checkpoint)
    _break_away(board, member, f"worker {member.worker} left: {event.reason.name.lower()}")
    member.left = event.reason
    member.final_digest = event.digest
    member.final_head = event.digest_head
    board.emit(
        SaveDeparture(member.worker, event.reason, event.message, event.final_step, event.digest)
    )
    board.note_end(member.worker, well=event.reason in WELL)
    if event.reason is LeaveReason.FAILED:
        _count(board, member)


def watch(board: Board) -> None:
    """Looks for silence and graces that are over."""
    silence_s = board.settings.liveness.silence_s
    for member in board.roster.live():
        if board.now - member.heard_at >= silence_s:
            message = f"nothing was heard for {silence_s:g} s"
            cut_off(board, member, message, f"silent for {silence_s:g} s", grace_s=0.0)
    for member in board.roster.in_grace():
        if member.grace_until is not None and member.grace_until <= board.now:
            lose(board, member, "it did not come back")


def detach(board: Board, member: Member, why: str, *, grace_s: float, crash: bool = True) -> None:
    """A member's stream is over; it may come back within the grace.

    `crash` says whether its samples may have done that to it.
    """
    _break_away(board, member, f"worker {member.worker}: {why}", crash=crash)
    member.grace_until = board.now + grace_s
    if grace_s == 0.0:
        lose(board, member, why)


def cut_off(
    board: Board, member: Member, message: str, why: str, *, grace_s: float, crash: bool = True
) -> None:
    """Ends a member's stream with a message, unless it has none any more, and detaches it.

    Who is cut off together with others may have lost its stream by the loss of one of them.
    """
    if member.stream is not None:
        board.emit(CloseStream(member.stream, message))
        detach(board, member, why, grace_s=grace_s, crash=crash)


def lose(board: Board, member: Member, why: str) -> None:
    """Decides that a detached member is lost."""
    assert member.stream is None
    member.grace_until = None
    board.emit(SaveDeparture(member.worker, None, why, member.step, b""))
    board.note_end(member.worker, well=False)
    _count(board, member)


def _break_away(board: Board, member: Member, message: str, *, crash: bool = True) -> None:
    """Takes a member off its stream, and what runs with it."""
    member.stream = None
    member.asked = False
    member.held = None
    if board.round is not None and member.worker in board.round.roster:
        # A worker that dies in a sample was heard up to its death. One that was silent before its
        # stream broke sat behind a dead link, or its host did not run: no sample did that.
        silent = board.now - member.heard_at >= 2 * board.settings.liveness.heartbeat_s
        member.broke_attempt = board.tries.attempt if crash and not silent else None
        board.void(message, pause=False)
    cancel_transfer(board, member, message)


def cancel_transfer(board: Board, member: Member, why: str) -> None:
    """Ends the transfer that a worker who goes is at an end of; the other end joins again."""
    transfer = board.transfers.cancel(member.worker)
    if transfer is None:
        return
    if member.worker == transfer.joiner:
        board.note_setback(transfer, member, why)
    release(board, transfer.donor if member.worker == transfer.joiner else transfer.joiner)


def release(board: Board, worker: int) -> None:
    """Frees the other end of a transfer that failed: it may wait for what never comes (rule 10).

    What was sent to it of the transfer is lost with its stream, and it joins again.
    """
    member = board.roster.get(worker)
    if member is not None:
        why = "the other end of its state transfer is gone"
        cut_off(board, member, why, why, grace_s=board.settings.rejoin_grace_s)


def _count(board: Board, member: Member) -> None:
    """Counts attempts that lost a worker: a poison sample must not eat the line.

    Streams that are lost within one lease of each other are one loss, since one outage takes them
    one after the other. A script that raised said so: each of those counts.
    """
    tries, settings = board.tries, board.settings
    lease_s = settings.liveness.lease_s
    if tries.voids <= 1:
        tries.not_before = board.now  # The loss explains the void: no need to wait longer.
    attempt, member.broke_attempt = member.broke_attempt, None
    if attempt is None:
        return
    if not member.raised:
        another = board.now - tries.lost_at >= lease_s
        if another:
            tries.lost_at = board.now
        if tries.lost:
            # The first loss is made up for at once. After the next one the outage, if it is one,
            # gets its lease to end: else the samples, if it was them, would kill the survivors
            # one by one within that lease, as one loss.
            tries.not_before = max(tries.not_before, tries.lost_at + lease_s)
        if not another:
            return
    tries.lost.add(attempt)
    if len(tries.lost) < settings.max_attempts:
        return
    raised = f"; worker {member.worker} raised {member.raised}" if member.raised else ""
    step, cursor = board.chain.step + 1, board.chain.cursor
    board.stop_line(
        Defect(
            reason=HaltReason.REPEATED_FAILURE,
            message=f"step {step}, from position {cursor.position} of epoch {cursor.epoch}, "
            f"lost a worker in {len(tries.lost)} attempts{raised}",
            worker=member.worker,
        )
    )
