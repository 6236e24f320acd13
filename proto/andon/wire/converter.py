"""Converters: plain values to generated messages and back, field by field.

An attribute of a plain value has the name of its message's field, and its type says how the field
is converted: an enum, another plain value, a tuple, or None for a field that may be missing. So a
new field needs an attribute and nothing else. `_RENAMED` has the exceptions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from andon.wire.fields import FrameError

__all__ = ["Converter"]

_RENAMED = {"element_offset": "offset", "element_count": "count"}
"""Attributes that have another name than their fields, by field."""

_APART = {"padding", "payload"}
"""Fields that `andon.wire.bulk` reads and writes."""


class Converter:
    """Converts between one plain class and its generated class."""

    def __init__(self, plain: type, generated: type[Message]) -> None:
        """Pairs a message's fields with a dataclass's attributes; KeyError if one is missing."""
        self.plain, self.generated = plain, generated
        hints = get_type_hints(plain)
        fields = [each for each in generated.DESCRIPTOR.fields if each.name not in _APART]
        pairs = [(each, _RENAMED.get(each.name, each.name)) for each in fields]
        self._writers = [
            (each.name, attrgetter(name), _writer_of(each, hints[name])) for each, name in pairs
        ]
        self._readers = [(name, _reader_of(each, hints[name])) for each, name in pairs]

    def to_generated(self, value: object) -> Message:
        """The message of a plain value, without its payload.

        Raises:
            ValueError: a number that its field can't hold.
        """
        fields = {}
        for name, get, write in self._writers:
            content = get(value)
            if content is not None:
                # The constructor leaves out a number or a text at its default.
                fields[name] = content if write is None else write(content)
        try:
            return self.generated(**fields)
        except ValueError as error:
            raise ValueError(f"{self.plain.__name__}: {error}") from None

    def values_of(self, message: Message) -> dict[str, Any]:
        """The attributes of the plain value of a message.

        Raises:
            FrameError: the message lacks a field that it must have, or holds an unknown enum value
                or an illegal key.
        """
        return {name: read(message) for name, read in self._readers}

    def from_generated(self, message: Message) -> Any:
        """The plain value of a message; FrameError if it is not a legal one."""
        values = self.values_of(message)
        try:
            return self.plain(**values)
        except ValueError as error:
            raise FrameError(f"{self.plain.__name__}: {error}") from None


def _writer_of(field: Any, hint: Any) -> Callable[[Any], Any] | None:
    """Converts an attribute to the field's content; None if nothing has to be converted."""
    if field.enum_type is not None:
        return attrgetter("value")
    if field.message_type is not None:
        return _converter_of(field, hint).to_generated
    return None


def _reader_of(field: Any, hint: Any) -> Callable[[Any], Any]:
    """Reads the attribute from a message. `hint` is the attribute's type.

    A field may be missing if the type includes None.
    """
    name, where = field.name, f"{field.containing_type.name}.{field.name}"
    get, may_miss = attrgetter(name), NoneType in get_args(hint)
    if field.enum_type is not None:
        return _enum_reader(get, _without_none(hint), where, may_miss=may_miss)
    if field.message_type is not None:
        convert = _converter_of(field, hint).from_generated

        def read_message(message: Any) -> Any:
            if message.HasField(name):
                return convert(get(message))
            if may_miss:
                return None
            raise FrameError(f"{field.containing_type.name} lacks {name}")

        return read_message
    if may_miss:
        return lambda message: get(message) if message.HasField(name) else None
    if getattr(hint, "__origin__", None) is tuple:
        return lambda message: tuple(get(message))
    return get


def _enum_reader(
    get: Callable[[Any], int], members: type[enum.Enum], where: str, *, may_miss: bool
) -> Callable[[Any], Any]:
    known: dict[int, enum.Enum | None] = {member.value: member for member in members}
    if may_miss:
        known[0] = None

    def read_enum(message: Any) -> enum.Enum | None:
        number = get(message)
        try:
            return known[number]
        except KeyError:
            raise FrameError(f"{where}: {number} is no {members.__name__}") from None

    return read_enum


def _converter_of(field: Any, hint: Any) -> Converter:
    """For the message inside a message."""
    return Converter(_without_none(hint), GetMessageClass(field.message_type))


def _without_none(hint: Any) -> Any:
    """The type of an attribute that may be None."""
    return next((each for each in get_args(hint) if each is not NoneType), hint)
