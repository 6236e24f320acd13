"""Workers with a star of real reducers, over any path, without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from andon.protocol import tokens
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import ReducerShare, partition
from andon.protocol.run_settings import Policy
from andon.tcp.proof import CAPABILITY, WIDE_CAPABILITY
from andon.wire import checksums
from andon_reducer.config import ReducerConfig
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import Assigned, AveragesComplete, Event, ExchangeFailed
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.star import StarExchange
from integration.reducer_bench import RUN, SECRET, Reducer

__all__ = [
    *("CHUNK", "LAYOUT", "PATHS", "PATIENCE_S", "POLICY", "SIZES"),
    *("StarWorker", "exchanged", "lanes_of", "means", "opening_of", "shares_of", "star"),
    "weighted_mean",
]

CHUNK = 2**8
SIZES = (9 * CHUNK + 7, 3, 20 * CHUNK, 1)
LAYOUT = Layout(
    tuple(
        Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
        for i, size in enumerate(SIZES)
    )
)
POLICY = Policy(chunk_elements=CHUNK)
PATHS = ("wire", "tcp", "shared-memory")
"""Under these names an exchange counts its bytes."""
PATIENCE_S = 20.0
_QUIET_S = 0.3


def opening_of(worker: int, *capabilities: str) -> OpenRound:
    """What opens a worker's streams."""
    return OpenRound(RUN, worker, tokens.session_token(SECRET, RUN, worker), capabilities)


def shares_of(addresses: Sequence[str]) -> tuple[ReducerShare, ...]:
    """The model, divided between these reducers."""
    return partition(LAYOUT, CHUNK, addresses)


class StarWorker:
    """One worker's exchange."""

    def __init__(
        self,
        rank: int,
        size: int,
        shares: tuple[ReducerShare, ...],
        *,
        policy: Policy = POLICY,
        layout: Layout = LAYOUT,
        shared_dir: Path | None = None,
        lanes: bool = False,
        lane_patience_s: float = 60.0,
        connections: int | None = 1,
    ) -> None:
        """Its streams are not open yet; it shares memory in `shared_dir`, and may use `lanes`.

        These have so many `connections`; None: as many as the reducer says.
        """
        self.inbox = Inbox()
        self.rank, self.size = rank, size
        lane: tuple[str, ...] = (CAPABILITY,) if lanes else ()
        if lanes and connections != 1:
            lane = CAPABILITY, WIDE_CAPABILITY
        self.opening = opening_of(rank, checksums.CAPABILITY, *lane)
        self.address = shares[0].address
        access = ReducerAccess(
            opening_s=PATIENCE_S,
            shared_dir=shared_dir,
            lane_patience_s=lane_patience_s,
            connections=connections,
        )
        self.exchange = StarExchange(layout, policy, self.inbox, shares, access)
        generator = np.random.default_rng(rank)
        self.blocks = [
            generator.standard_normal(block.elements, dtype=np.float32) for block in layout.blocks
        ]

    def open(self) -> None:
        """Opens the streams, as the membership does before a round."""
        if not self.exchange.is_open:
            self.exchange.open(self.address, self.opening)

    def begin(self, number: int, call: Call | None = None) -> None:
        """Begins a round, or one call of it, with the weight rank + 0.5."""
        self.open()
        assigned = Assigned(
            key=Key(1, number),
            parent=None,
            roster=tuple(range(self.size)),
            rank=self.rank,
            step=1,
            attempt=0,
            epoch=0,
            positions=(PositionRange(0, 1),),
            batch=PositionRange(0, self.size),
        )
        self.exchange.begin(assigned, self.rank + 0.5, call)

    def submit(self, blocks: Sequence[Floats] | None = None) -> None:
        """Gives all blocks; by default its own random ones."""
        for index, block in enumerate(self.blocks if blocks is None else blocks):
            self.exchange.submit(index, block)

    def give(self, number: int) -> None:
        """Begins a round, and gives all blocks."""
        self.begin(number)
        self.submit()

    def abstain(self, number: int, call: Call | None = None) -> None:
        """Begins a round, and gives nothing."""
        self.begin(number, call)
        self.exchange.abstain()

    def told(self) -> Event:
        """The next event."""
        event = self.inbox.take(PATIENCE_S)
        assert event is not None
        return event

    def outcome(self, number: int) -> AveragesComplete | ExchangeFailed:
        """How a round went; ignores what is said of other rounds."""
        while True:
            event = self.told()
            assert isinstance(event, AveragesComplete | ExchangeFailed), event
            if event.key == Key(1, number):
                return event

    def is_told_no_more(self) -> bool:
        """Whether nothing comes for a while."""
        return self.inbox.take(_QUIET_S) is None


@contextmanager
def star(
    path: str,
    folder: Path,
    reducers: int,
    workers: int,
    *,
    window_bytes: int = 2**26,
    policy: Policy = POLICY,
    layout: Layout = LAYOUT,
) -> Iterator[tuple[list[Reducer], list[StarWorker]]]:
    """Reducers that share the model, and workers that reach all of them over one path."""
    shared, lanes = folder if path == "shared-memory" else None, path == "tcp"
    config = ReducerConfig(
        chunk_elements=policy.chunk_elements, window_bytes=window_bytes, shared_dir=shared
    )
    with ExitStack() as stack:
        started = [stack.enter_context(Reducer(config, lanes=lanes)) for _ in range(reducers)]
        addresses = [f"127.0.0.1:{each.port}" for each in started]
        shares = partition(layout, policy.chunk_elements, addresses)
        members = [
            StarWorker(
                rank, workers, shares, policy=policy, layout=layout, shared_dir=shared, lanes=lanes
            )
            for rank in range(workers)
        ]
        for worker in members:
            stack.callback(worker.exchange.close)
        yield started, members


def means(workers: Sequence[StarWorker]) -> list[bytes]:
    """The averages that each worker has."""
    return [np.concatenate(worker.exchange.averages).tobytes() for worker in workers]


def exchanged(workers: Sequence[StarWorker], number: int) -> list[bytes]:
    """One whole round; the averages that each worker got."""
    for worker in workers:
        worker.give(number)
    for worker in workers:
        told = worker.outcome(number)
        assert isinstance(told, AveragesComplete), told
    found = means(workers)
    for worker in workers:
        worker.exchange.end()
    return found


def lanes_of(worker: StarWorker) -> Any:
    """A worker's lanes to its first reducer; None: gRPC carries everything."""
    return worker.exchange._reducers[0]._wire._lanes


def weighted_mean(workers: Sequence[StarWorker]) -> bytes:
    """Of two workers with the weights 0.5 and 1.5, by the rule of the protocol."""
    first, second = (np.concatenate(worker.blocks) for worker in workers)
    mean: bytes = (first * np.float32(0.25) + second * np.float32(0.75)).tobytes()
    return mean
