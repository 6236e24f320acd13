"""A ring without streams: rounds of several ranks, and links that deliver in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import decode, encode
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import RingChunk
from andon.protocol.records import Key, PositionRange
from andon.protocol.ring import segment_elements, segments_of
from andon.protocol.run_settings import Policy
from andon.wire.frames import frame_pass, parse_pass
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.core.ring_landing import (
    PIECE_BYTES,
    Arrived,
    Landing,
    MeanLanding,
    checked_own,
)
from andon_trainer.core.ring_mean import Forward, RingEffect, Send
from andon_trainer.core.ring_round import RingRound

__all__ = ["KEY", "Floats", "Ring", "assigned_to", "expected_means", "land", "layout_of"]

KEY = Key(7 << 32 | 5, 3)
Floats = npt.NDArray[np.float32]


def layout_of(sizes: Sequence[int]) -> Layout:
    return Layout(
        tuple(
            Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
            for i, size in enumerate(sizes)
        )
    )


def assigned_to(rank: int, world_size: int, key: Key = KEY) -> Assigned:
    return Assigned(
        key=key,
        parent=None,
        roster=tuple(range(world_size)),
        rank=rank,
        step=1,
        attempt=0,
        epoch=0,
        positions=(PositionRange(rank, rank + 1),),
        batch=PositionRange(0, world_size),
    )


def expected_means(
    blocks: Sequence[Sequence[Floats]], weights: Sequence[float], policy: Policy
) -> list[Floats]:
    """The means as docs/ring.md defines them; `blocks[rank][block]`. Written without the ring."""
    size, total = len(weights), sum(weights)
    answer = policy.answer_encoding or policy.encoding
    means = [np.zeros_like(block) for block in blocks[0]]
    for block, mean in enumerate(means):
        most = segment_elements(policy.chunk_elements)
        for segment in segments_of(block, mean.size, size, most) if total else ():
            part = slice(segment.offset, segment.offset + segment.count)
            acc: Floats | None = None
            for step in range(size):
                rank = (segment.start + step) % size
                if weights[rank]:
                    given = encode(blocks[rank][block][part], policy.encoding)
                    term = np.float32(weights[rank] / total) * decode(
                        given, policy.encoding, segment.count
                    )
                    acc = term if acc is None else acc + term
            assert acc is not None
            mean[part] = decode(encode(acc, answer), answer, segment.count)
    return means


def land(landing: Landing, payload: memoryview) -> memoryview:
    """Receives a payload to where it lands; returns where it is then, if it is anywhere."""
    at = 0
    for view in landing.pieces(np.empty(PIECE_BYTES, dtype=np.uint8).data):
        view[:] = payload[at : at + view.nbytes]
        at += view.nbytes
    assert at == payload.nbytes
    return (
        landing.place.view(np.uint8).data if isinstance(landing, MeanLanding) else memoryview(b"")
    )


@dataclass
class Ring:
    """All ranks of one exchange; a link is a queue of frames, delivered whenever it likes."""

    sizes: Sequence[int]
    weights: Sequence[float]
    policy: Policy
    calls: Sequence[Call] | None = None
    checked: Sequence[bool] | None = None
    """Which ranks make checksums; None: nobody does."""
    rounds: list[RingRound] = field(init=False)
    links: list[deque[bytes]] = field(init=False)
    """By the rank that sends."""
    keeps_loss: bool = False
    """Whether blocks become what the encoding lost of them."""
    said: list[list[AveragesComplete | ExchangeFailed]] = field(init=False)
    sent_bytes: list[int] = field(init=False)
    muted: set[int] = field(default_factory=set)
    """Ranks that found a bad value of their own on its way out."""
    lands: Callable[[int], bool] = lambda _rank: False
    """Whether a chunk lands at a rank if it can."""

    def __post_init__(self) -> None:
        layout, size = layout_of(self.sizes), len(self.weights)
        whole = Call(name="line.backward", blocks=range(len(self.sizes)))
        calls = self.calls or [whole] * size
        self.links = [deque() for _ in range(size)]
        self.said = [[] for _ in range(size)]
        self.sent_bytes = [0] * size
        self.rounds = [
            RingRound(
                assigned_to(rank, size),
                weight,
                calls[rank],
                layout,
                self.policy,
                [np.full(each, np.nan, dtype=np.float32) for each in self.sizes],
                checked=bool(self.checked and self.checked[rank]),
            )
            for rank, weight in enumerate(self.weights)
        ]

    def do(self, rank: int, effects: list[RingEffect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.send(rank, effect)
                case Forward():
                    message = effect.arrived.message
                    crc32c = message.crc32c if isinstance(message, RingChunk) else None
                    checked = crc32c is not None
                    self.put(rank, frame_pass(message, checksums=checked, crc32c=crc32c))
                case _:
                    self.said[rank].append(effect)

    def send(self, rank: int, send: Send) -> None:
        """What a link's sending thread does."""
        round_, message, crc32c = self.rounds[rank], send.message, send.crc32c
        if rank in self.muted:
            return
        if send.unchecked and isinstance(message, RingChunk):
            finite, crc32c = checked_own(message, checksums=round_.checked)
            if not finite:
                self.muted.add(rank)
                self.do(rank, round_.refuse(message.block))
                return
        self.put(rank, frame_pass(message, checksums=round_.checked, crc32c=crc32c))

    def put(self, rank: int, data: bytes) -> None:
        self.sent_bytes[rank] += len(data)
        self.links[rank].append(data)

    def deliver(self, rank: int) -> None:
        """The oldest frame that `rank` sent arrives."""
        data, receiver = self.links[rank].popleft(), (rank + 1) % len(self.rounds)
        message, round_ = parse_pass(data), self.rounds[receiver]
        # As over gRPC, or as over a lane; both have to come to the same.
        landing = round_.landings.take(message) if self.lands(receiver) else None
        if landing is not None and isinstance(message, RingChunk):
            message = replace(message, payload=land(landing, message.payload))
        self.do(receiver, round_.receive(Arrived(message, data, len(data), landing=landing)))

    def run(self, blocks: Sequence[Sequence[Floats]], seed: int) -> None:
        """Everything that can happen happens, in an order drawn from `seed`."""
        draw = random.Random(seed)
        self.lands = lambda _rank: draw.random() < 0.5
        left: list[list[tuple[str, int]]] = []
        for rank, weight in enumerate(self.weights):
            call = self.rounds[rank].call
            work = [("begin", 0)]
            if weight and call.data is not None:
                work.append(("data", 0))
            elif weight:
                work += [("submit", block) for block in call.blocks]
            left.append(work)
        while True:
            acts = [("work", rank) for rank, work in enumerate(left) if work]
            begun = [not work or work[0][0] != "begin" for work in left]
            acts += [
                ("deliver", rank)
                for rank, link in enumerate(self.links)
                if link and begun[(rank + 1) % len(left)]
            ]
            if not acts:
                return
            what, rank = draw.choice(acts)
            if what == "deliver":
                self.deliver(rank)
                continue
            act, block = left[rank].pop(0)
            round_ = self.rounds[rank]
            if act == "begin":
                self.do(rank, round_.begin())
            elif act == "data":
                self.do(rank, round_.submit_data())
            else:
                given = blocks[rank][block]
                self.do(rank, round_.submit(block, given, keeps_loss=self.keeps_loss))
