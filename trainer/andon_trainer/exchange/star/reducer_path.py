"""The wire: the lane that sends chunks to one reducer as bytes, over gRPC or over TCP lanes.

Theory of operation. The training thread queues chunks as views of the block's buffer, in the
layout's order, while backward still runs. A sending thread takes them out and sends them; a
receiving thread gives what comes back to the collector. Both threads run at the same time, since a
worker must read while it writes (rule 16).

A *lane* is what leads to one reducer. This one carries bytes; `shared.SharedLane` carries them
through memory that both processes map. Both use a `BulkStream`. If the reducer offers TCP lanes,
all further messages of this one's stream travel over them: from the block's buffer, and to where
averages belong. If they can't be opened, gRPC carries the messages: then each chunk is copied into
its frame, and out of one.

If worker and reducer both can, each chunk has a checksum, both ways. If one does not match, the
round is void: nothing of it is kept, and the step is tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from andon.protocol.capabilities import LISTENING, SAME_BITS, TRIMMED, capabilities_of
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Chunk
from andon.protocol.limits import MAX_CONNECTIONS
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Request,
    Response,
    TcpOffer,
    TreeNode,
)
from andon.protocol.run_settings import Policy
from andon.tcp.connecting import TcpUnavailable
from andon.tcp.proof import CAPABILITY as TCP
from andon.tcp.proof import WIDE_CAPABILITY, LaneDirection
from andon.wire import checksums
from andon.wire.frames import frame_request, parse_response
from andon_trainer.core.calls import Bytes, Floats
from andon_trainer.core.values import encode_own
from andon_trainer.exchange.collector import Collector, OpenCall
from andon_trainer.exchange.path import Traffic
from andon_trainer.exchange.star.bulk_stream import REASON_S, BulkStream, ReducerAccess
from andon_trainer.exchange.star.lane_growth import LaneGrowth
from andon_trainer.exchange.star.lane_watch import LaneCounts, LaneTrust, LaneWatch, LaneWay
from andon_trainer.exchange.star.tcp import LaneEvents, WorkerLanes

__all__ = ["Lane", "LanePart", "ReducerUnfit", "WireLane"]


class ReducerUnfit(ValueError):
    """A reducer that can't take what the policy asks for. Trying again would not help."""


@dataclass(frozen=True, slots=True)
class LanePart:
    """What one lane carries, and how."""

    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each block that go to this reducer, in rising order."""
    policy: Policy
    collector: Collector
    """Where its averages go. All lanes of an exchange have one."""
    access: ReducerAccess


class Lane(Protocol):
    """The way to one reducer. Used by the training thread alone."""

    @property
    def is_open(self) -> bool:
        """Whether its stream is alive, as far as this end knows."""

    @property
    def found_bad_value(self) -> bool:
        """Whether the reducer found a value in this worker's blocks that must not be averaged."""

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the stream, in place of what was open."""

    def begin(self, call: OpenCall) -> None:
        """Takes part in a call that the collector knows of."""

    def send(self, block: int, flats: Sequence[Floats], *, keeps_loss: bool) -> None:
        """Sends the lane's chunks of a block; see `Exchange.submit`.

        `flats` has one vector for each of the call's contributions. All of them give a chunk before
        any gives the next one (docs/protocol-same-bits.md, section 33).
        """

    def send_data(self, data: Bytes) -> None:
        """Sends a broadcast's bytes."""

    def abstain(self) -> None:
        """Tells the reducer that this rank gives nothing to the call."""

    def close(self) -> None:
        """Ends the stream."""


class WireLane:
    """A `Lane` that sends chunks as bytes."""

    def __init__(self, part: LanePart) -> None:
        """Opens nothing yet."""
        self._part = part
        self._call: OpenCall | None = None
        self._stream: BulkStream | None = None
        self._lanes: WorkerLanes | None = None
        self._lanes_alive = False
        self._trust = LaneTrust()
        self._watch: LaneWatch | None = None
        self._growth: LaneGrowth | None = None
        self._widths: dict[LaneDirection, int] = {}
        """On how many connections the lanes of the stream before carried frames."""
        self._checked = False
        """Whether chunks have checksums on the present stream."""
        self.found_bad_value = False
        """Never: what goes over a wire is checked before it is sent."""
        # By the path of the metrics. The sending thread alone writes the one, and the receiving
        # thread alone the other.
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    @property
    def traffic(self) -> Traffic:
        """The bytes of chunks that went over it, by path."""
        return Traffic(Counter(self._sent), Counter(self._received))

    @property
    def tcp_refused(self) -> str:
        """Why the present stream has no TCP lanes although the reducer offers them."""
        return self._trust.refused

    @property
    def connections(self) -> int:
        """On how many connections chunks travel, on the lane that has more; 0: there is none."""
        return 0 if self._lanes is None else max(self._lanes.used.values())

    @property
    def uses_tcp(self) -> bool:
        """Whether the present stream's messages travel over TCP lanes."""
        return self._lanes is not None

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Lane`.

        Raises:
            ReducerUnfit: the reducer takes no payload as large as a chunk, or lacks an encoding.
            TlsError, grpc.RpcError, FrameError: as `BulkStream`.
        """
        self.close()
        policy = self._part.policy
        needed = capabilities_of((policy.encoding, policy.answer_encoding))
        if policy.trims:
            needed = *needed, TRIMMED
        if opening.listens:
            needed = *needed, LISTENING
        if SAME_BITS in opening.capabilities:
            needed = *needed, SAME_BITS
        left_out = {*needed}
        if not self._trust.may_try:
            left_out |= {TCP, WIDE_CAPABILITY}
        able = [each for each in opening.capabilities if each not in left_out]
        opening = replace(opening, capabilities=(*able, *needed))

        def lost(why: str) -> None:
            self._part.collector.lost(f"the reducer at {address}: {why}")

        self._stream = BulkStream(address, opening, self._read, lost, self._part.access)
        self._refuse_lacking(address, needed)
        self._refuse_small_payloads(address, self._stream.opened.max_payload_bytes)
        # Set after the receiving thread was started. That is in time: no average comes before
        # something is sent.
        self._checked = checksums.CAPABILITY in self._stream.opened.capabilities
        # Before anything else is sent: the protocol lets a stream choose between gRPC and lanes
        # only once, with its first message after OpenRound.
        self._open_lanes(address, opening, self._stream, lost)

    def _open_lanes(
        self, address: str, opening: OpenRound, stream: BulkStream, lost: Callable[[str], None]
    ) -> None:
        """Opens TCP lanes if the reducer offers them; notes why, if that does not work."""
        offer = stream.opened.tcp
        if offer is None or TCP not in stream.opened.capabilities:
            return

        def lane_lost(why: str) -> None:
            # Before it is reported: whoever hears of the loss must find the stream dead.
            self._lanes_alive = False
            # The reducer ends the lanes together with the call, and only the call says why.
            if not stream.ended.wait(REASON_S):
                lost(why)

        events = LaneEvents(
            place=self._part.collector.place_of,
            received=self._take,
            sent=self._count,
            lost=lane_lost,
        )
        # Before their threads start: one of them may learn of an end at once.
        self._lanes_alive, lanes = True, None
        try:
            lanes = WorkerLanes(
                address,
                offer,
                opening,
                events,
                tls=self._part.access.tls,
                agreed=stream.opened.capabilities,
            )
            if offer.reports:
                self._watch_over(lanes, stream, offer, lost)
            if WIDE_CAPABILITY in stream.opened.capabilities:
                self._grow(lanes, stream, offer)
        except (TcpUnavailable, RuntimeError) as why:  # There may be no thread left for the watch.
            if lanes is not None:
                lanes.close()
            self._trust.not_opened(str(why))
        else:
            self._lanes = lanes
            self._trust.opened()

    def _grow(self, lanes: WorkerLanes, stream: BulkStream, offer: TcpOffer) -> None:
        """Opens the connections that lanes are to have, or as many as raise the rate."""
        chosen, offered = self._part.access.connections, min(offer.connections, MAX_CONNECTIONS)
        most = max(1, offered if chosen is None else min(chosen, offered))
        self._growth = LaneGrowth(
            lanes,
            stream.asking(offer.nonce, self._part.access.lane_patience_s),
            most=most,
            adaptive=offer.adaptive and chosen is None,
            start=self._widths,
        )

    def _watch_over(
        self, lanes: WorkerLanes, stream: BulkStream, offer: TcpOffer, lost: Callable[[str], None]
    ) -> None:
        """Gives lanes up once they stand still while the reducer answers."""
        patience_s = self._part.access.lane_patience_s

        def counts() -> LaneCounts | None:
            # Lanes that wait between two rounds carry nothing.
            call = self._call
            return lanes.counts if call is not None and call.missing else None

        def still(way: LaneWay) -> None:
            """Runs on the watch's thread."""
            self._lanes_alive = False
            # Before `lost`: the training thread may open the next stream at once, and goes by it.
            self._trust.stood_still(way, patience_s)
            lost(f"{self.tcp_refused}. gRPC carries the next try")

        self._watch = LaneWatch(counts, stream.asking(offer.nonce, patience_s), still, patience_s)

    def _refuse_lacking(self, address: str, needed: tuple[str, ...]) -> None:
        """Refuses a reducer that does not know the line's encodings."""
        assert self._stream is not None
        missing = [each for each in needed if each not in self._stream.opened.capabilities]
        if not missing:
            return
        self.close()
        if missing == [LISTENING]:
            raise ReducerUnfit(
                f"the reducer at {address} lacks {LISTENING}, so nobody can learn from it while "
                "the line trains: update the reducer"
            )
        if SAME_BITS in missing:
            raise ReducerUnfit(
                f"the reducer at {address} lacks {SAME_BITS}, so it can't add gradients along the "
                "tree of grains: update the reducer, or leave same_bits out"
            )
        raise ReducerUnfit(
            f"the reducer at {address} lacks {missing[0]}, which the line's encoding needs: "
            "update the reducer, or start the line with --encoding bfloat16"
        )

    def _refuse_small_payloads(self, address: str, most: int) -> None:
        """Refuses a reducer that takes no payload as large as a chunk; `most` of 0: unknown."""
        counts = (chunk.count for chunks in self._part.chunks for chunk in chunks)
        elements = max(counts, default=0)
        largest = max(each.payload_bytes(elements) for each in self._part.policy.encodings)
        if not 0 < most < largest:
            return
        self.close()
        raise ReducerUnfit(
            f"the reducer at {address} takes payloads of {most} bytes, and this model's chunks "
            f"have {largest}: serve the line with a lower --chunk-elements, or the reducer with a "
            "higher --max-message-bytes"
        )

    @property
    def is_open(self) -> bool:
        """See `Lane`."""
        if self._stream is None or not self._stream.alive:
            return False
        return self._lanes is None or self._lanes_alive

    def begin(self, call: OpenCall) -> None:
        """See `Lane`."""
        self._call = call

    def send(self, block: int, flats: Sequence[Floats], *, keeps_loss: bool) -> None:
        """See `Lane`."""
        call, policy = self._call, self._part.policy
        assert call is not None
        if self._stream is None:
            return
        encoding, answer = call.call.encoding(policy), call.call.answer_encoding(policy)
        parts = list(zip(call.contributions, flats, strict=True))
        for chunk in self._part.chunks[block]:
            for whose, flat in parts:
                numbers = flat[chunk.offset : chunk.offset + chunk.count]
                encoded = partial(
                    encode_own, numbers, encoding, keeps_loss=keeps_loss, kept=policy.topk_kept
                )
                self._send(partial(_gradient, call, chunk, encoded, encoding, answer, whose))

    def send_data(self, data: Bytes) -> None:
        """See `Lane`: the bytes travel as a block of single bytes."""
        call, step = self._call, self._part.policy.chunk_elements
        assert call is not None
        if self._stream is None:
            return
        for offset in range(0, data.size, step):
            chunk = Chunk(0, offset, min(step, data.size - offset))
            part = partial(_bytes_of, data[offset : offset + step])
            whose = call.weight, None
            self._send(partial(_gradient, call, chunk, part, Encoding.UINT8, None, whose))

    def abstain(self) -> None:
        """See `Lane`."""
        call = self._call
        assert call is not None
        message = Abstain(
            key=call.key,
            rank=call.rank,
            world_size=call.world_size,
            sequence=call.call.sequence,
        )
        self._send(lambda: message)

    def close(self) -> None:
        """See `Lane`."""
        if self._watch is not None:
            self._watch.stop()
        if self._growth is not None:
            self._growth.stop()
            self._growth = None
        # The call first: the lanes end with it, and that is no loss.
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._lanes is not None:
            self._widths = self._lanes.used
            self._lanes.close()
            self._lanes = None
        if self._watch is not None:
            # Last: its thread may wait for an answer, and the end of the call above ended that
            # wait.
            self._watch.conclude(self._trust)
            self._watch = None

    def _send(self, make: Callable[[], Request]) -> None:
        """Sends what `make` returns, which runs on the sending thread."""
        if self._lanes is not None:
            self._lanes.send(make)
        elif self._stream is not None:
            self._stream.send(partial(self._framed, make))

    def _framed(self, make: Callable[[], Request]) -> bytes:
        message = make()
        data = frame_request(message, checksums=self._checked)
        self._count(message, len(data), "wire")
        return data

    def _count(self, message: Request, size: int, path: str = "tcp") -> None:
        """Runs on the sending thread."""
        if isinstance(message, BlockGradient):
            self._sent[path] += size

    def _read(self, data: bytes) -> None:
        """Runs on gRPC's receiving thread."""
        self._take(parse_response(data), len(data), path="wire")

    def _take(
        self, message: Response, size: int, *, placed: bool = False, path: str = "tcp"
    ) -> None:
        """Takes what the reducer sent. Runs on the receiving thread."""
        if isinstance(message, AveragedBlock):
            self._received[path] += size
            # Before its key is looked at: if the key is what was changed, the average would be
            # dropped as another round's, and be waited for for ever.
            if self._checked and not checksums.is_intact(message):
                self._part.collector.refuse_corrupt(message)
                return
        self._part.collector.receive(message, placed=placed)


def _gradient(
    call: OpenCall,
    chunk: Chunk,
    encoded: Callable[[], memoryview],
    encoding: Encoding,
    answer: Encoding | None,
    whose: tuple[float, TreeNode | None],
) -> BlockGradient:
    """One chunk as a message. Runs on the sending thread."""
    assert call.operation is not None
    weight, node = whose
    return BlockGradient(
        key=call.key,
        rank=call.rank,
        world_size=call.world_size,
        block=chunk.block,
        offset=chunk.offset,
        count=chunk.count,
        weight=weight,
        sequence=call.call.sequence,
        operation=call.operation,
        payload=encoded(),
        encoding=encoding,
        answer_encoding=answer,
        node=node,
    )


def _bytes_of(data: Bytes) -> memoryview:
    return data.data
