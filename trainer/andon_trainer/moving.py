"""Moving: a worker's end of a state transfer."""

from __future__ import annotations

import logging
from typing import Protocol

import grpc

from andon.host.tls import TlsError
from andon_trainer.connection import Connection
from andon_trainer.core.events import TransferAsked
from andon_trainer.exchange.transfer import (
    Arrived,
    StateCorrupt,
    SyncProgress,
    Ticket,
    receive_state,
    send_state,
)

__all__ = ["State", "StateMover"]

log = logging.getLogger(__name__)


class State(Protocol):
    """What is the same on all workers, as bytes; a `Replica` is PyTorch's."""

    def pack(self) -> bytes:
        """All of it, for a newcomer."""

    def install(self, data: bytes) -> None:
        """Takes over what `pack` packed, or raises and changes nothing."""


class StateMover:
    """Sends a worker's state, or installs another's. What came before a cut is kept."""

    def __init__(self, link: Connection, state: State) -> None:
        """Moves `state` over what `link` says."""
        self._link = link
        self._state = state
        self._arrived = Arrived()

    def move(self, asked: TransferAsked) -> str:
        """Sends or receives the state; returns why that failed, or "" if it did not."""
        joined, control = self._link.joined, self._link.control
        ticket = Ticket(
            address=asked.address or self._link.address,
            run_id=joined.run_id,
            worker=joined.worker,
            session_token=joined.session_token,
            transfer_id=asked.transfer_id,
            head=asked.head,
            tls=self._link.tls,
        )
        progress = SyncProgress(control.show, sends=asked.sends)
        try:
            if asked.sends:
                send_state(ticket, self._packed(), progress, control.at_end)
            else:
                data = receive_state(ticket, self._arrived, progress, control.at_end)
                self._state.install(data)
        except (grpc.RpcError, StateCorrupt, TlsError) as error:
            why = _in_a_line(error)
            log.warning("a state transfer failed: %s", why)
            return why
        return ""

    def _packed(self) -> bytes:
        """This worker's state. What can't be packed fails the transfer, and not this worker.

        Raises:
            StateCorrupt: something in it can't be kept.
        """
        try:
            return self._state.pack()
        except (TypeError, ValueError) as error:
            raise StateCorrupt(f"this worker's state can't be given: {error}") from error


def _in_a_line(error: Exception) -> str:
    """Why a transfer failed, as `andon status` shows it: gRPC's own text has several lines."""
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
