"""Vectors that a receiver must accept: every case, every encoding, and unusual ones."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, layout_pb2, reducer_pb2, ring_pb2
from vectors.book import Vector, accepted
from vectors.bulk import average, gradient, node
from vectors.crc import with_checksums
from vectors.floats import BFLOAT16, FLOAT16, FLOAT32, Format
from vectors.names import KEY, PARENT
from vectors.raw import FIXED32, FIXED64, LENGTH, field, tag, varint
from vectors.samples import ENVELOPES, cases_of, layout, plan, samples
from vectors.session_samples import peer_frames
from vectors.strips import STRIP_FORMS
from vectors.topk import listed

__all__ = ["accepting"]

UP, DOWN = reducer_pb2.ReduceRequest, reducer_pb2.ReduceResponse
LARGEST = 4 * 2**20 - 64 * 2**10
"""Bytes of the largest payload."""
MAX_FIELDS = 1024
_CHECKED = {"block_gradient", "abstain", "averaged_block", "ring_header", "ring_chunk"}
_OTHERS = {"FLOAT64": 8, "INT32": 4, "INT64": 8, "UINT8": 1}


def accepting() -> Iterator[Vector]:
    """All of them, in the index's order."""
    known = samples()
    for name, message in known.items():
        yield accepted(name, message, "a message by itself, with all its fields")
    for envelope in ENVELOPES:
        for case, whole in cases_of(envelope, known).items():
            name = f"{envelope.DESCRIPTOR.name}.{case}"
            yield accepted(name, whole, f"the case {case}, with all its fields")
    for name, frame in peer_frames().items():
        yield accepted(f"PeerFrame.{name}", frame, "the head of a frame between ranks")
    yield from _control()
    yield from _checksums(known)
    yield from _nodes()
    yield from _encodings()
    yield from _not_finite()
    yield from _sizes()
    yield from _unusual()
    yield from _pieces()


def _checksums(known: dict[str, Message]) -> Iterator[Vector]:
    shows = "both checksums, of the fields alone and with the payload"
    for envelope in (UP, DOWN, ring_pb2.PassRequest):
        for case, whole in cases_of(envelope, known).items():
            if case in _CHECKED:
                assert isinstance(whole, UP | DOWN | ring_pb2.PassRequest)
                name = f"{envelope.DESCRIPTOR.name}.{case}.checksums"
                yield accepted(name, with_checksums(whole), shows)


def _nodes() -> Iterator[Vector]:
    """Contributions by node, whose weight may be 0."""
    whole = UP(block_gradient=gradient(node=node()))
    name = "ReduceRequest.block_gradient.node"
    yield accepted(name, whole, "the sum of a node of the tree")
    shows = "both checksums, whose header has the node"
    yield accepted(f"{name}.checksums", with_checksums(whole), shows)
    absent = gradient(node=node(first=10, grains=1), weight=0.0, payload=b"\0\0\0\x80" * 3)
    shows = "a node of weight 0: -0.0 in every element"
    yield accepted(f"{name}.weight-zero", UP(block_gradient=absent), shows)


def _control() -> Iterator[Vector]:
    fresh = pb.Join(
        run_id="7f3a",
        incarnation=1,
        protocol_version=1,
        layout=layout(),
        plan=pb.RunPlan(global_batch=64),
    )
    found = pb.Join(run_id="7f3a", incarnation=1, protocol_version=1, layout=layout(), plan=plan())
    up, down = pb.TrainRequest, pb.TrainResponse
    shows = "the least that a fresh worker says; the data's length is unknown"
    yield accepted("TrainRequest.join.fresh", up(join=fresh), shows)
    shows = "a launch slot of 0 is there; one that is absent is not 0"
    yield accepted("TrainRequest.join.no-slot", up(join=found), shows)
    found.launch_slot = 0
    yield accepted("TrainRequest.join.slot-zero", up(join=found), shows)
    yield accepted(
        "TrainRequest.heartbeat.empty",
        up(heartbeat=pb.Heartbeat()),
        "a case all of whose fields are at their defaults is there all the same",
    )
    lost = pb.StepReady(key=KEY, loss_sum=float("nan"), weight=16.0, samples=16)
    yield accepted(
        "TrainRequest.step_ready.nan-loss",
        up(step_ready=lost),
        "a loss that is NaN is accepted as a message; the line halts as NON_FINITE_LOSS",
        data=field(3, field(1, KEY.SerializeToString()) + tag(2, FIXED64) + _SIGNALLING + _REST),
        note="loss_sum is the signalling NaN 0x7ff0000000000001, bit for bit.",
    )
    unknown = "an unknown {}: enums that may grow do not make a message illegal"
    yield accepted(
        "TrainRequest.fault.unknown-kind",
        up(fault=pb.Fault(key=KEY, kind=99)),  # type: ignore[arg-type] # a later version's
        unknown.format("kind of fault is taken as PROTOCOL"),
    )
    yield accepted(
        "TrainRequest.leave.unknown-reason",
        up(leave=pb.Leave(reason=99)),  # type: ignore[arg-type] # a later version's
        unknown.format("reason to leave is taken as FAILED"),
    )
    yield accepted(
        "TrainRequest.heartbeat.unknown-activity",
        up(heartbeat=pb.Heartbeat(sequence=2, activity=99)),  # type: ignore[arg-type] # likewise
        unknown.format("activity is for people"),
    )
    later = halt_pb2.HaltEvidence(id=4, reason=99, step=118)  # type: ignore[arg-type] # likewise
    yield accepted(
        "TrainResponse.halt.unknown-reason",
        down(halt=pb.Halt(evidence=later)),
        unknown.format("reason of a halt is a halt"),
    )
    shows = "a case that is not known: a worker must ignore it"
    yield accepted("TrainResponse.unknown-case", down(), shows, data=field(99, b"later"))
    shows = "a case that is not known: a reducer must ignore it"
    yield accepted(
        "RegisterReducerResponse.unknown-case",
        pb.RegisterReducerResponse(),
        shows,
        data=field(99, b""),
    )
    assigned = pb.ShardAssignment(key=KEY, parent=PARENT, roster=[0], world_size=1, step=118)
    yield accepted(
        "TrainResponse.shard_assignment.no-positions",
        down(shard_assignment=assigned),
        "a rank without samples, rank 0 of one: it abstains",
    )


_SIGNALLING = (0x7FF0000000000001).to_bytes(8, "little")
_REST = tag(3, FIXED64) + bytes.fromhex("0000000000003040") + field(4, 16)


def _encodings() -> Iterator[Vector]:
    """Every encoding, both ways."""
    for form in (FLOAT32, FLOAT16, BFLOAT16):
        numbers = [form.of(1.0), form.of(-2.5), form.of(0.1), form.sign, 1]
        payload = form.pack(numbers)
        note = f"Payload: 1, -2.5, 0.1 rounded, -0 and the least subnormal, as {form.name}."
        yield from _both(form.name, payload, 5, reducer_pb2.OPERATION_WEIGHTED_MEAN, note)
    for strips in STRIP_FORMS:
        values = [FLOAT32.of(1.0), FLOAT32.of(-2.5), FLOAT32.of(0.1), FLOAT32.sign, 1]
        note = f"Payload: 1, -2.5, 0.1, -0 and the least subnormal, as {strips.name}: scale, codes."
        payload = strips.encode(values)
        yield from _both(strips.name, payload, 5, reducer_pb2.OPERATION_WEIGHTED_MEAN, note)
    values = [FLOAT32.of(1.0), FLOAT32.of(-2.5), FLOAT32.of(0.1), FLOAT32.sign, 1]
    note = "Payload: 1, -2.5, 0.1, -0 and the least subnormal, as TOPK: count, places, values, run."
    yield from _both("TOPK", listed(values), 5, reducer_pb2.OPERATION_WEIGHTED_MEAN, note)
    for name, size in _OTHERS.items():
        payload = bytes(range(size)) + b"\xff" * size
        note = "Not averaged by a reducer that offers means of floats only, but broadcast."
        yield from _both(name, payload, 2, reducer_pb2.OPERATION_BROADCAST, note)


def _both(name: str, payload: bytes, count: int, operation: int, note: str) -> Iterator[Vector]:
    fields = {
        "encoding": layout_pb2.Encoding.Value(f"ENCODING_{name}"),
        "operation": operation,
        "element_count": count,
        "payload": payload,
    }
    shows, short = f"the encoding {name}", name.lower()
    # Averages are not INT2_BLOCK.
    only_up = name == "INT2_BLOCK"
    more = {"answer_encoding": layout_pb2.ENCODING_INT4_BLOCK} if only_up else {}
    up = UP(block_gradient=gradient(rank=0, **fields, **more))
    yield accepted(f"ReduceRequest.block_gradient.{short}", up, shows, note=note)
    if only_up:
        return
    down = DOWN(averaged_block=average(**fields))
    yield accepted(f"ReduceResponse.averaged_block.{short}", down, shows, note=note)


def _not_finite() -> Iterator[Vector]:
    """The bits of NaN and infinities travel as they are."""
    for form in (FLOAT32, FLOAT16, BFLOAT16):
        numbers = _bits(form)
        digits = 2 * form.size_bytes
        note = "Payload, as bits: " + ", ".join(
            f"0x{bits:0{digits}x} ({what})" for what, bits in numbers.items()
        )
        encoding = layout_pb2.Encoding.Value(f"ENCODING_{form.name}")
        message = gradient(
            encoding=encoding,
            element_count=len(numbers),
            payload=form.pack(list(numbers.values())),
        )
        yield accepted(
            f"ReduceRequest.block_gradient.{form.name.lower()}-not-finite",
            UP(block_gradient=message),
            "NaN and infinities are accepted as bytes; a reducer answers NON_FINITE",
            note=note,
        )
    weight = field(2, _without_weight() + tag(10, FIXED64) + _SIGNALLING + _payload())
    yield accepted(
        "ReduceRequest.block_gradient.nan-weight",
        UP(block_gradient=gradient(weight=float("nan"))),
        "a weight that is NaN is accepted as a message; a reducer answers INCONSISTENT",
        data=weight,
        note="weight is the signalling NaN 0x7ff0000000000001, bit for bit.",
    )


def _bits(form: Format) -> dict[str, int]:
    quiet = 1 << (form.fraction_bits - 1)
    return {
        "a quiet NaN": form.infinity | quiet,
        "a signalling NaN": form.infinity | 1,
        "a negative NaN with bits of its own": form.sign | form.infinity | quiet | 5,
        "a NaN of all ones": form.sign | (form.sign - 1),
        "an infinity": form.infinity,
        "a negative infinity": form.sign | form.infinity,
        "the greatest finite number": form.infinity - 1,
    }


def _without_weight() -> bytes:
    part = gradient()
    part.ClearField("weight")
    part.ClearField("payload")
    return part.SerializeToString(deterministic=True)


def _payload() -> bytes:
    return field(15, gradient().payload)


def _sizes() -> Iterator[Vector]:
    where = reducer_pb2.SharedMemorySlice(offset=1772, length=12, generation=5)
    shows = "numbers in shared memory, which was offered and mapped before"
    up = UP(block_gradient=gradient(payload=None, slice=where))
    yield accepted("ReduceRequest.block_gradient.slice", up, shows)
    down = DOWN(averaged_block=average(sequence=1, payload=None, slice=where))
    yield accepted("ReduceResponse.averaged_block.slice", down, shows)
    nothing = average(
        contributors=0,
        block=0,
        element_offset=0,
        element_count=0,
        total_weight=0.0,
        payload=b"",
    )
    yield accepted(
        "ReduceResponse.averaged_block.all-abstained",
        DOWN(averaged_block=nothing),
        "no elements, no weight: every rank abstained, and this stands for zeros everywhere",
        note="payload is on the wire, with length 0.",
    )
    pattern = bytes.fromhex("0000803f000020c00000000000008080")
    large = gradient(
        element_offset=0, element_count=LARGEST // 4, payload=pattern * (LARGEST // 16)
    )
    vector = accepted(
        "ReduceRequest.block_gradient.largest",
        UP(block_gradient=gradient(element_offset=0, element_count=LARGEST // 4, payload=b"")),
        "the largest payload, 4 MiB - 64 KiB: the message is below gRPC's default limit",
        data=UP(block_gradient=large).SerializeToString(deterministic=True),
        note=f"payload, left out here, is {pattern.hex()} {LARGEST // 16} times.",
    )
    assert vector.fields is not None
    del vector.fields["blockGradient"]["payload"]
    yield vector


def _unusual() -> Iterator[Vector]:
    """What protobuf allows and few senders write."""
    whole = UP(block_gradient=gradient())
    body = gradient().SerializeToString(deterministic=True)
    head = body[: -len(_payload())]

    def up(name: str, shows: str, data: bytes, note: str = "") -> Vector:
        return accepted(f"ReduceRequest.{name}", whole, shows, data=data, note=note)

    yield up(
        "other-order",
        "the payload first and the key last: a receiver takes fields in any order",
        field(2, _payload() + _reversed(head)),
    )
    unknown = (
        field(99, 2**64 - 1)
        + tag(100, FIXED64)
        + bytes(8)
        + field(101, b"later")
        + tag(2**29 - 1, FIXED32)
        + bytes(4)
    )
    yield up(
        "unknown-fields",
        "fields that are not known, of wire types 0, 1, 2 and 5, inside and beside the message",
        unknown + field(2, unknown + body) + unknown,
    )
    yield up(
        "padding",
        "padding of a length of its own, which is ignored",
        field(2, head + field(13, b"\xff" * 21) + _payload()),
        "padding has 21 bytes; it says nothing, and is not shown here.",
    )
    yield up(
        "last-wins",
        "numbers that are there twice: the last counts",
        field(2, field(5, 7) + field(7, 1) + tag(10, FIXED64) + bytes(8) + body),
    )
    yield up(
        "parts",
        "the message in two parts, and its key in two: parts of a message are merged",
        field(2, field(1, tag(1, FIXED64) + KEY.term.to_bytes(8, "little")))
        + field(2, field(1, tag(2, FIXED64) + KEY.round.to_bytes(8, "little")) + _keyless(body)),
    )
    yield up(
        "last-case-wins",
        "two cases of the envelope, and two of the content: the last counts",
        field(3, b"") + field(2, head + field(14, field(1, 64)) + _payload()),
    )
    yield up(
        "long-varints",
        "varints in more bytes than they need",
        field(2, body + tag(5, 0) + varint(1, size=10)).replace(
            b"\x12", varint(2 << 3 | LENGTH, size=2), 1
        ),
    )
    fields = MAX_FIELDS - _count(body)
    yield up(
        "most-fields",
        f"{MAX_FIELDS} fields in one message, as many as there may be",
        field(2, field(99, 0) * fields + body),
    )
    terms = ring_pb2.PassRequest(
        ring_header=ring_pb2.RingHeader(key=KEY, rank=2),
    )
    yield accepted(
        "PassRequest.ring_header.nothing",
        terms,
        "a rank that gives nothing to an exchange of nothing: all meet",
    )


def _reversed(data: bytes) -> bytes:
    """The fields of a message in the opposite order."""
    return b"".join(reversed(_fields(data)))


def _keyless(data: bytes) -> bytes:
    return b"".join(_fields(data)[1:])


def _count(data: bytes) -> int:
    return len(_fields(data))


def _fields(data: bytes) -> list[bytes]:
    """A message cut into its fields; the sample has no tag or length beyond a byte."""
    cut, at = [], 0
    while at < len(data):
        wire_type = data[at] & 7
        end = at + 1
        if wire_type == FIXED64:
            end += 8
        elif wire_type == LENGTH:
            end += 1 + data[end]
        else:
            while data[end] > 0x7F:
                end += 1
            end += 1
        cut.append(data[at:end])
        at = end
    return cut


def _pieces() -> Iterator[Vector]:
    """The pieces of a state after the first."""
    shows = "a later piece of a state: a payload, and nothing else"
    put = reducer_pb2.PutStateRequest(payload=b"ate")
    yield accepted("PutStateRequest.piece", put, shows)
    yield accepted("GetStateResponse.piece", reducer_pb2.GetStateResponse(payload=b"ate"), shows)
    shows = "a later piece of a state that lies in the receiver's file"
    put = reducer_pb2.PutStateRequest(file_bytes=3)
    yield accepted("PutStateRequest.in_file", put, shows)
    yield accepted("GetStateResponse.in_file", reducer_pb2.GetStateResponse(file_bytes=3), shows)
    shows = "from the beginning: an offset of 0 is not on the wire"
    yield accepted("PutStateResponse.beginning", reducer_pb2.PutStateResponse(), shows)
