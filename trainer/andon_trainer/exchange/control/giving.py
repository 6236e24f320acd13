"""Giving: this worker's state goes to one that learns, while this worker trains on.

Theory of operation. The training thread cuts the state, since only it knows when no step moves the
weights. Everything after that (digests, and all bytes to the reducer) is done by a thread of low
priority, so that training has the processors first. Nothing that happens there disturbs training:
it ends with one report to the coordinator.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import grpc

from andon.host.tls import TlsError
from andon_trainer.core.effects import ReportState
from andon_trainer.core.events import TransferAsked
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.transfer import (
    State,
    Ticket,
    packed,
    say_why,
    send_state,
    ticket_of,
)

__all__ = ["StateGiver"]

_NICENESS = 10
_MOST_AT_ONCE = 2
"""Each holds a copy of the state in memory."""


class StateGiver:
    """Gives this worker's state to others. Used by the training thread."""

    def __init__(self, link: Connection, state: State) -> None:
        """Gives `state` over the connection `link`."""
        self._link = link
        self._state = state
        self._threads: list[threading.Thread] = []

    def give(self, asked: TransferAsked) -> None:
        """Cuts the state now, and sends it on a thread of its own, which reports how that went."""
        self._threads = [each for each in self._threads if each.is_alive()]
        control = self._link.control
        try:
            if len(self._threads) >= _MOST_AT_ONCE:
                raise StateCorrupt(f"this worker gives its state to {_MOST_AT_ONCE} others already")
            state, base = packed(self._state)
        except StateCorrupt as error:
            control.send(ReportState(asked.transfer_id, asked.head, say_why(error)))
            return
        send = partial(_send, control, ticket_of(self._link, asked), state, base)
        thread = threading.Thread(target=send, name="andon-giving", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, patience_s: float) -> None:
        """Waits a moment for the threads; the end of the control stream has ended their calls."""
        deadline = time.monotonic() + patience_s
        for each in self._threads:
            each.join(max(0.0, deadline - time.monotonic()))
        self._threads = []


def _send(control: ControlStream, ticket: Ticket, state: bytes, base: bytes) -> None:
    """Runs on the thread of one transfer."""
    if sys.platform == "linux":  # Elsewhere it would be the whole process's.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    failure, watch = "", partial(control.at_end, ticket.transfer_id)
    try:
        # Not shown in the heartbeats: what this worker does is train.
        send_state(ticket, state, lambda _so_far, _whole: None, watch, base)
    except (grpc.RpcError, StateCorrupt, TlsError) as error:
        failure = say_why(error)
    # If the stream has ended it is lost: then the coordinator has given the transfer up.
    control.send(ReportState(ticket.transfer_id, ticket.head, failure))
