"""Vectors that a receiver must refuse: malformed bytes, and illegal messages."""

from __future__ import annotations

from collections.abc import Iterator

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, record_pb2, reducer_pb2, ring_pb2
from vectors.book import Vector, refused
from vectors.bulk import average, gradient, node
from vectors.crc import with_checksums
from vectors.names import KEY
from vectors.raw import FIXED32, FIXED64, LENGTH, VARINT, delimited, field, tag, varint
from vectors.samples import samples

__all__ = ["refusing"]

UP, DOWN, PASS = (
    reducer_pb2.ReduceRequest,
    reducer_pb2.ReduceResponse,
    ring_pb2.PassRequest,
)
_TOO_MANY = 1025


def refusing() -> Iterator[Vector]:
    """All of them, in the index's order."""
    yield from _malformed()
    yield from _impossible_gradients()
    yield from _impossible_answers()
    yield from _batches()
    yield from _ring()
    yield from _changed()
    yield from _control_up()
    yield from _control_down()
    yield from _others()


def _gradient() -> bytes:
    return gradient().SerializeToString(deterministic=True)


def _malformed() -> Iterator[Vector]:
    """Bytes that are no message of the data plane; most hold for any of its messages."""
    body = _gradient()
    whole = field(2, body)
    bad: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "it holds no case"),
        "unknown-case": (field(99, b"later"), "its case is not known"),
        "cut-in-a-tag": (b"\x92", "a varint is cut short"),
        "cut-in-a-length": (b"\x12\x80", "a varint is cut short"),
        "cut-in-a-payload": (whole[:-1], "a field is cut short"),
        "cut-in-a-key": (field(2, body[:9]), "a field is cut short"),
        "cut-in-a-double": (
            field(2, field(1, b"") + tag(10, FIXED64) + bytes(7)),
            "a field is cut short",
        ),
        "case-as-varint": (field(2, 1), "a message has wire type 0"),
        "case-as-fixed64": (tag(2, FIXED64) + bytes(8), "a message has wire type 1"),
        "key-as-varint": (field(2, field(1, 1) + body[20:]), "a key has wire type 0"),
        "rank-as-bytes": (field(2, body + field(5, b"\1")), "a number has wire type 2"),
        "rank-as-fixed32": (field(2, body + tag(5, FIXED32) + bytes(4)), "a number as fixed32"),
        "weight-as-varint": (field(2, body + field(10, 1)), "a double has wire type 0"),
        "payload-as-varint": (field(2, body + field(15, 1)), "bytes have wire type 0"),
        "group-begins": (tag(2, 3) + body + tag(2, 4), "groups are not used"),
        "group-inside": (field(2, body + tag(99, 3) + tag(99, 4)), "groups are not used"),
        "group-ends": (field(2, body + tag(5, 4)), "groups are not used"),
        "wire-type-6": (field(2, body + tag(99, 6)), "there is no wire type 6"),
        "wire-type-7": (field(2, body + tag(99, 7)), "there is no wire type 7"),
        "field-zero": (b"\x02\x00" + whole, "there is no field 0"),
        "field-beyond": (varint(2**29 << 3) + b"\0" + whole, "fields are below 2^29"),
        "varint-of-65-bits": (
            field(2, body + tag(9, VARINT) + b"\xff" * 9 + b"\x02"),
            "a varint is longer than 64 bits",
        ),
        "varint-of-11-bytes": (
            field(2, body + tag(9, VARINT) + b"\x80" * 10 + b"\0"),
            "a varint is longer than 64 bits",
        ),
        "length-beyond": (b"\x12" + varint(len(body) + 1) + body, "longer than what is there"),
        "length-of-2-to-63": (b"\x12" + varint(2**63) + body, "longer than what is there"),
        "length-of-2-to-64-less-1": (
            field(2, body + tag(15, LENGTH) + varint(2**64 - 1)),
            "longer than what is there; end of field wraps",
        ),
        "rank-of-33-bits": (field(2, body + field(5, 2**32)), "a rank has 32 bits"),
        "too-many-fields": (
            field(2, field(99, 0) * (_TOO_MANY - 10) + body),
            "a message has 1024 fields at most",
        ),
        "too-many-parts": (field(2, b"") * _TOO_MANY, "a message has 1024 fields at most"),
    }
    for name, (data, why) in bad.items():
        yield refused(f"ReduceRequest.bad.{name}", UP, f"malformed: {name}", why, data=data)
    answer = average().SerializeToString(deterministic=True)
    down = {
        "empty": (b"", "it holds no case"),
        "unknown-case": (field(99, b"later"), "its case is not known; the round can't be followed"),
        "cut": (field(2, answer)[:-1], "a field is cut short"),
        "group": (field(2, answer + tag(99, 3) + tag(99, 4)), "groups are not used"),
        "payload-as-varint": (field(2, answer + field(15, 1)), "bytes have wire type 0"),
    }
    for name, (data, why) in down.items():
        yield refused(f"ReduceResponse.bad.{name}", DOWN, f"malformed: {name}", why, data=data)


def _impossible_gradients() -> Iterator[Vector]:
    """Well-formed messages up that can't be."""

    def up(name: str, why: str, **fields: object) -> Vector:
        message = UP(block_gradient=gradient(**fields))
        return refused(f"ReduceRequest.bad.{name}", message, why, why)

    yield up("no-key", "a contribution names its round", key=None)
    yield up("key-of-term-zero", "no coordinator has the term 0", key=record_pb2.Key(round=9))
    yield up("no-operation", "the operation must be said", operation=0)
    yield up("unknown-operation", "operation 77 is not known", operation=77)
    yield up("negative-operation", "operation -1 is not known", operation=-1)
    yield up("operation-not-offered", "a reducer refuses what it does not offer", operation=2)
    yield up("no-encoding", "the encoding must be said", encoding=0)
    yield up("unknown-encoding", "encoding 77 is not known", encoding=77)
    yield up("unknown-answer-encoding", "encoding 77 is not known", answer_encoding=77)
    yield up(
        "mean-of-integers",
        "a reducer refuses means that it does not offer",
        encoding=layout_pb2.ENCODING_INT32,
    )
    yield up("node-without-grains", "a node has grains", node=node(grains=0))
    yield up("node-beyond-the-batch", "grain 12 of a batch of 11", node=node(first=8))
    yield up("node-of-no-positions", "a grain has positions", node=node(grain=0))
    yield up("node-without-mean", "only a mean is added along the tree", node=node(), operation=6)
    yield up(
        "node-not-float32",
        "nodes are float32",
        node=node(),
        encoding=layout_pb2.ENCODING_BFLOAT16,
        payload=bytes(6),
    )
    yield up("node-in-a-group", "nodes are of the whole roster", node=node(), group=2)
    yield up("no-payload", "3 elements and no content", payload=None)
    yield up("payload-too-short", "11 bytes are not 3 float32", payload=bytes(11))
    yield up("payload-too-long", "16 bytes are not 3 float32", payload=bytes(16))
    yield up("count-wraps", "2^62 + 3 elements of 4 bytes are not 12", element_count=2**62 + 3)
    yield up("no-elements", "a chunk has elements", element_count=0, payload=b"")
    yield up("offset-wraps", "the chunk's end is beyond 2^64", element_offset=2**64 - 1)
    yield up("offset-beyond", "a model has at most 2^48 elements", element_offset=2**48 - 2)
    yield up("rank-beyond", "there is no rank 2 of 2", rank=2)
    yield up(
        "slice-too-short",
        "a slice of 8 bytes is not 3 float32",
        payload=None,
        slice=reducer_pb2.SharedMemorySlice(length=8, generation=1),
    )
    message = UP(abstain=reducer_pb2.Abstain(key=KEY, rank=5, world_size=2))
    yield refused("ReduceRequest.bad.abstain-rank-beyond", message, "rank 5 of 2", "no such rank")


def _impossible_answers() -> Iterator[Vector]:
    """Well-formed messages down that can't be, for the sample's layout."""

    def down(name: str, why: str, **fields: object) -> Vector:
        message = DOWN(averaged_block=average(**fields))
        return refused(f"ReduceResponse.bad.{name}", message, why, why)

    yield down("no-key", "an average names its round", key=None)
    yield down("unknown-encoding", "encoding 77 is not known", encoding=77)
    yield down("payload-too-short", "11 bytes are not 3 float32", payload=bytes(11))
    yield down("offset-wraps", "the chunk's end is beyond 2^64", element_offset=2**64 - 1)
    yield down("offset-beyond", "block 3 of the sample's layout ends at 402", element_offset=400)


def _batches() -> Iterator[Vector]:
    def batch(case: bytes, number: int) -> bytes:
        return field(number, field(1, case))

    known = samples()
    up, down = field(2, _gradient()), field(2, average().SerializeToString(deterministic=True))
    opening = field(1, known["OpenRound"].SerializeToString(deterministic=True))
    opened = field(1, known["RoundOpened"].SerializeToString(deterministic=True))
    bad = {
        "batch-in-a-batch": (UP, batch(batch(up, 5), 5), "a batch holds no batch"),
        "opening-in-a-batch": (UP, batch(opening, 5), "OpenRound is the first message, alone"),
        "batch-and-more": (UP, batch(up, 5) + up, "a batch has no other field beside it"),
        "more-and-batch": (UP, up + batch(up, 5), "a batch has no other field beside it"),
        "batch-of-bad": (UP, batch(up[:-1], 5), "a field is cut short"),
        "batch-of-numbers": (UP, field(5, field(1, 1)), "a message has wire type 0"),
        "batch-too-long": (UP, field(5, field(1, up) * _TOO_MANY), "1024 messages at most"),
    }
    for name, (kind, data, why) in bad.items():
        yield refused(f"ReduceRequest.bad.{name}", kind, name, why, data=data)
    answers = {
        "batch-in-a-batch": (batch(batch(down, 6), 6), "a batch holds no batch"),
        "opened-in-a-batch": (batch(opened, 6), "RoundOpened is the first answer, alone"),
    }
    for name, (data, why) in answers.items():
        yield refused(f"ReduceResponse.bad.{name}", DOWN, name, why, data=data)


def _ring() -> Iterator[Vector]:
    chunk = samples()["RingChunk"]
    assert isinstance(chunk, ring_pb2.RingChunk)

    def ring(name: str, why: str, **fields: object) -> Vector:
        changed = ring_pb2.RingChunk()
        changed.CopyFrom(chunk)
        for each, value in fields.items():
            changed.ClearField(each)
            changed.MergeFrom(ring_pb2.RingChunk(**{each: value}))  # type: ignore[arg-type] # likewise
        return refused(f"PassRequest.bad.{name}", PASS(ring_chunk=changed), why, why)

    yield ring("unknown-stage", "stage 77 is not known", stage=77)
    yield ring("no-stage", "the stage must be said", stage=0)
    yield ring("unknown-encoding", "encoding 77 is not known", encoding=77)
    yield ring("payload-too-short", "7 bytes are not 2 float32", payload=bytes(7))
    yield ring("no-key", "a chunk names its round", key=None)
    data = field(3, chunk.SerializeToString(deterministic=True))
    bad = {
        "empty": (b"", "it holds no case"),
        "unknown-case": (field(99, b"later"), "its case is not known"),
        "cut": (data[:-1], "a field is cut short"),
        "group": (data + tag(99, 3) + tag(99, 4), "groups are not used"),
        "case-as-varint": (field(3, 1), "a message has wire type 0"),
    }
    for name, (bad_data, why) in bad.items():
        yield refused(f"PassRequest.bad.{name}", PASS, name, why, data=bad_data)


def _changed() -> Iterator[Vector]:
    """Messages of which a bit flipped on the way."""
    known = samples()
    why = "it does not match its header_crc32c"
    chunk, terms = known["RingChunk"], known["RingHeader"]
    assert isinstance(chunk, ring_pb2.RingChunk)
    assert isinstance(terms, ring_pb2.RingHeader)
    up = with_checksums(UP(block_gradient=gradient()))
    up.block_gradient.block ^= 1
    yield refused("ReduceRequest.bad.changed-block", up, "another block than was sent", why)
    up = with_checksums(UP(block_gradient=gradient()))
    up.block_gradient.key.round ^= 1
    yield refused("ReduceRequest.bad.changed-key", up, "another round than was sent", why)
    passed = with_checksums(PASS(ring_chunk=chunk))
    passed.ring_chunk.element_offset ^= 4
    yield refused("PassRequest.bad.changed-offset", passed, "another place than was sent", why)
    passed = with_checksums(PASS(ring_header=terms))
    passed.ring_header.weight = 17.0
    yield refused("PassRequest.bad.changed-weight", passed, "another weight than was sent", why)


def _control_up() -> Iterator[Vector]:
    whole = samples()["Join"]
    assert isinstance(whole, pb.Join)

    def join(name: str, why: str, change: pb.Join) -> Vector:
        changed = pb.Join()
        changed.CopyFrom(whole)
        for each, _ in change.ListFields():
            changed.ClearField(each.name)
        changed.MergeFrom(change)
        return refused(f"TrainRequest.bad.{name}", pb.TrainRequest(join=changed), why, why)

    layout = layout_pb2.Layout()
    layout.CopyFrom(whole.layout)
    layout.digest = bytes(32)
    yield join("digest-of-another-layout", "the digest is not the blocks'", pb.Join(layout=layout))
    doubled = layout_pb2.Layout(blocks=[*whole.layout.blocks, whole.layout.blocks[0]])
    yield join("doubled-name", "names are unique in a layout", pb.Join(layout=doubled))
    typed = layout_pb2.Layout(
        blocks=[
            layout_pb2.Block(
                kind=layout_pb2.BLOCK_KIND_OTHER,
                name="w",
                components=[layout_pb2.Component(name="w", shape=[1], dtype=77)],  # type: ignore[arg-type]
            )
        ]
    )
    yield join("unknown-dtype", "type 77 is not known", pb.Join(layout=typed))
    yield join("batch-of-nothing", "a step has samples", pb.Join(plan=pb.RunPlan(dataset_size=9)))
    keyed = pb.Join(head=record_pb2.Key(round=9))
    yield join("head-of-term-zero", "no coordinator has the term 0", keyed)

    def up(name: str, why: str, message: pb.TrainRequest) -> Vector:
        return refused(f"TrainRequest.bad.{name}", message, why, why)

    unready = pb.StepReady(loss_sum=1.0, weight=1.0)
    yield up("ready-for-nothing", "it names no round", pb.TrainRequest(step_ready=unready))
    digest = pb.WeightsDigest(head=KEY, sha256=bytes(31))
    left = pb.Leave(reason=pb.LEAVE_REASON_COMPLETE, digest=digest)
    yield up("digest-of-31-bytes", "a digest has 32 bytes", pb.TrainRequest(leave=left))
    digest = pb.WeightsDigest(head=KEY, sha256=bytes(32), prefixes=bytes(9))
    last = pb.TrainRequest(scalar_all_reduce=pb.ScalarAllReduce(head=KEY, digest=digest))
    yield up("prefixes-of-9-bytes", "a prefix of a digest has 8 bytes", last)
    away = pb.RequestWork(head=KEY, ring_address="nowhere")
    yield up("address-without-port", "an address is host:port", pb.TrainRequest(request_work=away))
    data = pb.TrainRequest(join=whole).SerializeToString(deterministic=True)
    bad = {
        "empty": (b"", "it holds no case"),
        "unknown-case": (field(99, b"later"), "its case is not known"),
        "cut": (data[:-1], "a field is cut short"),
        "not-utf-8": (field(4, field(7, b"\xff")), "texts are UTF-8"),
        "length-of-2-to-63": (b"\x0a" + varint(2**63), "longer than what is there"),
    }
    for name, (bad_data, why) in bad.items():
        yield refused(f"TrainRequest.bad.{name}", pb.TrainRequest, name, why, data=bad_data)


def _control_down() -> Iterator[Vector]:
    known = samples()

    def down(name: str, why: str, message: pb.TrainResponse) -> Vector:
        return refused(f"TrainResponse.bad.{name}", message, why, why)

    accepted, assigned = known["JoinAccepted"], known["ShardAssignment"]
    transfer, committed = known["StateTransfer"], known["StepCommitted"]
    assert isinstance(accepted, pb.JoinAccepted)
    assert isinstance(assigned, pb.ShardAssignment)
    assert isinstance(transfer, pb.StateTransfer)
    assert isinstance(committed, pb.StepCommitted)
    accepted.join_status = 77  # type: ignore[assignment] # a later version's
    why = "a join status that is not known: another version of the protocol"
    yield down("unknown-join-status", why, pb.TrainResponse(join_accepted=accepted))
    accepted.join_status = pb.JOIN_STATUS_IN_SYNC
    accepted.policy.encoding = 77  # type: ignore[assignment] # likewise
    message = pb.TrainResponse(join_accepted=accepted)
    yield down("unknown-encoding", "encoding 77 is not known", message)
    accepted.policy.encoding = layout_pb2.ENCODING_FLOAT32
    accepted.policy.topology = 77  # type: ignore[assignment] # likewise
    why = "a topology that is not known: a worker must not work on this line"
    yield down("unknown-topology", why, pb.TrainResponse(join_accepted=accepted))
    accepted.policy.topology = ring_pb2.TOPOLOGY_STAR
    accepted.policy.chunk_elements = 2**20
    why = "chunks of 4 MiB are above the largest payload"
    yield down("chunks-too-large", why, pb.TrainResponse(join_accepted=accepted))
    assigned.positions[0].stop = 1
    why = "a range that ends before it starts"
    yield down("range-backwards", why, pb.TrainResponse(shard_assignment=assigned))
    unnamed = pb.ShardAssignment(parent=KEY, world_size=1)
    yield down("no-key", "it names no round", pb.TrainResponse(shard_assignment=unnamed))
    transfer.role = 77  # type: ignore[assignment] # likewise
    why = "an end of a transfer that is not known: another version of the protocol"
    yield down("unknown-role", why, pb.TrainResponse(state_transfer=transfer))
    committed.record.kind = 77  # type: ignore[assignment] # likewise
    why = "a kind of record that is not known: another version of the protocol"
    yield down("unknown-record", why, pb.TrainResponse(step_committed=committed))
    committed.record.kind = record_pb2.RECORD_KIND_STEP
    committed.record.parent.round = 10
    why = "a record that does not come after its parent"
    yield down("parent-after-record", why, pb.TrainResponse(step_committed=committed))
    halt = pb.TrainResponse(halt=pb.Halt())
    yield down("halt-without-evidence", "a halt has an id and a reason", halt)
    data = tag(5, LENGTH) + delimited(b"the line halts")[:-1]
    yield refused(
        "TrainResponse.bad.cut", pb.TrainResponse, "cut", "a field is cut short", data=data
    )


def _others() -> Iterator[Vector]:
    bad = {"empty": b"", "unknown-case": field(99, b"later")}
    for name, data in bad.items():
        why = "its case is not known" if data else "it holds no case"
        yield refused(
            f"RegisterReducerRequest.bad.{name}", pb.RegisterReducerRequest, name, why, data=data
        )
    messages = (
        pb.ClearHaltRequest,
        reducer_pb2.PutStateRequest,
        reducer_pb2.GetStateRequest,
    )
    for message in messages:
        name = message.DESCRIPTOR.name
        data = tag(1, LENGTH) + delimited(b"7f3a")[:-1]
        yield refused(f"{name}.bad.cut", message, "cut", "a field is cut short", data=data)
