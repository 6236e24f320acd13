"""Syncing: reports about state that moves, and numbers to average: what runs beside the rounds."""

from __future__ import annotations

from andon_coordinator.core import departures
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import SendTallyResult
from andon_coordinator.core.events import StateReported, TallyArrived
from andon_coordinator.core.roster import Member

__all__ = ["state_reported", "tally_arrived"]


def state_reported(board: Board, member: Member, event: StateReported) -> None:
    """One end of a transfer is done; the joiner counts once it reports the head (rule 10).

    A report about a transfer that is no more is ignored, and so is a donor's success: what
    counts is what the joiner holds.
    """
    transfer = board.transfers.get(event.transfer_id)
    if transfer is None or member.worker not in (transfer.donor, transfer.joiner):
        return
    joiner = board.roster.get(transfer.joiner)
    assert joiner is not None, "a lost worker's transfers are cancelled"
    if not event.failure and member is not joiner:
        return
    board.transfers.end(transfer)
    if not event.failure and event.head == transfer.head:
        joiner.head = transfer.head
        joiner.step = board.chain.step
        joiner.held = None
        joiner.transfer_failures = 0
        return
    settings = board.settings
    if event.failure:
        departures.release(board, transfer.donor if member is joiner else transfer.joiner)
    joiner.transfer_failures += 1
    joiner.transfer_not_before = board.now + board.back_off(joiner.transfer_failures)
    if joiner.transfer_failures >= settings.max_attempts:
        why = event.failure or "it reported another head"
        message = f"its state did not arrive: {why}"
        departures.cut_off(board, joiner, message, why, grace_s=settings.rejoin_grace_s)


def tally_arrived(board: Board, member: Member, event: TallyArrived) -> None:
    """A worker has a number to average; one from another head is ignored."""
    if event.head != board.chain.head or event.head is None:
        return
    try:
        mean = board.tallies.give(member.worker, event.sequence, event.value, event.weight)
    except ValueError as error:
        grace_s = board.settings.rejoin_grace_s
        departures.cut_off(board, member, str(error), str(error), grace_s=grace_s)
        return
    if mean is not None:
        board.emit(
            SendTallyResult(
                event.stream,
                event.head,
                mean.sequence,
                mean.value,
                mean.weight,
                mean.contributors,
            )
        )
