"""Giving: this worker's state goes to one that learns, while this worker trains on.

Theory of operation. The training thread cuts the state, since only it knows when no step moves the
weights. Everything after that (the copies, digests, and all bytes to the reducer) is done by a
thread of low priority, so that training has the processors first; only the next step of an
optimizer waits for the copies. Nothing else that happens there disturbs training: it ends with one
report to the coordinator.

The worker that would be asked first gets memory for the copies ahead, since that takes many times
as long as to copy into it.

A script that writes weights itself tears the copies. Then that state is not given; the next one is
packed at once.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import grpc

from andon.host.priority import give_way
from andon.host.tls import TlsError
from andon_trainer.core.effects import ReportState
from andon_trainer.core.events import TransferAsked
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import (
    PackedCut,
    State,
    StateCut,
    Ticket,
    packed,
    persistently,
    say_why,
    send_state,
    ticket_of,
)

__all__ = ["StateGiver"]

_NICENESS = 10
_READY_AFTER_STEPS = 16
"""In a worker's first steps it gets much other memory, and so do newcomers beside it."""
_MOST_AT_ONCE = 2
"""Each holds a copy of the state in memory."""


class StateGiver:
    """Gives this worker's state to others. Used by the training thread."""

    def __init__(self, link: Connection, state: State, shared_dir: Path | None = None) -> None:
        """Gives `state` over the connection `link`, or through files in the folder."""
        self._link = link
        self._shared_dir = shared_dir
        self._state = state
        self._under_way: list[tuple[threading.Thread, StateCut]] = []
        self._at_once = False
        """Whether a copy was torn."""
        self._first_in = 0
        """In how many steps it would have been asked first."""

    def get_ready(self) -> None:
        """This worker is asked first, if anybody needs a state now. It is called at each step.

        Memory for that is got once.
        """
        self._first_in += 1
        if self._first_in != _READY_AFTER_STEPS:
            return
        try:
            get = self._state.room_ahead()
        except (TypeError, ValueError, RuntimeError):
            return  # It can't be packed. Whoever needs it, if anybody ever does, hears why.
        if get is not None:
            threading.Thread(target=get, name="andon-giving", daemon=True).start()

    def give(self, asked: TransferAsked) -> None:
        """Cuts the state now, and sends it on a thread of its own, which reports how that went."""
        self.tidy()
        control = self._link.control
        try:
            if len(self._under_way) >= _MOST_AT_ONCE:
                raise StateCorrupt(f"this worker gives its state to {_MOST_AT_ONCE} others already")
            cut = self._cut()
        except StateCorrupt as error:
            control.send(ReportState(asked.transfer_id, asked.head, say_why(error, sends=True)))
            return
        send = partial(self._send, control, ticket_of(self._link, asked, self._shared_dir), cut)
        thread = threading.Thread(target=send, name="andon-giving", daemon=True)
        self._under_way.append((thread, cut))
        thread.start()

    def tidy(self) -> None:
        """Lets go of the copies of what is given; the training thread calls it now and then."""
        if not self._under_way:
            return
        for thread, cut in self._under_way:
            if not thread.is_alive():
                cut.close()
        self._under_way = [each for each in self._under_way if each[0].is_alive()]

    def close(self, patience_s: float) -> None:
        """Waits a moment for the threads; the end of the control stream has ended their calls."""
        deadline = time.monotonic() + patience_s
        for thread, _ in self._under_way:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.tidy()

    def _cut(self) -> StateCut:
        if self._at_once:
            now = packed(self._state)
            # A copy: training goes on.
            return PackedCut(PackedState((bytes(now),), now.base_bytes))
        try:
            return self._state.cut_state()
        except (TypeError, ValueError) as error:
            raise StateCorrupt(f"this worker's state can't be given: {error}") from error

    def _send(self, control: ControlStream, ticket: Ticket, cut: StateCut) -> None:
        """Runs on the thread of one transfer."""
        failure, watch = "", partial(control.at_end, ticket.transfer_id)
        try:
            # Before the priority is low: the next step waits for the copies.
            if not cut.complete():
                self._at_once = True
                raise StateCorrupt("the script wrote weights while they were copied")
            give_way(_NICENESS)
            state, sent = cut.packed(), [0]

            # Not shown in the heartbeats: what this worker does is train.
            def note(so_far: int, _whole: int) -> None:
                sent[0] = so_far

            send = partial(send_state, ticket, state, note, watch)
            persistently(send, lambda: sent[0])
        except (grpc.RpcError, StateCorrupt, TlsError, TypeError, ValueError) as error:
            failure = say_why(error, sends=True)
        # If the stream has ended it is lost: then the coordinator has given the transfer up.
        control.send(ReportState(ticket.transfer_id, ticket.head, failure))
