from andon.v1 import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HaltReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HALT_REASON_UNSPECIFIED: _ClassVar[HaltReason]
    HALT_REASON_NON_FINITE_GRADIENT: _ClassVar[HaltReason]
    HALT_REASON_NON_FINITE_LOSS: _ClassVar[HaltReason]
    HALT_REASON_REPLICA_DIVERGENCE: _ClassVar[HaltReason]
    HALT_REASON_LOSS_SPIKE: _ClassVar[HaltReason]
    HALT_REASON_GRADIENT_NORM_SPIKE: _ClassVar[HaltReason]
    HALT_REASON_OPERATOR: _ClassVar[HaltReason]
    HALT_REASON_PROTOCOL_VIOLATION: _ClassVar[HaltReason]
    HALT_REASON_NON_FINITE_AVERAGE: _ClassVar[HaltReason]
    HALT_REASON_ENCODING_OVERFLOW: _ClassVar[HaltReason]
    HALT_REASON_REPEATED_FAILURE: _ClassVar[HaltReason]
    HALT_REASON_JOURNAL: _ClassVar[HaltReason]
    HALT_REASON_STATE_LOST: _ClassVar[HaltReason]
    HALT_REASON_CHECKPOINT: _ClassVar[HaltReason]
    HALT_REASON_TOO_FEW_WORKERS: _ClassVar[HaltReason]
    HALT_REASON_WRONG_ARITHMETIC: _ClassVar[HaltReason]
    HALT_REASON_DATA_DIFFERS: _ClassVar[HaltReason]
HALT_REASON_UNSPECIFIED: HaltReason
HALT_REASON_NON_FINITE_GRADIENT: HaltReason
HALT_REASON_NON_FINITE_LOSS: HaltReason
HALT_REASON_REPLICA_DIVERGENCE: HaltReason
HALT_REASON_LOSS_SPIKE: HaltReason
HALT_REASON_GRADIENT_NORM_SPIKE: HaltReason
HALT_REASON_OPERATOR: HaltReason
HALT_REASON_PROTOCOL_VIOLATION: HaltReason
HALT_REASON_NON_FINITE_AVERAGE: HaltReason
HALT_REASON_ENCODING_OVERFLOW: HaltReason
HALT_REASON_REPEATED_FAILURE: HaltReason
HALT_REASON_JOURNAL: HaltReason
HALT_REASON_STATE_LOST: HaltReason
HALT_REASON_CHECKPOINT: HaltReason
HALT_REASON_TOO_FEW_WORKERS: HaltReason
HALT_REASON_WRONG_ARITHMETIC: HaltReason
HALT_REASON_DATA_DIFFERS: HaltReason

class HaltEvidence(_message.Message):
    __slots__ = ("id", "reason", "key", "step", "worker", "block", "parameter", "element", "value", "message", "at_unix_s", "epoch", "positions", "reported_by")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_BY_FIELD_NUMBER: _ClassVar[int]
    id: int
    reason: HaltReason
    key: _record_pb2.Key
    step: int
    worker: int
    block: int
    parameter: str
    element: _containers.RepeatedScalarFieldContainer[int]
    value: str
    message: str
    at_unix_s: float
    epoch: int
    positions: _record_pb2.PositionRange
    reported_by: int
    def __init__(self, id: _Optional[int] = ..., reason: _Optional[_Union[HaltReason, str]] = ..., key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., step: _Optional[int] = ..., worker: _Optional[int] = ..., block: _Optional[int] = ..., parameter: _Optional[str] = ..., element: _Optional[_Iterable[int]] = ..., value: _Optional[str] = ..., message: _Optional[str] = ..., at_unix_s: _Optional[float] = ..., epoch: _Optional[int] = ..., positions: _Optional[_Union[_record_pb2.PositionRange, _Mapping]] = ..., reported_by: _Optional[int] = ...) -> None: ...
