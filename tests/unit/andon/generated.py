"""The data plane's messages as generated code has them, made from plain values field by field."""

from __future__ import annotations

import enum
import re
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from andon.protocol.messages import PassMessage, Request, Response
from andon.v1 import reducer_pb2, ring_pb2

__all__ = ["passed", "request", "response"]

_NAMES = {"element_offset": "offset", "element_count": "count"}
"""Fields whose name in plain values is a shorter one."""

_Envelope = TypeVar("_Envelope", bound=Message)


def request(message: Request, padding: bytes = b"") -> reducer_pb2.ReduceRequest:
    return _in(reducer_pb2.ReduceRequest, message, padding)


def response(message: Response, padding: bytes = b"") -> reducer_pb2.ReduceResponse:
    return _in(reducer_pb2.ReduceResponse, message, padding)


def passed(message: PassMessage, padding: bytes = b"") -> ring_pb2.PassRequest:
    return _in(ring_pb2.PassRequest, message, padding)


def _in(envelope: type[_Envelope], message: Any, padding: bytes) -> _Envelope:
    """The envelope whose case bears the name of the message's class."""
    case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(message).__name__).lower()
    content = _content(_kind_of(envelope.DESCRIPTOR.fields_by_name[case]), message, padding)
    return envelope(**{case: content})


def _kind_of(field: Any) -> type[Message]:
    """The class of a field that is a message."""
    return GetMessageClass(field.message_type)


def _content(kind: type[Message], value: Any, padding: bytes = b"") -> Message:
    given: dict[str, Any] = {}
    for field in kind.DESCRIPTOR.fields:
        if field.name == "padding":
            given["padding"] = padding
            continue
        found = getattr(value, _NAMES.get(field.name, field.name))
        if isinstance(found, enum.Enum):
            found = found.value
        elif isinstance(found, memoryview):
            found = bytes(found)
        elif found is not None and field.message_type is not None:
            found = _content(_kind_of(field), found)
        given[field.name] = found
    if given.get("slice") is not None:  # In place of the numbers.
        del given["payload"], given["padding"]
    return kind(**given)
