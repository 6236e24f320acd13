"""A place on the line whose exchanges a test answers; no thread and no wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon_trainer.averaging.averaging import Averaging
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned, AveragesComplete
from andon_trainer.exchange.path import Exchange
from andon_trainer.place.position import Position
from unit.andon_trainer.assigned_work import work

__all__ = ["Seat"]


class Seat:
    """One rank's membership and exchange; what is broadcast goes by `wire`."""

    def __init__(self, layout: Layout, rank: int = 0, ranks: int = 2, **assigned: Any) -> None:
        self.policy = Policy()
        fields = {"roster": tuple(range(ranks)), "rank": rank, **assigned}
        self.position = Position(assigned=replace(work(), **fields))
        self.averages: list[Floats] = [
            np.zeros(block.elements, np.float32) for block in layout.blocks
        ]
        self.first_sent: float | None = None
        self.refused = False
        self.calls: list[tuple[Call, float]] = []
        self.submitted: dict[int, Floats] = {}
        self.wire: dict[int, Bytes] = {}
        """Rank 0's bytes, by the number of the exchange; share it with the other ranks."""
        self.void_at: int | None = None
        """The exchange, counted from 1 over all rounds, that finds its round void."""
        self.held = 0
        """How often this worker said that no exchange of the round follows."""
        self.averaging = Averaging(self, layout)

    @property
    def exchange(self) -> Exchange:
        return cast(Exchange, self)

    @property
    def assigned(self) -> Assigned:
        assert self.position.assigned is not None
        return self.position.assigned

    def stand(self, **facts: Any) -> None:
        """Makes these facts of its position other ones."""
        self.position = replace(self.position, **facts)

    def next_round(self) -> None:
        key = self.assigned.key
        self.stand(assigned=replace(self.assigned, key=Key(key.term, key.round + 1)))

    def begin(self, weight: float, call: Call | None = None) -> bool:
        assert call is not None
        self.calls.append((call, weight))
        self.submitted = {}
        return True

    def lend(self, block: int, area: int = 0) -> None:
        """None: it has no memory."""

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> None:
        assert not keeps_loss, "only gradients have a residual"
        self.submitted[block] = flat

    def submit_data(self) -> None:
        call, _ = self.calls[-1]
        assert call.data is not None
        assert self.assigned.rank == 0
        self.wire[call.sequence] = call.data.copy()

    def abstain(self) -> None:
        assert not self.calls[-1][1]

    def answer(self) -> None:
        """Puts the mean of what was submitted into `averages`; a test may override it."""
        for block, flat in self.submitted.items():
            self.averages[block][:] = flat

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        if self.void_at == len(self.calls):
            return None
        call, _ = self.calls[-1]
        if call.data is None:
            self.answer()
        elif call.sequence in self.wire:
            sent = self.wire[call.sequence]
            assert sent[: call.head_bytes].tobytes() == call.data[: call.head_bytes].tobytes()
            call.data[:] = sent
        self.held += last
        return AveragesComplete(self.assigned.key, 2.0, self.assigned.world_size)

    def hold(self) -> bool:
        self.held += 1
        return True
