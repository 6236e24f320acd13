from andon.v1 import layout_pb2 as _layout_pb2
from andon.v1 import record_pb2 as _record_pb2
from andon.v1 import reducer_pb2 as _reducer_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Topology(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOPOLOGY_UNSPECIFIED: _ClassVar[Topology]
    TOPOLOGY_STAR: _ClassVar[Topology]
    TOPOLOGY_RING: _ClassVar[Topology]

class RingStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RING_STAGE_UNSPECIFIED: _ClassVar[RingStage]
    RING_STAGE_CONTRIBUTION: _ClassVar[RingStage]
    RING_STAGE_PARTIAL_SUM: _ClassVar[RingStage]
    RING_STAGE_AVERAGE: _ClassVar[RingStage]
    RING_STAGE_BROADCAST: _ClassVar[RingStage]
TOPOLOGY_UNSPECIFIED: Topology
TOPOLOGY_STAR: Topology
TOPOLOGY_RING: Topology
RING_STAGE_UNSPECIFIED: RingStage
RING_STAGE_CONTRIBUTION: RingStage
RING_STAGE_PARTIAL_SUM: RingStage
RING_STAGE_AVERAGE: RingStage
RING_STAGE_BROADCAST: RingStage

class RingNeighbours(_message.Message):
    __slots__ = ("successor_address", "successor_token", "predecessor_token")
    SUCCESSOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_TOKEN_FIELD_NUMBER: _ClassVar[int]
    successor_address: str
    successor_token: bytes
    predecessor_token: bytes
    def __init__(self, successor_address: _Optional[str] = ..., successor_token: _Optional[bytes] = ..., predecessor_token: _Optional[bytes] = ...) -> None: ...

class PassRequest(_message.Message):
    __slots__ = ("enter_round", "ring_header", "ring_chunk", "header_crc32c", "crc32c")
    ENTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    RING_HEADER_FIELD_NUMBER: _ClassVar[int]
    RING_CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_CRC32C_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    enter_round: EnterRound
    ring_header: RingHeader
    ring_chunk: RingChunk
    header_crc32c: int
    crc32c: int
    def __init__(self, enter_round: _Optional[_Union[EnterRound, _Mapping]] = ..., ring_header: _Optional[_Union[RingHeader, _Mapping]] = ..., ring_chunk: _Optional[_Union[RingChunk, _Mapping]] = ..., header_crc32c: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class PassResponse(_message.Message):
    __slots__ = ("greatest",)
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    greatest: _record_pb2.Key
    def __init__(self, greatest: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class ReportLaneRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class ReportLaneResponse(_message.Message):
    __slots__ = ("received_bytes", "reading")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    reading: bool
    def __init__(self, received_bytes: _Optional[int] = ..., reading: bool = ...) -> None: ...

class EnterRound(_message.Message):
    __slots__ = ("key", "rank", "world_size", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    rank: int
    world_size: int
    token: bytes
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class RingHeader(_message.Message):
    __slots__ = ("key", "sequence", "rank", "weight", "operation", "first_block", "stop_block", "data_bytes", "data_head", "crc32c")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STOP_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_HEAD_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    sequence: int
    rank: int
    weight: float
    operation: _reducer_pb2.Operation
    first_block: int
    stop_block: int
    data_bytes: int
    data_head: bytes
    crc32c: bool
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., sequence: _Optional[int] = ..., rank: _Optional[int] = ..., weight: _Optional[float] = ..., operation: _Optional[_Union[_reducer_pb2.Operation, str]] = ..., first_block: _Optional[int] = ..., stop_block: _Optional[int] = ..., data_bytes: _Optional[int] = ..., data_head: _Optional[bytes] = ..., crc32c: bool = ...) -> None: ...

class RingChunk(_message.Message):
    __slots__ = ("key", "sequence", "stage", "block", "element_offset", "element_count", "encoding", "padding", "payload")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    sequence: int
    stage: RingStage
    block: int
    element_offset: int
    element_count: int
    encoding: _layout_pb2.Encoding
    padding: bytes
    payload: bytes
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., sequence: _Optional[int] = ..., stage: _Optional[_Union[RingStage, str]] = ..., block: _Optional[int] = ..., element_offset: _Optional[int] = ..., element_count: _Optional[int] = ..., encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
