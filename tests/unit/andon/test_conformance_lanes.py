"""The lane's vectors, its page, and Andon's own code say the same bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.protobuf.message import Message

from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.messages import OpenRound, RoundOpened, SharedMemoryMapped
from andon.tcp.framing import PREFIX_BYTES, prefixed, read_prefix
from andon.tcp.proof import (
    LaneDirection,
    LaneSession,
    answer_of,
    is_answer,
    is_claim,
    preamble,
    read_preamble,
)
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire.frames import (
    FrameError,
    parse_pass,
    parse_pass_head,
    parse_request,
    parse_request_head,
    parse_response,
    parse_response_head,
    split_pass,
    split_request,
    split_response,
    with_payload,
)
from unit.andon.golden import FOLDER, by_name, golden

VECTORS = {name: golden("tcp", name) for name in ("proofs", "frames", "refused")}
TYPES: dict[str, type[Message]] = {
    each.DESCRIPTOR.full_name: each
    for each in (reducer_pb2.ReduceRequest, reducer_pb2.ReduceResponse, ring_pb2.PassRequest)
}
PARSERS: dict[str, tuple[Any, Any, Any]] = {
    "andon.v1.ReduceRequest": (parse_request, parse_request_head, split_request),
    "andon.v1.ReduceResponse": (parse_response, parse_response_head, split_response),
    "andon.v1.PassRequest": (parse_pass, parse_pass_head, split_pass),
}


def test_the_examples_of_the_page_are_vectors() -> None:
    text = (FOLDER.parent / "docs/tcp-lane.md").read_text("utf-8")
    quoted = [re.sub(r"\s", "", block) for block in re.findall(r"```text\n([0-9a-f\s]+?)```", text)]
    first = VECTORS["proofs"][0]

    assert quoted == [
        first["nonce"],
        first["preamble"] + first["answer"],
        VECTORS["frames"][0]["frame"],
    ]


def test_a_frame_has_the_bytes_of_the_message_on_grpc() -> None:
    for vector in VECTORS["frames"]:
        data = bytes.fromhex(vector["frame"])
        head_bytes, payload_bytes = vector["head_bytes"], vector["payload_bytes"]
        whole: Any = TYPES[vector["type"]].FromString(bytes.fromhex(vector["message"]))
        read: Any = TYPES[vector["type"]].FromString(data[8 : 8 + head_bytes])

        case = read.WhichOneof("message")
        if payload_bytes or "payload" in whole.ListFields()[0][1].DESCRIPTOR.fields_by_name:
            getattr(read, case).payload = data[8 + head_bytes :]

        assert len(data) == 8 + head_bytes + payload_bytes
        assert read == whole, vector["name"]


@pytest.mark.parametrize("vector", VECTORS["proofs"], ids=by_name)
def test_andons_preambles_and_answers_are_the_vectors(vector: dict[str, Any]) -> None:
    key, nonce = bytes.fromhex(vector["key"]), bytes.fromhex(vector["nonce"])
    session = LaneSession(key, vector["run_id"], vector["worker"])
    direction = LaneDirection(vector["direction"])
    data, answer = bytes.fromhex(vector["preamble"]), bytes.fromhex(vector["answer"])

    index = vector["index"]

    assert preamble(session, nonce, direction, index) == data
    assert answer_of(session, nonce, direction, index) == answer
    assert is_claim(session, nonce, read_preamble(data))
    assert is_answer(session, nonce, direction, answer, index)


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=by_name)
def test_andon_takes_the_frames_of_the_vectors_as_the_same_messages(vector: dict[str, Any]) -> None:
    parse, parse_head, split = PARSERS[vector["type"]]
    data = memoryview(bytes.fromhex(vector["frame"]))

    head_bytes, payload_bytes = read_prefix(bytes(data[:PREFIX_BYTES]), MAX_PAYLOAD_BYTES)
    head = data[PREFIX_BYTES : PREFIX_BYTES + head_bytes]
    message = with_payload(parse_head(head, payload_bytes), data[PREFIX_BYTES + head_bytes :])

    assert message == parse(bytes.fromhex(vector["message"]))
    mine, payload = split(message, checksums="checksum" in vector["name"])
    if "padding" not in _fields_of(vector["type"], bytes(head)):
        assert prefixed(mine, payload) + bytes(payload or b"") == bytes(data)


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=by_name)
def test_andon_refuses_the_frames_that_the_vectors_forbid(vector: dict[str, Any]) -> None:
    _, parse_head, _ = PARSERS[vector["type"]]
    data = memoryview(bytes.fromhex(vector["frame"]))

    try:
        head_bytes, payload_bytes = read_prefix(bytes(data[:PREFIX_BYTES]), MAX_PAYLOAD_BYTES)
        message = parse_head(data[PREFIX_BYTES : PREFIX_BYTES + head_bytes], payload_bytes)
    except FrameError:
        return
    # What a stream forbids, and not a frame: a second opening, and memory that nobody offered.
    assert isinstance(message, OpenRound | RoundOpened | SharedMemoryMapped)


def _fields_of(name: str, head: bytes) -> set[str]:
    """The names of the fields that a head's message has."""
    whole: Any = TYPES[name].FromString(head)
    content = getattr(whole, whole.WhichOneof("message"))
    return {field.name for field, _ in content.ListFields()}
