"""What both ends of a state's way have in common, for tests, and a worker that has no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from andon.protocol import tokens
from andon.protocol.records import Key
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import PackedCut, Ticket
from integration.reducer_bench import RUN, SECRET

__all__ = ["GIVEN", "MIB", "PATIENCE_S", "STATE", "NoState", "nobody", "nothing", "ticket"]

MIB = 2**20
STATE = random.Random(5).randbytes(24 * MIB)
GIVEN = PackedState([STATE])
PATIENCE_S = 60


def ticket(address: str, worker: int, number: int = 1, *, folder: Path | None = None) -> Ticket:
    """What lets a worker send or receive; `folder`: its host's shared memory."""
    return Ticket(
        address=address,
        run_id=RUN,
        worker=worker,
        session_token=tokens.session_token(SECRET, RUN, worker),
        transfer_id=number,
        head=Key(7, 3),
        shared_dir=folder,
    )


def nothing(_so_far: int, _whole: int) -> None:
    """Shows nobody."""


def nobody(_act: Callable[[], object] | None) -> None:
    """Watches calls without ending any of them."""


class NoState:
    """An empty state."""

    def cut_state(self) -> PackedCut:
        return PackedCut(self.packed())

    def room_ahead(self) -> Callable[[], None] | None:
        return None

    def base_elements(self) -> bytes:
        return b""

    def packed(self) -> PackedState:
        return PackedState([])

    def install(self, data: bytes | bytearray) -> None:
        assert not data
