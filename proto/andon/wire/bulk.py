"""Bulk messages: the header by generated code, the payload as a view of what was received.

Theory of operation: generated code copies a payload several times, so it never sees one. A message
of the bulk is a wrapper (`ReduceRequest`, `ReduceResponse`, `PassRequest`) around one case of its
oneof, and a payload is the last field of its case:

    case's tag, length | header | padding | payload's tag, length | payload | checksums

To write, generated code serializes the header, which is joined with the payload. A field whose
number is above the payload's comes after the padding, where generated code has it. To read, the
payload's tag is looked for, and generated code parses the bytes before it. Serialized again, they
must be the bytes that came: then they are a whole message, each field in order and legal. Any other
message is legal as well if the walk of `andon.wire.schema` finds nothing wrong; if its payload is
not last, or if it came in parts, generated code parses all of it, which costs copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from andon.wire.fields import (
    FIXED32,
    LENGTH,
    FrameError,
    length_prefixed,
    read_fields,
    read_varint,
    varint,
)
from andon.wire.schema import Schema

__all__ = ["Envelope", "Received"]

_ALIGNMENT = 16
"""A payload begins at a multiple of so many bytes, so that its numbers can be read in place."""

_PADDING, _PAYLOAD = 13, 15
_PADDING_TAG, _PAYLOAD_TAG = varint(_PADDING << 3 | LENGTH), varint(_PAYLOAD << 3 | LENGTH)
_EMPTY_PADDING_BYTES = len(_PADDING_TAG) + 1
"""What a padding field without content takes: its tag and its length."""

_CHECKSUMS = (14, 15)
"""Numbers of a wrapper's checksums: of the header, and of the whole chunk."""

_CANONICAL_BYTES = 256
"""A header of a chunk is shorter. One that is longer is walked over before it is parsed."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message as it was read, not yet converted to its plain value."""

    message: Any
    """The case of the wrapper's oneof, made by generated code, without its payload."""
    payload: memoryview | None
    """None if the message came without one."""
    header_crc32c: int | None
    crc32c: int | None


class Envelope:
    """Reads and writes the messages of one wrapper."""

    def __init__(self, wrapper: type[Message], *, always_padded: bool = False) -> None:
        """Takes the cases of the wrapper's oneof `message`; one named `batch` is refused.

        If `always_padded`, a payload has a padding field before it even if that is empty.
        """
        self._name = wrapper.DESCRIPTOR.name
        self._first_padding = _EMPTY_PADDING_BYTES if always_padded else 0
        cases: Sequence[Any] = wrapper.DESCRIPTOR.oneofs_by_name["message"].fields
        self._batch = next((each.number for each in cases if each.name == "batch"), 0)
        self._cases = {
            each.number: _Case(each.number, each.message_type)
            for each in cases
            if each.name != "batch"
        }
        self._tags = {case.generated: case.tag for case in self._cases.values()}
        self._behind_padding = {
            case.generated: tuple(each.name for each in fields if each.number > _PAYLOAD)
            for case in self._cases.values()
            if (fields := case.generated.DESCRIPTOR.fields)
        }

    def read(self, data: bytes | memoryview) -> Received:
        """The message in a wrapper's bytes. A payload that is the last field is a view of `data`.

        Raises:
            FrameError: the bytes are not such a message, or break a rule of the protocol.
        """
        checksums: dict[int, int] = {}
        case, parts = self._parts_of(memoryview(data), checksums)
        message, payload = case.read(parts)
        return Received(message, payload, *map(checksums.get, _CHECKSUMS))

    def write(
        self, header: Message, payload: memoryview | None = None, checksums: bytes = b""
    ) -> bytes:
        """A wrapper's bytes, with the payload at a multiple of 16 bytes.

        Args:
            header: the case of the oneof, without its padding and payload; it may get a padding.
            payload: None for a message without one.
            checksums: the fields that follow the message in its wrapper.
        """
        if payload is None:
            return self.write_head(header, checksums)
        tag, body = self._tags[type(header)], header.SerializeToString()
        payload_head = _PAYLOAD_TAG + varint(payload.nbytes)
        rest = len(body) + len(payload_head) + payload.nbytes
        padding = self._first_padding
        head = tag + varint(rest + padding)
        # The length in `head` counts the padding, and may grow by a byte because of it.
        while missing := -(len(head) + len(body) + padding + len(payload_head)) % _ALIGNMENT:
            padding += missing
            # A field can't take one byte, and generated code leaves out one of two, which is empty.
            if padding <= _EMPTY_PADDING_BYTES:
                padding += _ALIGNMENT
            head = tag + varint(rest + padding)
        if padding:
            content = bytes(padding - _EMPTY_PADDING_BYTES)
            if any(map(header.HasField, self._behind_padding[type(header)])):
                # As a receiver's generated code would write it: so the header is read in one go.
                header.padding = content  # type: ignore[attr-defined]  # each case has its own type
                body = header.SerializeToString()
            else:
                body += _PADDING_TAG + length_prefixed(content)
        return b"".join((head, body, payload_head, payload, checksums))

    def write_head(self, header: Message, checksums: bytes = b"") -> bytes:
        """A wrapper's bytes without a payload; `checksums` as in `write`."""
        body = header.SerializeToString()
        return b"".join((self._tags[type(header)], varint(len(body)), body, checksums))

    def _parts_of(
        self, data: memoryview, checksums: dict[int, int]
    ) -> tuple[_Case, list[memoryview]]:
        """The case that the wrapper holds, and its bytes; the checksums go into the dict."""
        case: _Case | None = None
        parts: list[memoryview] = []
        replaced = False
        for number, wire_type, raw in read_fields(data):
            found = self._cases.get(number)
            if found is None:
                if number == self._batch:
                    # Skipping it as unknown would lose its messages.
                    raise FrameError(
                        f"{self._name} is a batch inside a batch, or beside another field"
                    )
                if number in _CHECKSUMS:
                    if wire_type != FIXED32 or isinstance(raw, int):
                        raise FrameError(
                            f"the checksum in field {number} has wire type {wire_type}"
                        )
                    checksums[number] = int.from_bytes(raw, "little")
                continue
            if wire_type != LENGTH or isinstance(raw, int):
                raise FrameError(f"field {number} of {self._name} has wire type {wire_type}")
            if case is not None and case is not found:
                if replaced:
                    raise FrameError(f"{self._name} holds more than two messages")
                # Of two cases the last counts, as in protobuf. The first must be valid too.
                replaced = True
                case.read(parts)
                parts = []
            case = found
            parts.append(raw)
        if case is None:
            raise FrameError(f"{self._name} holds no message that is known here")
        return case, parts


class _Case:
    """One case of a wrapper's oneof."""

    def __init__(self, number: int, descriptor: Descriptor) -> None:
        self.tag = varint(number << 3 | LENGTH)
        self.generated: Any = GetMessageClass(descriptor)
        """The generated class."""
        self.schema = Schema(descriptor)
        fields = descriptor.fields_by_name
        self._has_payload = "payload" in fields
        self._has_content = self._has_payload and fields["payload"].containing_oneof is not None

    def read(self, parts: Sequence[memoryview]) -> tuple[Any, memoryview | None]:
        """The message in the parts, without its payload, and the payload.

        Raises:
            FrameError: the bytes are not such a message, or break a rule of the protocol.
        """
        if len(parts) == 1 and (found := self._read_canonical(parts[0])) is not None:
            return found
        last, raw = self.schema.check(parts)
        try:
            if len(parts) == 1 and last == _PAYLOAD and isinstance(raw, memoryview):
                before = parts[0][: len(parts[0]) - len(raw)]
                head = _PAYLOAD_TAG + varint(len(raw))
                # A length may be written in more bytes than it needs. Then this is False.
                if before[-len(head) :] == head:
                    return self.generated.FromString(before[: -len(head)]), raw
            # The parts of a message are merged by joining their bytes, as protobuf says.
            message = self.generated.FromString(b"".join(parts))
        except DecodeError as error:
            raise FrameError(f"{self.generated.DESCRIPTOR.name}: {error}") from None
        return message, self._payload_of(message, parts)

    def _read_canonical(self, part: memoryview) -> tuple[Any, memoryview | None] | None:
        """As `read`, for bytes that generated code could have written; None for others."""
        start = bytes(part[:_CANONICAL_BYTES])
        at = start.find(_PAYLOAD_TAG) if self._has_payload else -1
        while at >= 0:
            begin = _payload_begin(start, at, len(part))
            # The tag's byte may also occur inside a field: then the bytes before it are no message.
            if begin is not None and (message := self._canonical(start[:at])) is not None:
                return message, part[begin:]
            at = start.find(_PAYLOAD_TAG, at + 1)
        if len(part) > _CANONICAL_BYTES:
            return None
        message = self._canonical(start)
        # A payload is the last field that most messages can have, but it may come before another.
        return None if message is None else (message, self._payload_of(message, [part]))

    def _canonical(self, header: bytes) -> Any:
        """The message, if these bytes are what generated code makes of it: nothing was dropped."""
        try:
            message = self.generated.FromString(header)
        except DecodeError:
            return None
        # Generated code keeps what it does not know, a known field of the wrong wire type included.
        message.DiscardUnknownFields()
        return message if message.SerializeToString() == header else None

    def _payload_of(self, message: Any, parts: Sequence[memoryview]) -> memoryview | None:
        """The payload in a message that was parsed whole."""
        if not self._has_payload:
            return None
        if self._has_content:
            return memoryview(message.payload) if message.HasField("payload") else None
        # Outside a oneof, generated code can't tell an empty payload from none.
        came = any(number == _PAYLOAD for part in parts for number, _, _ in read_fields(part))
        return memoryview(message.payload) if came else None


def _payload_begin(start: bytes, at: int, end: int) -> int | None:
    """Where the payload begins whose tag is at `at`, if it reaches to the end of the message."""
    try:
        length, begin = read_varint(start, at + len(_PAYLOAD_TAG))
    except FrameError:
        return None
    return begin if begin + length == end else None
