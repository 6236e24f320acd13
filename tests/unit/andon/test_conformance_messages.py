"""Golden messages: Andon's own receivers take and refuse what conformance/index.json says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, layout_pb2, record_pb2, reducer_pb2, ring_pb2, session_pb2
from andon.wire import conversion, layouts, sessions
from andon.wire.fields import FrameError
from andon.wire.frames import (
    batch_requests,
    batch_responses,
    frame_pass,
    frame_request,
    frame_response,
    parse_pass,
    parse_requests,
    parse_responses,
)
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import event_from, join_from
from andon_coordinator.transport.session_messages import attend_from, session_event_from
from andon_reducer.core.stream import ChunkLimits, StreamState
from andon_trainer.core.calls import Call
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.collector import Collector, OpenCall
from andon_trainer.exchange.control.translation import accepted_from
from andon_trainer.exchange.control.translation import event_from as heard_from
from andon_trainer.exchange.path import Inbox
from unit.andon.golden import FOLDER, golden, naming
from vectors.all import made

INDEX = golden("index", "vectors")
MODULES: tuple[Any, ...] = (
    *(pb, halt_pb2, layout_pb2, record_pb2),
    *(reducer_pb2, ring_pb2, session_pb2),
)
TYPES: dict[str, type[Message]] = {
    f"andon.v1.{name}": getattr(module, name)
    for module in MODULES
    for name in module.DESCRIPTOR.message_types_by_name
}
REFUSALS = (FrameError, LineError, conversion.WireError, JoinRefused, DecodeError)
LIMITS = ChunkLimits(max_payload_bytes=MAX_PAYLOAD_BYTES)
Receiver = Callable[[bytes], object]


def of(vector: dict[str, Any]) -> tuple[type[Message], bytes]:
    return TYPES[vector["type"]], (FOLDER / vector["file"]).read_bytes()


# Andon's receivers, by the type that they receive


def coordinator(data: bytes) -> object:
    message = pb.TrainRequest.FromString(data)
    return join_from(message) if message.HasField("join") else event_from(1, message)


def worker(data: bytes) -> object:
    message = pb.TrainResponse.FromString(data)
    return accepted_from(message) if message.HasField("join_accepted") else heard_from(message)


def sessions_coordinator(data: bytes) -> object:
    message = session_pb2.AttendRequest.FromString(data)
    if message.HasField("attend"):
        return attend_from(message, "10.0.0.1")
    return session_event_from(1, message)


def rank(data: bytes) -> object:
    message = session_pb2.AttendResponse.FromString(data)
    if message.HasField("formed"):
        return sessions.formed_from_proto(message.formed)
    return sessions.over_from_proto(message.over) if message.HasField("over") else message


def reducer(data: bytes) -> object:
    requests = parse_requests(data)
    for request in requests:
        if isinstance(request, BlockGradient | Abstain):
            refusal = StreamState(1, 1).refusal(request, LIMITS)
            if refusal is not None:
                raise FrameError(refusal.message)
    return requests


def collector(data: bytes) -> object:
    responses = parse_responses(data)
    layout = layout_pb2.Layout.FromString((FOLDER / "messages/Layout.binpb").read_bytes())
    collects = Collector(layouts.layout_from_proto(layout), Inbox())
    for response in responses:
        if isinstance(response, AveragedBlock) and response.sequence == 0:
            call = Call(name="step", blocks=range(4))
            current = OpenCall(response.key, 1, response.world_size, 32.0, call, missing=443)
            collects.begin(current)
            collects.receive(response)
    return responses


RECEIVERS: dict[str, Receiver] = {
    "andon.v1.TrainRequest": coordinator,
    "andon.v1.TrainResponse": worker,
    "andon.v1.AttendRequest": sessions_coordinator,
    "andon.v1.AttendResponse": rank,
    "andon.v1.ReduceRequest": reducer,
    "andon.v1.ReduceResponse": collector,
    "andon.v1.PassRequest": parse_pass,
}


def receiver_of(name: str) -> Receiver:
    """Andon's own; else generated code, and that a oneof has a case, as its services look."""
    kind = TYPES[name]

    def read(data: bytes) -> object:
        message = kind.FromString(data)
        if name == "andon.v1.RegisterReducerRequest" and message.WhichOneof("message") is None:
            raise LineError(Reason.INVALID_MESSAGE, "a case that is not known")
        return message

    return RECEIVERS.get(name, read)


def test_c_wire_002_a_receiver_does_what_the_index_says() -> None:
    for vector in INDEX:
        _, data = of(vector)
        receive = receiver_of(vector["type"])

        with naming(vector):
            if vector["verdict"] == "accept":
                receive(data)
            else:
                with pytest.raises(REFUSALS):
                    receive(data)


def test_the_index_is_true_of_its_files() -> None:
    for vector in INDEX:
        kind, data = of(vector)

        with naming(vector):
            assert hashlib.sha256(data).hexdigest() == vector["sha256"]
            assert len(data) == vector["size"]
            assert ("why" in vector) == (vector["verdict"] == "refuse")
            if vector["generated_code"] == "reads":
                kind.FromString(data)
            else:
                with pytest.raises(DecodeError):
                    kind.FromString(data)


def test_the_readable_form_is_the_message() -> None:
    for vector in INDEX:
        if vector["generated_code"] == "reads":
            with naming(vector):
                _check_readable_form(vector)


def _check_readable_form(vector: dict[str, Any]) -> None:
    kind, data = of(vector)
    readable = json.loads((FOLDER / vector["file"]).with_suffix(".json").read_text("utf-8"))
    if "message" not in readable or vector["name"] == "ReduceRequest.block_gradient.largest":
        assert readable["note"]
        return

    theirs = kind.FromString(data)
    theirs.DiscardUnknownFields()
    for _, body in theirs.ListFields():
        if "padding" in vector["name"]:
            body.ClearField("padding")

    again = json_format.MessageToDict(theirs)
    assert again == readable["message"]
    assert readable["type"] == vector["type"]


def is_of_the_data_plane(vector: dict[str, Any]) -> bool:
    data_plane = ("andon.v1.ReduceRequest", "andon.v1.ReduceResponse", "andon.v1.PassRequest")
    return vector["verdict"] == "accept" and vector["type"] in data_plane


def test_c_wire_002_frames_say_what_protobuf_says() -> None:
    vectors = [vector for vector in INDEX if is_of_the_data_plane(vector)]

    assert vectors
    for vector in vectors:
        with naming(vector):
            _check_frames(vector)


def _check_frames(vector: dict[str, Any]) -> None:
    kind, data = of(vector)
    checked = vector["name"].endswith(".checksums")
    if vector["type"] == "andon.v1.ReduceRequest":
        up = parse_requests(data)
        again = batch_requests([frame_request(each, checksums=checked) for each in up])
    elif vector["type"] == "andon.v1.ReduceResponse":
        down = parse_responses(data)
        again = batch_responses([frame_response(each, checksums=checked) for each in down])
    else:
        again = frame_pass(parse_pass(data), checksums=checked)

    mine, theirs = kind.FromString(again), kind.FromString(data)
    theirs.DiscardUnknownFields()
    for message in (mine, theirs):
        _unpad(message)
    # As bytes: a weight may be NaN.
    assert mine.SerializeToString() == theirs.SerializeToString()


def _unpad(message: Message) -> None:
    """Takes out padding, which is the sender's choice."""
    for field, value in message.ListFields():
        if field.name == "padding":
            message.ClearField("padding")
        elif field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                _unpad(part)


def test_every_message_and_every_field_is_in_a_vector() -> None:
    seen: set[str] = set()
    for vector in INDEX:
        if vector["verdict"] == "accept":
            kind, data = of(vector)
            _note(kind.FromString(data), seen)

    defined = {
        f"{message.full_name}.{field.name}"
        for module in MODULES
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    assert defined - seen == set(), "give it a sample in tests/vectors, then `make vectors`"


def _note(message: Message, seen: set[str]) -> None:
    for field, value in message.ListFields():
        seen.add(f"{message.DESCRIPTOR.full_name}.{field.name}")
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in [value] if isinstance(value, Message) else value:
                _note(part, seen)


def test_every_case_of_every_envelope_is_a_vector() -> None:
    names = {vector["name"] for vector in INDEX if vector["verdict"] == "accept"}

    for kind in TYPES.values():
        for oneof in kind.DESCRIPTOR.oneofs:
            if oneof.name == "message":
                cases = {f"{kind.DESCRIPTOR.name}.{field.name}" for field in oneof.fields}
                assert cases <= names


def test_a_vector_of_the_largest_payload_is_below_the_limit_of_grpc() -> None:
    (largest,) = (each for each in INDEX if each["name"].endswith("largest"))

    (gradient,) = parse_requests((FOLDER / largest["file"]).read_bytes())

    assert isinstance(gradient, BlockGradient)
    assert gradient.payload.nbytes == MAX_PAYLOAD_BYTES
    assert largest["size"] < 4 * 2**20
    assert gradient.key == Key(0x65A1B2C3_00000007, 9)


def test_the_vectors_are_those_that_are_made() -> None:
    files = made()
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("messages/*")}
    stale = {name for name, data in files.items() if (FOLDER / name).read_bytes() != data}

    assert not stale, "run `make vectors`"
    assert there <= files.keys(), "run `make vectors`"
