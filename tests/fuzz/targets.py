"""Fuzz targets: each takes any bytes, and raises only if a contract is broken.

The contract is C-WIRE-002: bytes are read as generated code reads them, or refused with the
module's own error. A session goes further: its bytes are the whole stream of a hostile worker, read
as the service reads it and handed to the real core, whose invariants must hold whatever it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from google.protobuf.message import DecodeError, Message

from andon.protocol.limits import LimitExceeded
from andon.protocol.peer_frames import LaneEnd
from andon.protocol.records import RecordKind
from andon.protocol.run_settings import Policy, RunPlan
from andon.tcp.framing import PREFIX_BYTES, prefixed, read_prefix
from andon.tcp.proof import (
    PREAMBLE_BYTES,
    LaneDirection,
    LaneSession,
    NotAPreamble,
    answer_of,
    is_answer,
    is_claim,
    preamble,
    read_preamble,
)
from andon.v1 import coordinator_pb2, layout_pb2, reducer_pb2, ring_pb2, session_pb2
from andon.wire import conversion, layouts
from andon.wire.fields import FrameError
from andon.wire.frames import (
    batch_requests,
    batch_responses,
    frame_pass,
    frame_request,
    frame_response,
    parse_pass,
    parse_pass_head,
    parse_request,
    parse_request_head,
    parse_requests,
    parse_response,
    parse_response_head,
    parse_responses,
    split_pass,
    split_request,
    split_response,
    with_payload,
)
from andon.wire.peer_frames import parse_head, peer_head
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import event_from, join_from
from andon_trainer.errors import AndonError
from andon_trainer.exchange.control.translation import accepted_from
from andon_trainer.exchange.control.translation import event_from as heard_from
from fuzz.passing import taken_by_a_rank
from scenarios.line_bench import Bench
from scenarios.reducer_port import STREAMS, WINDOW_BYTES, ReducerPort
from unit.andon import generated

__all__ = ["TARGETS"]

_MOST_MESSAGES = 64
_WINDOW_BYTES = 2**16


def requests(data: bytes) -> None:
    """A ReduceRequest: read as protobuf reads it, or refused; batches too."""
    _compare(data, parse_request, generated.request, frame_request)
    _batch(data, parse_requests, frame_request, batch_requests)


def responses(data: bytes) -> None:
    """A ReduceResponse, likewise."""
    _compare(data, parse_response, generated.response, frame_response)
    _batch(data, parse_responses, frame_response, batch_responses)


def ring(data: bytes) -> None:
    """A PassRequest: what is read is written to bytes that protobuf reads as the same."""
    try:
        message = parse_pass(data)
    except FrameError:
        return
    theirs = ring_pb2.PassRequest.FromString(data)
    theirs.DiscardUnknownFields()
    ours = ring_pb2.PassRequest.FromString(frame_pass(message))
    for each in (theirs, ours):
        each.ring_chunk.padding = b""
    case = theirs.WhichOneof("message")
    assert case is not None
    _same(_content(ours, case), _content(theirs, case))


def peers(data: bytes) -> None:
    """A PeerFrame: what is read is written to bytes that protobuf reads as the same."""
    for payload_bytes in (0, len(data)):
        try:
            frame = parse_head(memoryview(data), payload_bytes).frame
        except FrameError:
            continue
        theirs = session_pb2.PeerFrame.FromString(data)
        theirs.DiscardUnknownFields()
        theirs.ClearField("crc32c")
        if isinstance(frame, LaneEnd):
            theirs.group = theirs.sequence = 0
        assert session_pb2.PeerFrame.FromString(peer_head(frame)) == theirs


def layout(data: bytes) -> None:
    """A Layout: what is taken, with its digest mended, is written as it came."""
    try:
        message = layout_pb2.Layout.FromString(data)
    except DecodeError:
        return
    try:
        message.digest = _digest_of(message)
        known = layouts.layout_from_proto(message)
    except (conversion.WireError, LimitExceeded):
        return
    message.DiscardUnknownFields()
    _same(layouts.layout_to_proto(known), message)


def _digest_of(message: layout_pb2.Layout) -> bytes:
    """The digest of the blocks, which no fuzzer would guess; the error of a wrong one names it."""
    message.digest = b""
    try:
        return layouts.layout_from_proto(message).digest
    except conversion.WireError as error:
        _, found, rest = str(error).partition("its digest is ")
        if not found:
            raise
        return bytes.fromhex(rest.partition(",")[0])


def answers(data: bytes) -> None:
    """A TrainResponse, as a worker hears it: an event, nothing, or its own error."""
    try:
        message = coordinator_pb2.TrainResponse.FromString(data)
    except DecodeError:
        return
    for read in (accepted_from, heard_from):
        try:
            read(message)
        except (ValueError, AndonError):
            continue


def session(data: bytes) -> None:
    """A hostile worker's streams: its messages go to the line of two healthy workers, one by one.

    What is chopped off the front says how to cut the rest: a byte below 8 opens a new stream, an
    odd one lets time pass, and the next two bytes are the length of the next message.
    """
    line = _Line()
    for command, message in _messages(data):
        line.take(command, message)


def reducing(data: bytes) -> None:
    """Hostile streams of the reducer's core: what it holds stays bounded, and nothing else raises.

    Cut as a session is; a byte's low bits choose one of four streams.
    """
    reducer = ReducerPort()
    for command, frame in _messages(data):
        reducer.take(command % STREAMS, frame)
        assert reducer.rounds.inflight_bytes <= 2 * WINDOW_BYTES + len(data)


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """What travels on one kind of lane."""

    generated: type[Message]
    parse: Callable[[bytes], Any]
    """As gRPC carries it."""
    parse_head: Callable[[memoryview, int], Any]
    split: Callable[[Any], tuple[bytes, memoryview | None]]


_WRAPPERS = (
    _Wrapper(reducer_pb2.ReduceRequest, parse_request, parse_request_head, split_request),
    _Wrapper(reducer_pb2.ReduceResponse, parse_response, parse_response_head, split_response),
    _Wrapper(ring_pb2.PassRequest, parse_pass, parse_pass_head, split_pass),
)


def lanes(data: bytes) -> None:
    """The bytes of a TCP lane: each frame is taken as gRPC's message would be, or refused.

    The first byte chooses the wrapper; what follows are frames.
    """
    wrapper, rest = _WRAPPERS[data[0] % 3 if data else 0], memoryview(data)[1:]
    while len(rest) >= PREFIX_BYTES:
        try:
            head_bytes, payload_bytes = read_prefix(bytes(rest[:PREFIX_BYTES]), _WINDOW_BYTES)
            head = rest[PREFIX_BYTES : PREFIX_BYTES + head_bytes]
            message = wrapper.parse_head(head, payload_bytes)
        except FrameError:
            return
        rest = rest[PREFIX_BYTES + head_bytes :]
        payload, rest = rest[:payload_bytes], rest[payload_bytes:]
        if len(head) < head_bytes or len(payload) < payload_bytes:
            return
        _as_on_grpc(wrapper, bytes(head), payload, with_payload(message, payload))


def _as_on_grpc(wrapper: _Wrapper, head: bytes, payload: memoryview, taken: Any) -> None:
    """The same message in one piece gives the same value; and it is written as it is read."""
    whole: Any = wrapper.generated.FromString(head)
    content = getattr(whole, whole.WhichOneof("message"))
    if "payload" in content.DESCRIPTOR.fields_by_name:
        content.payload = bytes(payload)
    assert _plain(wrapper.parse(whole.SerializeToString())) == _plain(taken)
    again, numbers = wrapper.split(taken)
    framed = prefixed(again, numbers)
    assert read_prefix(framed[:PREFIX_BYTES], _WINDOW_BYTES) == (len(again), len(payload))
    for name in ("crc32c", "header_crc32c"):
        whole.ClearField(name)
    read = with_payload(wrapper.parse_head(memoryview(again), len(payload)), payload)
    assert _plain(read) == _plain(wrapper.parse(whole.SerializeToString()))


def _plain(message: Any) -> list[str]:
    """A message's fields as text: a NaN equals itself there."""
    values = (getattr(message, each.name) for each in fields(message))
    return [repr(bytes(each) if isinstance(each, memoryview) else each) for each in values]


def passing(data: bytes) -> None:
    """Hostile neighbours of a rank of a ring, one of which may have its token: see its module."""
    taken_by_a_rank(_messages(data))


def preambles(data: bytes) -> None:
    """The first bytes of a connection: none proves anything but one that the key made."""
    session, nonce = LaneSession(b"a key", "run", 1), bytes(32)
    try:
        claim = read_preamble(data[:PREAMBLE_BYTES].ljust(PREAMBLE_BYTES, b"\0"))
    except NotAPreamble:
        return
    right = preamble(session, nonce, claim.direction, claim.index)
    assert is_claim(session, nonce, claim) == (claim.proof == right[-len(claim.proof) :])
    for direction in LaneDirection:
        answer = data[PREAMBLE_BYTES:]
        found = is_answer(session, nonce, direction, answer)
        assert found == (answer == answer_of(session, nonce, direction))


class _Line:
    """Two healthy workers that step, and one who says what it likes."""

    def __init__(self) -> None:
        settings = LineSettings(
            run_id="sim", expect_workers=2, min_workers=1, max_workers=3, policy=Policy()
        )
        self.bench = Bench(settings, RunPlan(global_batch=4, dataset_size=10, seed=3))
        self.healthy = [
            self.bench.join(name, self.bench.request(slot, slot + 1))[0]
            for slot, name in enumerate("ab")
        ]
        self.hostile: int | None = None
        self._settle()

    def take(self, command: int, data: bytes) -> None:
        """One message of the hostile stream, as the service reads it."""
        bench = self.bench
        try:
            message = coordinator_pb2.TrainRequest.FromString(data)
            if self.hostile is None or command < 8:
                self._end()
                self.hostile, done = bench.join("x", join_from(message))
            else:
                done = bench.send(event_from(self.hostile, message))
        except (DecodeError, LineError):
            self._end()
            done = []
        if any(isinstance(each, do.RefuseJoin | do.CloseStream) for each in done):
            self._end()
        if command & 1:
            bench.now += 0.3
            bench.send(on.TimePassed())
        self._settle()
        self._check()

    def _end(self) -> None:
        if self.hostile is not None:
            self.bench.send(on.WorkerStreamEnded(self.hostile, gone=True))
            self.hostile = None

    def _settle(self) -> None:
        """What is to be made durable is."""
        journal = self.bench.journal
        while journal.pending_terms or journal.pending_records:
            if journal.pending_terms:
                self.bench.send(on.TermSaved(journal.save_term()))
            else:
                self.bench.send(on.RecordSaved(journal.save_record()))

    def _check(self) -> None:
        """The journal is one chain of rising keys, and nothing has more members than slots."""
        records = [record for record, _ in self.bench.journal.records]
        for parent, record in pairwise(records):
            assert record.key > parent.key
            assert record.step == parent.step + (record.kind is RecordKind.STEP)
        assert self.bench.line.status(self.bench.now).live <= self.bench.settings.max_workers


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for _ in range(_MOST_MESSAGES):
        if at + 3 > len(data):
            return
        command, length = data[at], int.from_bytes(data[at + 1 : at + 3], "big")
        yield command, data[at + 3 : at + 3 + length]
        at += 3 + length


def _compare(
    data: bytes,
    parse: Callable[[bytes], Any],
    as_generated: Callable[[Any], Message],
    write: Callable[[Any], bytes],
) -> None:
    try:
        read = parse(data)
    except FrameError:
        return
    ours = as_generated(read)
    theirs = type(ours).FromString(data)
    theirs.DiscardUnknownFields()
    _same(_unpadded(ours), _unpadded(theirs))
    _same(_unpadded(type(ours).FromString(write(read))), _unpadded(theirs))


def _batch(
    data: bytes,
    parse: Callable[[bytes], list[Any]],
    write: Callable[[Any], bytes],
    batch: Callable[[list[bytes]], bytes],
) -> None:
    try:
        messages = parse(data)
    except FrameError:
        return
    if messages:
        frames = [write(each) for each in messages]
        assert [write(each) for each in parse(batch(frames))] == frames


def _unpadded(message: Message) -> Message:
    for _, content in message.ListFields():
        if "padding" in content.DESCRIPTOR.fields_by_name:
            content.ClearField("padding")
    return message


def _content(message: Any, case: str) -> Message:
    content: Message = getattr(message, case)
    return content


def _same(one: Message, other: Message) -> None:
    """As bytes, since a weight may be NaN."""
    assert one.SerializeToString(deterministic=True) == other.SerializeToString(
        deterministic=True
    ), (one, other)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        *(requests, responses, ring, peers, layout, answers, session, reducing),
        *(lanes, preambles, passing),
    )
}
"""By name; a folder of the corpus bears it."""
