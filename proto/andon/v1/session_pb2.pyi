from andon.v1 import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_KIND_UNSPECIFIED: _ClassVar[CallKind]
    CALL_KIND_ALL_REDUCE: _ClassVar[CallKind]
    CALL_KIND_REDUCE: _ClassVar[CallKind]
    CALL_KIND_REDUCE_SCATTER: _ClassVar[CallKind]
    CALL_KIND_ALL_GATHER: _ClassVar[CallKind]
    CALL_KIND_GATHER: _ClassVar[CallKind]
    CALL_KIND_SCATTER: _ClassVar[CallKind]
    CALL_KIND_BROADCAST: _ClassVar[CallKind]
    CALL_KIND_ALL_TO_ALL: _ClassVar[CallKind]
    CALL_KIND_BARRIER: _ClassVar[CallKind]
    CALL_KIND_SEND: _ClassVar[CallKind]

class SessionEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_END_UNSPECIFIED: _ClassVar[SessionEnd]
    SESSION_END_RANK_LOST: _ClassVar[SessionEnd]
    SESSION_END_NON_FINITE: _ClassVar[SessionEnd]
    SESSION_END_NON_FINITE_REDUCTION: _ClassVar[SessionEnd]
    SESSION_END_CALLS_DIFFER: _ClassVar[SessionEnd]
    SESSION_END_RANK_LEFT: _ClassVar[SessionEnd]
    SESSION_END_UNREACHABLE: _ClassVar[SessionEnd]
    SESSION_END_CORRUPT: _ClassVar[SessionEnd]
    SESSION_END_SCRIPT_FAILED: _ClassVar[SessionEnd]
    SESSION_END_OPERATOR: _ClassVar[SessionEnd]
    SESSION_END_REPLACED: _ClassVar[SessionEnd]
    SESSION_END_SERVICE_LEAVING: _ClassVar[SessionEnd]

class RankState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_STATE_UNSPECIFIED: _ClassVar[RankState]
    RANK_STATE_WAITING: _ClassVar[RankState]
    RANK_STATE_RUNNING: _ClassVar[RankState]
    RANK_STATE_IN_CALL: _ClassVar[RankState]
    RANK_STATE_LEFT: _ClassVar[RankState]
    RANK_STATE_OVER: _ClassVar[RankState]
CALL_KIND_UNSPECIFIED: CallKind
CALL_KIND_ALL_REDUCE: CallKind
CALL_KIND_REDUCE: CallKind
CALL_KIND_REDUCE_SCATTER: CallKind
CALL_KIND_ALL_GATHER: CallKind
CALL_KIND_GATHER: CallKind
CALL_KIND_SCATTER: CallKind
CALL_KIND_BROADCAST: CallKind
CALL_KIND_ALL_TO_ALL: CallKind
CALL_KIND_BARRIER: CallKind
CALL_KIND_SEND: CallKind
SESSION_END_UNSPECIFIED: SessionEnd
SESSION_END_RANK_LOST: SessionEnd
SESSION_END_NON_FINITE: SessionEnd
SESSION_END_NON_FINITE_REDUCTION: SessionEnd
SESSION_END_CALLS_DIFFER: SessionEnd
SESSION_END_RANK_LEFT: SessionEnd
SESSION_END_UNREACHABLE: SessionEnd
SESSION_END_CORRUPT: SessionEnd
SESSION_END_SCRIPT_FAILED: SessionEnd
SESSION_END_OPERATOR: SessionEnd
SESSION_END_REPLACED: SessionEnd
SESSION_END_SERVICE_LEAVING: SessionEnd
RANK_STATE_UNSPECIFIED: RankState
RANK_STATE_WAITING: RankState
RANK_STATE_RUNNING: RankState
RANK_STATE_IN_CALL: RankState
RANK_STATE_LEFT: RankState
RANK_STATE_OVER: RankState

class AttendRequest(_message.Message):
    __slots__ = ("attend", "report", "fault", "end")
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    attend: Attend
    report: RankReport
    fault: RankFault
    end: EndAttendance
    def __init__(self, attend: _Optional[_Union[Attend, _Mapping]] = ..., report: _Optional[_Union[RankReport, _Mapping]] = ..., fault: _Optional[_Union[RankFault, _Mapping]] = ..., end: _Optional[_Union[EndAttendance, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("formed", "over", "report_answer")
    FORMED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    REPORT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    formed: SessionFormed
    over: SessionOver
    report_answer: RankReportAnswer
    def __init__(self, formed: _Optional[_Union[SessionFormed, _Mapping]] = ..., over: _Optional[_Union[SessionOver, _Mapping]] = ..., report_answer: _Optional[_Union[RankReportAnswer, _Mapping]] = ...) -> None: ...

class Attend(_message.Message):
    __slots__ = ("run_id", "node_id", "rank", "world_size", "incarnation", "protocol_version", "capabilities", "token", "address", "shared_folder", "process_host", "process_id", "backend", "device", "metrics_address", "greatest_term")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GREATEST_TERM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node_id: str
    rank: int
    world_size: int
    incarnation: int
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    address: str
    shared_folder: bytes
    process_host: bytes
    process_id: int
    backend: str
    device: str
    metrics_address: str
    greatest_term: int
    def __init__(self, run_id: _Optional[str] = ..., node_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ..., protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., address: _Optional[str] = ..., shared_folder: _Optional[bytes] = ..., process_host: _Optional[bytes] = ..., process_id: _Optional[int] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., metrics_address: _Optional[str] = ..., greatest_term: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "node_id", "address", "shared_folder", "token_to", "token_from")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FROM_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_id: str
    address: str
    shared_folder: bytes
    token_to: bytes
    token_from: bytes
    def __init__(self, rank: _Optional[int] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., shared_folder: _Optional[bytes] = ..., token_to: _Optional[bytes] = ..., token_from: _Optional[bytes] = ...) -> None: ...

class SessionFormed(_message.Message):
    __slots__ = ("key", "peers", "capabilities", "lease_s", "report_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_S_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    report_s: float
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ..., report_s: _Optional[float] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("kind", "dtype", "count", "reduction", "root", "tag", "tensors")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    kind: CallKind
    dtype: str
    count: int
    reduction: str
    root: int
    tag: int
    tensors: int
    def __init__(self, kind: _Optional[_Union[CallKind, str]] = ..., dtype: _Optional[str] = ..., count: _Optional[int] = ..., reduction: _Optional[str] = ..., root: _Optional[int] = ..., tag: _Optional[int] = ..., tensors: _Optional[int] = ...) -> None: ...

class PendingCall(_message.Message):
    __slots__ = ("group_name", "group", "sequence", "call", "open_s", "missing")
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    group: int
    sequence: int
    call: Call
    open_s: float
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group_name: _Optional[str] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., open_s: _Optional[float] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("key", "steps", "exchange_s", "bytes", "calls", "pending", "numbers", "overflows", "number")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOWS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    steps: int
    exchange_s: float
    bytes: int
    calls: int
    pending: PendingCall
    numbers: _containers.RepeatedCompositeFieldContainer[NamedNumber]
    overflows: int
    number: int
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., steps: _Optional[int] = ..., exchange_s: _Optional[float] = ..., bytes: _Optional[int] = ..., calls: _Optional[int] = ..., pending: _Optional[_Union[PendingCall, _Mapping]] = ..., numbers: _Optional[_Iterable[_Union[NamedNumber, _Mapping]]] = ..., overflows: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class NamedNumber(_message.Message):
    __slots__ = ("name", "step", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    value: float
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class RankReportAnswer(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class RankFault(_message.Message):
    __slots__ = ("key", "end", "culprit", "message", "call", "other_call", "parameter", "element", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    OTHER_CALL_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    end: SessionEnd
    culprit: int
    message: str
    call: PendingCall
    other_call: PendingCall
    parameter: str
    element: _containers.RepeatedScalarFieldContainer[int]
    value: str
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, str]] = ..., culprit: _Optional[int] = ..., message: _Optional[str] = ..., call: _Optional[_Union[PendingCall, _Mapping]] = ..., other_call: _Optional[_Union[PendingCall, _Mapping]] = ..., parameter: _Optional[str] = ..., element: _Optional[_Iterable[int]] = ..., value: _Optional[str] = ...) -> None: ...

class SessionOver(_message.Message):
    __slots__ = ("key", "end", "culprit", "culprit_node", "message", "fault", "reported_by", "halt_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_NODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    REPORTED_BY_FIELD_NUMBER: _ClassVar[int]
    HALT_ID_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    end: SessionEnd
    culprit: int
    culprit_node: str
    message: str
    fault: RankFault
    reported_by: int
    halt_id: int
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, str]] = ..., culprit: _Optional[int] = ..., culprit_node: _Optional[str] = ..., message: _Optional[str] = ..., fault: _Optional[_Union[RankFault, _Mapping]] = ..., reported_by: _Optional[int] = ..., halt_id: _Optional[int] = ...) -> None: ...

class EndAttendance(_message.Message):
    __slots__ = ("key", "done")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    done: bool
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., done: bool = ...) -> None: ...

class PeerFrame(_message.Message):
    __slots__ = ("group", "sequence", "begin", "piece", "lane_end", "crc32c")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LANE_END_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    group: int
    sequence: int
    begin: Begin
    piece: Piece
    lane_end: LaneEnd
    crc32c: int
    def __init__(self, group: _Optional[int] = ..., sequence: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., lane_end: _Optional[_Union[LaneEnd, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("call", "rank", "receives", "gives_bytes")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_FIELD_NUMBER: _ClassVar[int]
    GIVES_BYTES_FIELD_NUMBER: _ClassVar[int]
    call: Call
    rank: int
    receives: bool
    gives_bytes: int
    def __init__(self, call: _Optional[_Union[Call, _Mapping]] = ..., rank: _Optional[int] = ..., receives: bool = ..., gives_bytes: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("stage", "offset", "length")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    stage: int
    offset: int
    length: int
    def __init__(self, stage: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LaneEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "node_id", "backend", "device", "state", "steps", "exchange_s", "exchange_ratio", "bytes", "calls", "pending", "silent_s", "overflows", "metrics_address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    OVERFLOWS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_id: str
    backend: str
    device: str
    state: RankState
    steps: int
    exchange_s: float
    exchange_ratio: float
    bytes: int
    calls: int
    pending: PendingCall
    silent_s: float
    overflows: int
    metrics_address: str
    def __init__(self, rank: _Optional[int] = ..., node_id: _Optional[str] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[_Union[RankState, str]] = ..., steps: _Optional[int] = ..., exchange_s: _Optional[float] = ..., exchange_ratio: _Optional[float] = ..., bytes: _Optional[int] = ..., calls: _Optional[int] = ..., pending: _Optional[_Union[PendingCall, _Mapping]] = ..., silent_s: _Optional[float] = ..., overflows: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("key", "world_size", "awaited", "ranks", "age_s", "last", "formed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    world_size: int
    awaited: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    age_s: float
    last: SessionOver
    formed: int
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., world_size: _Optional[int] = ..., awaited: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., age_s: _Optional[float] = ..., last: _Optional[_Union[SessionOver, _Mapping]] = ..., formed: _Optional[int] = ...) -> None: ...
