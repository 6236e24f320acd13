from andon.v1 import layout_pb2 as _layout_pb2
from andon.v1 import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    OPERATION_WEIGHTED_MEAN: _ClassVar[Operation]
    OPERATION_SUM: _ClassVar[Operation]
    OPERATION_MIN: _ClassVar[Operation]
    OPERATION_MAX: _ClassVar[Operation]
    OPERATION_PRODUCT: _ClassVar[Operation]
    OPERATION_BROADCAST: _ClassVar[Operation]
    OPERATION_BAND: _ClassVar[Operation]
    OPERATION_BOR: _ClassVar[Operation]
    OPERATION_BXOR: _ClassVar[Operation]
    OPERATION_TRIMMED_MEAN: _ClassVar[Operation]

class BlockFaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_FAULT_KIND_UNSPECIFIED: _ClassVar[BlockFaultKind]
    BLOCK_FAULT_KIND_NON_FINITE: _ClassVar[BlockFaultKind]
    BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: _ClassVar[BlockFaultKind]
    BLOCK_FAULT_KIND_ENCODING_OVERFLOW: _ClassVar[BlockFaultKind]
    BLOCK_FAULT_KIND_INCONSISTENT: _ClassVar[BlockFaultKind]
OPERATION_UNSPECIFIED: Operation
OPERATION_WEIGHTED_MEAN: Operation
OPERATION_SUM: Operation
OPERATION_MIN: Operation
OPERATION_MAX: Operation
OPERATION_PRODUCT: Operation
OPERATION_BROADCAST: Operation
OPERATION_BAND: Operation
OPERATION_BOR: Operation
OPERATION_BXOR: Operation
OPERATION_TRIMMED_MEAN: Operation
BLOCK_FAULT_KIND_UNSPECIFIED: BlockFaultKind
BLOCK_FAULT_KIND_NON_FINITE: BlockFaultKind
BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: BlockFaultKind
BLOCK_FAULT_KIND_ENCODING_OVERFLOW: BlockFaultKind
BLOCK_FAULT_KIND_INCONSISTENT: BlockFaultKind

class ReduceRequest(_message.Message):
    __slots__ = ("open_round", "block_gradient", "abstain", "shared_memory_mapped", "batch", "header_crc32c", "crc32c")
    OPEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ABSTAIN_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_MAPPED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEADER_CRC32C_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    open_round: OpenRound
    block_gradient: BlockGradient
    abstain: Abstain
    shared_memory_mapped: SharedMemoryMapped
    batch: ReduceRequestBatch
    header_crc32c: int
    crc32c: int
    def __init__(self, open_round: _Optional[_Union[OpenRound, _Mapping]] = ..., block_gradient: _Optional[_Union[BlockGradient, _Mapping]] = ..., abstain: _Optional[_Union[Abstain, _Mapping]] = ..., shared_memory_mapped: _Optional[_Union[SharedMemoryMapped, _Mapping]] = ..., batch: _Optional[_Union[ReduceRequestBatch, _Mapping]] = ..., header_crc32c: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReduceRequestBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ReduceRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ReduceRequest, _Mapping]]] = ...) -> None: ...

class ReduceResponse(_message.Message):
    __slots__ = ("round_opened", "averaged_block", "block_fault", "stale_round", "round_aborted", "batch", "header_crc32c", "crc32c")
    ROUND_OPENED_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FAULT_FIELD_NUMBER: _ClassVar[int]
    STALE_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_ABORTED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEADER_CRC32C_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    round_opened: RoundOpened
    averaged_block: AveragedBlock
    block_fault: BlockFault
    stale_round: StaleRound
    round_aborted: RoundAborted
    batch: ReduceResponseBatch
    header_crc32c: int
    crc32c: int
    def __init__(self, round_opened: _Optional[_Union[RoundOpened, _Mapping]] = ..., averaged_block: _Optional[_Union[AveragedBlock, _Mapping]] = ..., block_fault: _Optional[_Union[BlockFault, _Mapping]] = ..., stale_round: _Optional[_Union[StaleRound, _Mapping]] = ..., round_aborted: _Optional[_Union[RoundAborted, _Mapping]] = ..., batch: _Optional[_Union[ReduceResponseBatch, _Mapping]] = ..., header_crc32c: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReduceResponseBatch(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[ReduceResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[ReduceResponse, _Mapping]]] = ...) -> None: ...

class OpenRound(_message.Message):
    __slots__ = ("run_id", "worker", "session_token", "capabilities", "block_elements", "shared_folder", "listens", "contribution_areas")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    LISTENS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_AREAS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker: int
    session_token: bytes
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    block_elements: _containers.RepeatedScalarFieldContainer[int]
    shared_folder: bytes
    listens: bool
    contribution_areas: int
    def __init__(self, run_id: _Optional[str] = ..., worker: _Optional[int] = ..., session_token: _Optional[bytes] = ..., capabilities: _Optional[_Iterable[str]] = ..., block_elements: _Optional[_Iterable[int]] = ..., shared_folder: _Optional[bytes] = ..., listens: bool = ..., contribution_areas: _Optional[int] = ...) -> None: ...

class RoundOpened(_message.Message):
    __slots__ = ("capabilities", "max_payload_bytes", "contributions", "averages", "shared_memory_refused", "tcp")
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    max_payload_bytes: int
    contributions: SharedMemoryOffer
    averages: SharedMemoryOffer
    shared_memory_refused: str
    tcp: TcpOffer
    def __init__(self, capabilities: _Optional[_Iterable[str]] = ..., max_payload_bytes: _Optional[int] = ..., contributions: _Optional[_Union[SharedMemoryOffer, _Mapping]] = ..., averages: _Optional[_Union[SharedMemoryOffer, _Mapping]] = ..., shared_memory_refused: _Optional[str] = ..., tcp: _Optional[_Union[TcpOffer, _Mapping]] = ...) -> None: ...

class TcpOffer(_message.Message):
    __slots__ = ("port", "nonce", "reports", "connections", "adaptive")
    PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    port: int
    nonce: bytes
    reports: bool
    connections: int
    adaptive: bool
    def __init__(self, port: _Optional[int] = ..., nonce: _Optional[bytes] = ..., reports: bool = ..., connections: _Optional[int] = ..., adaptive: bool = ...) -> None: ...

class ReportLanesRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class ReportLanesResponse(_message.Message):
    __slots__ = ("received_bytes", "reading", "sent_bytes", "connections")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    reading: bool
    sent_bytes: int
    connections: int
    def __init__(self, received_bytes: _Optional[int] = ..., reading: bool = ..., sent_bytes: _Optional[int] = ..., connections: _Optional[int] = ...) -> None: ...

class SharedMemoryOffer(_message.Message):
    __slots__ = ("name", "size_bytes", "nonce_offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    nonce_offset: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., nonce_offset: _Optional[int] = ...) -> None: ...

class SharedMemoryMapped(_message.Message):
    __slots__ = ("contributions_nonce", "averages_nonce")
    CONTRIBUTIONS_NONCE_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_NONCE_FIELD_NUMBER: _ClassVar[int]
    contributions_nonce: bytes
    averages_nonce: bytes
    def __init__(self, contributions_nonce: _Optional[bytes] = ..., averages_nonce: _Optional[bytes] = ...) -> None: ...

class SharedMemorySlice(_message.Message):
    __slots__ = ("offset", "length", "generation")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    generation: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("first", "grains", "batch_grains", "grain")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    BATCH_GRAINS_FIELD_NUMBER: _ClassVar[int]
    GRAIN_FIELD_NUMBER: _ClassVar[int]
    first: int
    grains: int
    batch_grains: int
    grain: int
    def __init__(self, first: _Optional[int] = ..., grains: _Optional[int] = ..., batch_grains: _Optional[int] = ..., grain: _Optional[int] = ...) -> None: ...

class BlockGradient(_message.Message):
    __slots__ = ("key", "group", "sequence", "operation", "rank", "world_size", "block", "element_offset", "element_count", "weight", "encoding", "answer_encoding", "padding", "slice", "payload", "node")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ENCODING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    group: int
    sequence: int
    operation: Operation
    rank: int
    world_size: int
    block: int
    element_offset: int
    element_count: int
    weight: float
    encoding: _layout_pb2.Encoding
    answer_encoding: _layout_pb2.Encoding
    padding: bytes
    slice: SharedMemorySlice
    payload: bytes
    node: TreeNode
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., block: _Optional[int] = ..., element_offset: _Optional[int] = ..., element_count: _Optional[int] = ..., weight: _Optional[float] = ..., encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., answer_encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., padding: _Optional[bytes] = ..., slice: _Optional[_Union[SharedMemorySlice, _Mapping]] = ..., payload: _Optional[bytes] = ..., node: _Optional[_Union[TreeNode, _Mapping]] = ...) -> None: ...

class Abstain(_message.Message):
    __slots__ = ("key", "group", "sequence", "rank", "world_size")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    group: int
    sequence: int
    rank: int
    world_size: int
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class AveragedBlock(_message.Message):
    __slots__ = ("key", "group", "sequence", "operation", "contributors", "world_size", "block", "element_offset", "element_count", "total_weight", "encoding", "padding", "slice", "payload")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    group: int
    sequence: int
    operation: Operation
    contributors: int
    world_size: int
    block: int
    element_offset: int
    element_count: int
    total_weight: float
    encoding: _layout_pb2.Encoding
    padding: bytes
    slice: SharedMemorySlice
    payload: bytes
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., contributors: _Optional[int] = ..., world_size: _Optional[int] = ..., block: _Optional[int] = ..., element_offset: _Optional[int] = ..., element_count: _Optional[int] = ..., total_weight: _Optional[float] = ..., encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., padding: _Optional[bytes] = ..., slice: _Optional[_Union[SharedMemorySlice, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class BlockFault(_message.Message):
    __slots__ = ("key", "group", "sequence", "kind", "rank", "block", "element", "value", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    group: int
    sequence: int
    kind: BlockFaultKind
    rank: int
    block: int
    element: int
    value: str
    message: str
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., kind: _Optional[_Union[BlockFaultKind, str]] = ..., rank: _Optional[int] = ..., block: _Optional[int] = ..., element: _Optional[int] = ..., value: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StaleRound(_message.Message):
    __slots__ = ("key", "greatest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    greatest: _record_pb2.Key
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., greatest: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class RoundAborted(_message.Message):
    __slots__ = ("key", "message", "corrupt")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    message: str
    corrupt: CorruptChunk
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., message: _Optional[str] = ..., corrupt: _Optional[_Union[CorruptChunk, _Mapping]] = ...) -> None: ...

class CorruptChunk(_message.Message):
    __slots__ = ("rank", "block", "element")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    block: int
    element: int
    def __init__(self, rank: _Optional[int] = ..., block: _Optional[int] = ..., element: _Optional[int] = ...) -> None: ...

class PutStateRequest(_message.Message):
    __slots__ = ("run_id", "worker", "session_token", "transfer_id", "head", "size_bytes", "sha256", "base_bytes", "base_sha256", "file_bytes", "payload")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_SHA256_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker: int
    session_token: bytes
    transfer_id: int
    head: _record_pb2.Key
    size_bytes: int
    sha256: bytes
    base_bytes: int
    base_sha256: bytes
    file_bytes: int
    payload: bytes
    def __init__(self, run_id: _Optional[str] = ..., worker: _Optional[int] = ..., session_token: _Optional[bytes] = ..., transfer_id: _Optional[int] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., base_bytes: _Optional[int] = ..., base_sha256: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutStateResponse(_message.Message):
    __slots__ = ("offset", "base_bytes", "shared_folder", "file_name")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    offset: int
    base_bytes: int
    shared_folder: bytes
    file_name: str
    def __init__(self, offset: _Optional[int] = ..., base_bytes: _Optional[int] = ..., shared_folder: _Optional[bytes] = ..., file_name: _Optional[str] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("run_id", "worker", "session_token", "transfer_id", "head", "offset", "sha256", "base_sha256", "shared_folder", "file_name")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BASE_SHA256_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker: int
    session_token: bytes
    transfer_id: int
    head: _record_pb2.Key
    offset: int
    sha256: bytes
    base_sha256: bytes
    shared_folder: bytes
    file_name: str
    def __init__(self, run_id: _Optional[str] = ..., worker: _Optional[int] = ..., session_token: _Optional[bytes] = ..., transfer_id: _Optional[int] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., offset: _Optional[int] = ..., sha256: _Optional[bytes] = ..., base_sha256: _Optional[bytes] = ..., shared_folder: _Optional[bytes] = ..., file_name: _Optional[str] = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("size_bytes", "sha256", "offset", "base_bytes", "file_bytes", "payload")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    sha256: bytes
    offset: int
    base_bytes: int
    file_bytes: int
    payload: bytes
    def __init__(self, size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., base_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
