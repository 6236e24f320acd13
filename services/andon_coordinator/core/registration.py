"""Registration: reducers come and go (rule 5: what one of them averages for is void without it)."""

from __future__ import annotations

from andon_coordinator.core import departures
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import CloseReducer
from andon_coordinator.core.events import ReducerLost, ReducerRegistered

__all__ = ["equipped", "lost", "registered"]


def registered(board: Board, event: ReducerRegistered) -> None:
    """A reducer offers itself: it is in the map from the next round on.

    One that comes back before it was missed takes its own place; what it held is gone.
    """
    older = board.reducers.stream_of(event.address)
    if older is not None:
        board.emit(CloseReducer(older, "a newer stream offers the same address"))
        _forget(board, older, "came back without what it held")
    board.reducers.add(event.stream, event.address)


def lost(board: Board, event: ReducerLost) -> None:
    """A reducer's stream is over: it is off the map, and its round is void."""
    _forget(board, event.stream, "is gone")


def equipped(board: Board) -> bool:
    """Whether there are reducers to go on with; all that are expected, at first."""
    there = len(board.reducers)
    if there and not board.equipped:
        window = board.settings.recovery_window_s
        waited = board.first_join_at is not None and board.now - board.first_join_at >= window
        recovered = board.chain.head is not None and waited
        board.equipped = recovered or there >= board.settings.expect_reducers
    return there > 0 and board.equipped


def _forget(board: Board, stream: int, why: str) -> None:
    address = board.reducers.remove(stream)
    if address is None:
        return
    round_ = board.round
    if round_ is not None and any(share.address == address for share in round_.reducers):
        board.void(f"the reducer at {address} {why}", pause=False)
    for transfer in board.transfers.through(address):
        # Either end may wait for what never comes, so both join again.
        board.transfers.end(transfer)
        for worker in (transfer.donor, transfer.joiner):
            departures.release(board, worker)
