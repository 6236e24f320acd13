"""Workers of a ring on loopback, over TCP lanes or gRPC, without a coordinator."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from andon.protocol import tokens
from andon.protocol.layout import Layout
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Call
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    ExchangeFailed,
    Neighbours,
)
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.ring.exchange import RingExchange, RingPlace

__all__ = ["RUN", "Floats", "RingLine", "RingWorker"]

RUN = "7f3a"
PATIENCE_S = 60.0
PLACE = RingPlace(bind="127.0.0.1", port=0, advertised="127.0.0.1", lease_s=3.0)
Floats = npt.NDArray[np.float32]


class RingWorker:
    """One worker's exchange."""

    def __init__(self, layout: Layout, policy: Policy, worker: int, place: RingPlace) -> None:
        self.worker = worker
        self.inbox = Inbox()
        self.exchange = RingExchange(layout, policy, self.inbox, place, checksums=True)
        self.address = self.exchange.listen()

    def outcome(self, key: Key) -> AveragesComplete | ExchangeFailed:
        """The outcome of a round; ignores reports about other rounds."""
        while True:
            event = self.inbox.take(PATIENCE_S)
            assert event is not None, f"worker {self.worker}: round {key} had no outcome"
            if isinstance(event, AveragesComplete | ExchangeFailed) and event.key == key:
                return event


class RingLine:
    """Several workers, with the assignments that a coordinator would send."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        workers: int,
        *,
        without_lanes: Sequence[int] = (),
        tls: Path | None = None,
        lane_patience_s: float | None = None,
    ) -> None:
        """`without_lanes` are workers that offer no TCP lane, and ask for none."""
        self.workers = [
            RingWorker(
                layout,
                policy,
                worker,
                replace(
                    PLACE,
                    lanes=worker not in without_lanes,
                    tls=tls,
                    lane_patience_s=lane_patience_s,
                ),
            )
            for worker in range(workers)
        ]
        self.secret = secrets.token_bytes(32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.exchange.close()

    def assigned(self, key: Key, rank: int, roster: Sequence[int]) -> Assigned:
        size = len(roster)
        before, after = roster[(rank - 1) % size], roster[(rank + 1) % size]
        return Assigned(
            key=key,
            parent=None,
            roster=tuple(roster),
            rank=rank,
            step=1,
            attempt=0,
            epoch=0,
            positions=(PositionRange(rank, rank + 1),),
            batch=PositionRange(0, size),
            ring=Neighbours(
                address=self.workers[after].address,
                token=tokens.link_token(self.secret, RUN, key, roster[rank], after),
                expected_token=tokens.link_token(self.secret, RUN, key, before, roster[rank]),
            ),
        )

    def begin(
        self,
        key: Key,
        rank: int,
        roster: Sequence[int],
        weight: float = 1.0,
        call: Call | None = None,
    ) -> RingWorker:
        """Starts a round, or one call of it, at a rank's worker."""
        worker = self.workers[roster[rank]]
        worker.exchange.begin(self.assigned(key, rank, roster), weight, call)
        if not weight:
            worker.exchange.abstain()
        return worker

    def give(
        self, key: Key, rank: int, roster: Sequence[int], blocks: Sequence[Floats], weight: float
    ) -> RingWorker:
        """Starts a round at a rank's worker, and submits all blocks."""
        worker = self.begin(key, rank, roster, weight)
        if weight:
            for block, flat in enumerate(blocks):
                worker.exchange.submit(block, flat)
        return worker
