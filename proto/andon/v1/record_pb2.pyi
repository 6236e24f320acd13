from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_KIND_UNSPECIFIED: _ClassVar[RecordKind]
    RECORD_KIND_INITIAL: _ClassVar[RecordKind]
    RECORD_KIND_STEP: _ClassVar[RecordKind]
    RECORD_KIND_MARK: _ClassVar[RecordKind]
RECORD_KIND_UNSPECIFIED: RecordKind
RECORD_KIND_INITIAL: RecordKind
RECORD_KIND_STEP: RecordKind
RECORD_KIND_MARK: RecordKind

class Key(_message.Message):
    __slots__ = ("term", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    round: int
    def __init__(self, term: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("epoch", "position", "owed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    owed: _containers.RepeatedCompositeFieldContainer[PositionRange]
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., owed: _Optional[_Iterable[_Union[PositionRange, _Mapping]]] = ...) -> None: ...

class PositionRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("key", "parent", "kind", "step", "cursor", "roster")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    key: Key
    parent: Key
    kind: RecordKind
    step: int
    cursor: Cursor
    roster: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., parent: _Optional[_Union[Key, _Mapping]] = ..., kind: _Optional[_Union[RecordKind, str]] = ..., step: _Optional[int] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., roster: _Optional[_Iterable[int]] = ...) -> None: ...
