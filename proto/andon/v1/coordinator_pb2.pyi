from andon.v1 import halt_pb2 as _halt_pb2
from andon.v1 import layout_pb2 as _layout_pb2
from andon.v1 import record_pb2 as _record_pb2
from andon.v1 import ring_pb2 as _ring_pb2
from andon.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_WRONG_RUN: _ClassVar[Reason]
    REASON_LAYOUT_DIFFERS: _ClassVar[Reason]
    REASON_PLAN_DIFFERS: _ClassVar[Reason]
    REASON_DATASET_TOO_SMALL: _ClassVar[Reason]
    REASON_VERSION: _ClassVar[Reason]
    REASON_CAPABILITY: _ClassVar[Reason]
    REASON_SLOT: _ClassVar[Reason]
    REASON_FULL: _ClassVar[Reason]
    REASON_TOKEN: _ClassVar[Reason]
    REASON_COMPLETE: _ClassVar[Reason]
    REASON_INVALID_MESSAGE: _ClassVar[Reason]
    REASON_OPERATOR_TOKEN: _ClassVar[Reason]
    REASON_OPERATOR_REFUSED: _ClassVar[Reason]
    REASON_REGISTRATION_OFF: _ClassVar[Reason]
    REASON_NOT_OFFERED: _ClassVar[Reason]
    REASON_TOO_LARGE: _ClassVar[Reason]
    REASON_TOO_MANY_STREAMS: _ClassVar[Reason]
    REASON_MEMORY_LIMIT: _ClassVar[Reason]
    REASON_PEER_GONE: _ClassVar[Reason]
    REASON_REJOIN_NEEDED: _ClassVar[Reason]
    REASON_SERVICE_LEAVING: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_DROPPED: _ClassVar[Reason]
    REASON_OTHER_USE: _ClassVar[Reason]
    REASON_WORLD_DIFFERS: _ClassVar[Reason]
    REASON_SAME_BITS: _ClassVar[Reason]
    REASON_ARITHMETIC_DIFFERS: _ClassVar[Reason]

class JoinStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOIN_STATUS_UNSPECIFIED: _ClassVar[JoinStatus]
    JOIN_STATUS_IN_SYNC: _ClassVar[JoinStatus]
    JOIN_STATUS_BEHIND: _ClassVar[JoinStatus]
    JOIN_STATUS_RECORD_FOLLOWS: _ClassVar[JoinStatus]
    JOIN_STATUS_FRESH: _ClassVar[JoinStatus]

class MeanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEAN_KIND_UNSPECIFIED: _ClassVar[MeanKind]
    MEAN_KIND_WEIGHTED: _ClassVar[MeanKind]
    MEAN_KIND_TRIMMED: _ClassVar[MeanKind]

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_NON_FINITE_GRADIENT: _ClassVar[FaultKind]
    FAULT_KIND_NON_FINITE_LOSS: _ClassVar[FaultKind]
    FAULT_KIND_ENCODING_OVERFLOW: _ClassVar[FaultKind]
    FAULT_KIND_NON_FINITE_AVERAGE: _ClassVar[FaultKind]
    FAULT_KIND_PROTOCOL: _ClassVar[FaultKind]
    FAULT_KIND_DATA_STREAM_LOST: _ClassVar[FaultKind]
    FAULT_KIND_STALE_ROUND: _ClassVar[FaultKind]
    FAULT_KIND_SCRIPT_RAISED: _ClassVar[FaultKind]
    FAULT_KIND_CHECKPOINT: _ClassVar[FaultKind]
    FAULT_KIND_CORRUPT_CHUNK: _ClassVar[FaultKind]

class Activity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVITY_UNSPECIFIED: _ClassVar[Activity]
    ACTIVITY_IDLE: _ClassVar[Activity]
    ACTIVITY_LOADING: _ClassVar[Activity]
    ACTIVITY_COMPUTING: _ClassVar[Activity]
    ACTIVITY_EXCHANGING: _ClassVar[Activity]
    ACTIVITY_COMMITTING: _ClassVar[Activity]
    ACTIVITY_EVALUATING: _ClassVar[Activity]
    ACTIVITY_BUSY: _ClassVar[Activity]
    ACTIVITY_SYNCING: _ClassVar[Activity]
    ACTIVITY_HALTED: _ClassVar[Activity]

class SlowPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOW_PHASE_UNSPECIFIED: _ClassVar[SlowPhase]
    SLOW_PHASE_DATA: _ClassVar[SlowPhase]
    SLOW_PHASE_FORWARD: _ClassVar[SlowPhase]
    SLOW_PHASE_BACKWARD: _ClassVar[SlowPhase]
    SLOW_PHASE_OPTIMIZER: _ClassVar[SlowPhase]
    SLOW_PHASE_EXCHANGE: _ClassVar[SlowPhase]
    SLOW_PHASE_DISK: _ClassVar[SlowPhase]
    SLOW_PHASE_SCRIPT: _ClassVar[SlowPhase]

class LeaveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEAVE_REASON_UNSPECIFIED: _ClassVar[LeaveReason]
    LEAVE_REASON_COMPLETE: _ClassVar[LeaveReason]
    LEAVE_REASON_FAILED: _ClassVar[LeaveReason]
    LEAVE_REASON_DRAINED: _ClassVar[LeaveReason]
    LEAVE_REASON_INTERRUPTED: _ClassVar[LeaveReason]
    LEAVE_REASON_HALTED: _ClassVar[LeaveReason]

class TransferRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_ROLE_UNSPECIFIED: _ClassVar[TransferRole]
    TRANSFER_ROLE_SEND: _ClassVar[TransferRole]
    TRANSFER_ROLE_RECEIVE: _ClassVar[TransferRole]

class HaltAnswer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HALT_ANSWER_UNSPECIFIED: _ClassVar[HaltAnswer]
    HALT_ANSWER_RETRY: _ClassVar[HaltAnswer]
    HALT_ANSWER_SKIP: _ClassVar[HaltAnswer]
    HALT_ANSWER_DROP: _ClassVar[HaltAnswer]

class LineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINE_STATE_UNSPECIFIED: _ClassVar[LineState]
    LINE_STATE_FORMING: _ClassVar[LineState]
    LINE_STATE_RUNNING: _ClassVar[LineState]
    LINE_STATE_SYNCING: _ClassVar[LineState]
    LINE_STATE_HALTED: _ClassVar[LineState]
    LINE_STATE_DRAINING: _ClassVar[LineState]
    LINE_STATE_COMPLETE: _ClassVar[LineState]
REASON_UNSPECIFIED: Reason
REASON_WRONG_RUN: Reason
REASON_LAYOUT_DIFFERS: Reason
REASON_PLAN_DIFFERS: Reason
REASON_DATASET_TOO_SMALL: Reason
REASON_VERSION: Reason
REASON_CAPABILITY: Reason
REASON_SLOT: Reason
REASON_FULL: Reason
REASON_TOKEN: Reason
REASON_COMPLETE: Reason
REASON_INVALID_MESSAGE: Reason
REASON_OPERATOR_TOKEN: Reason
REASON_OPERATOR_REFUSED: Reason
REASON_REGISTRATION_OFF: Reason
REASON_NOT_OFFERED: Reason
REASON_TOO_LARGE: Reason
REASON_TOO_MANY_STREAMS: Reason
REASON_MEMORY_LIMIT: Reason
REASON_PEER_GONE: Reason
REASON_REJOIN_NEEDED: Reason
REASON_SERVICE_LEAVING: Reason
REASON_INTERNAL: Reason
REASON_DROPPED: Reason
REASON_OTHER_USE: Reason
REASON_WORLD_DIFFERS: Reason
REASON_SAME_BITS: Reason
REASON_ARITHMETIC_DIFFERS: Reason
JOIN_STATUS_UNSPECIFIED: JoinStatus
JOIN_STATUS_IN_SYNC: JoinStatus
JOIN_STATUS_BEHIND: JoinStatus
JOIN_STATUS_RECORD_FOLLOWS: JoinStatus
JOIN_STATUS_FRESH: JoinStatus
MEAN_KIND_UNSPECIFIED: MeanKind
MEAN_KIND_WEIGHTED: MeanKind
MEAN_KIND_TRIMMED: MeanKind
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_NON_FINITE_GRADIENT: FaultKind
FAULT_KIND_NON_FINITE_LOSS: FaultKind
FAULT_KIND_ENCODING_OVERFLOW: FaultKind
FAULT_KIND_NON_FINITE_AVERAGE: FaultKind
FAULT_KIND_PROTOCOL: FaultKind
FAULT_KIND_DATA_STREAM_LOST: FaultKind
FAULT_KIND_STALE_ROUND: FaultKind
FAULT_KIND_SCRIPT_RAISED: FaultKind
FAULT_KIND_CHECKPOINT: FaultKind
FAULT_KIND_CORRUPT_CHUNK: FaultKind
ACTIVITY_UNSPECIFIED: Activity
ACTIVITY_IDLE: Activity
ACTIVITY_LOADING: Activity
ACTIVITY_COMPUTING: Activity
ACTIVITY_EXCHANGING: Activity
ACTIVITY_COMMITTING: Activity
ACTIVITY_EVALUATING: Activity
ACTIVITY_BUSY: Activity
ACTIVITY_SYNCING: Activity
ACTIVITY_HALTED: Activity
SLOW_PHASE_UNSPECIFIED: SlowPhase
SLOW_PHASE_DATA: SlowPhase
SLOW_PHASE_FORWARD: SlowPhase
SLOW_PHASE_BACKWARD: SlowPhase
SLOW_PHASE_OPTIMIZER: SlowPhase
SLOW_PHASE_EXCHANGE: SlowPhase
SLOW_PHASE_DISK: SlowPhase
SLOW_PHASE_SCRIPT: SlowPhase
LEAVE_REASON_UNSPECIFIED: LeaveReason
LEAVE_REASON_COMPLETE: LeaveReason
LEAVE_REASON_FAILED: LeaveReason
LEAVE_REASON_DRAINED: LeaveReason
LEAVE_REASON_INTERRUPTED: LeaveReason
LEAVE_REASON_HALTED: LeaveReason
TRANSFER_ROLE_UNSPECIFIED: TransferRole
TRANSFER_ROLE_SEND: TransferRole
TRANSFER_ROLE_RECEIVE: TransferRole
HALT_ANSWER_UNSPECIFIED: HaltAnswer
HALT_ANSWER_RETRY: HaltAnswer
HALT_ANSWER_SKIP: HaltAnswer
HALT_ANSWER_DROP: HaltAnswer
LINE_STATE_UNSPECIFIED: LineState
LINE_STATE_FORMING: LineState
LINE_STATE_RUNNING: LineState
LINE_STATE_SYNCING: LineState
LINE_STATE_HALTED: LineState
LINE_STATE_DRAINING: LineState
LINE_STATE_COMPLETE: LineState

class TrainRequest(_message.Message):
    __slots__ = ("join", "request_work", "step_ready", "fault", "heartbeat", "leave", "state_report", "scalar_all_reduce", "listening", "probe_answer", "computed", "explanation", "notice")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_WORK_FIELD_NUMBER: _ClassVar[int]
    STEP_READY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    STATE_REPORT_FIELD_NUMBER: _ClassVar[int]
    SCALAR_ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    PROBE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    request_work: RequestWork
    step_ready: StepReady
    fault: Fault
    heartbeat: Heartbeat
    leave: Leave
    state_report: StateReport
    scalar_all_reduce: ScalarAllReduce
    listening: Listening
    probe_answer: ProbeAnswer
    computed: Computed
    explanation: Explanation
    notice: Notice
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., request_work: _Optional[_Union[RequestWork, _Mapping]] = ..., step_ready: _Optional[_Union[StepReady, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., state_report: _Optional[_Union[StateReport, _Mapping]] = ..., scalar_all_reduce: _Optional[_Union[ScalarAllReduce, _Mapping]] = ..., listening: _Optional[_Union[Listening, _Mapping]] = ..., probe_answer: _Optional[_Union[ProbeAnswer, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class TrainResponse(_message.Message):
    __slots__ = ("join_accepted", "shard_assignment", "step_committed", "halt", "resume", "shutdown", "state_transfer", "heartbeat_answer", "scalar_all_reduce_result", "round_voided", "learn", "probe", "late", "explain")
    JOIN_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SHARD_ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    STEP_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    STATE_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SCALAR_ALL_REDUCE_RESULT_FIELD_NUMBER: _ClassVar[int]
    ROUND_VOIDED_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    join_accepted: JoinAccepted
    shard_assignment: ShardAssignment
    step_committed: StepCommitted
    halt: Halt
    resume: Resume
    shutdown: Shutdown
    state_transfer: StateTransfer
    heartbeat_answer: HeartbeatAnswer
    scalar_all_reduce_result: ScalarAllReduceResult
    round_voided: RoundVoided
    learn: Learn
    probe: Probe
    late: Late
    explain: Explain
    def __init__(self, join_accepted: _Optional[_Union[JoinAccepted, _Mapping]] = ..., shard_assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ..., step_committed: _Optional[_Union[StepCommitted, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., state_transfer: _Optional[_Union[StateTransfer, _Mapping]] = ..., heartbeat_answer: _Optional[_Union[HeartbeatAnswer, _Mapping]] = ..., scalar_all_reduce_result: _Optional[_Union[ScalarAllReduceResult, _Mapping]] = ..., round_voided: _Optional[_Union[RoundVoided, _Mapping]] = ..., learn: _Optional[_Union[Learn, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("kind", "name", "memory_bytes", "cores")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    memory_bytes: int
    cores: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., cores: _Optional[int] = ...) -> None: ...

class RunPlan(_message.Message):
    __slots__ = ("dataset_size", "global_batch", "seed", "total_steps", "total_epochs", "data_digest", "drop_last", "sparse", "grain", "tree")
    DATASET_SIZE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DATA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    GRAIN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    dataset_size: int
    global_batch: int
    seed: int
    total_steps: int
    total_epochs: int
    data_digest: bytes
    drop_last: bool
    sparse: bool
    grain: int
    tree: int
    def __init__(self, dataset_size: _Optional[int] = ..., global_batch: _Optional[int] = ..., seed: _Optional[int] = ..., total_steps: _Optional[int] = ..., total_epochs: _Optional[int] = ..., data_digest: _Optional[bytes] = ..., drop_last: bool = ..., sparse: bool = ..., grain: _Optional[int] = ..., tree: _Optional[int] = ...) -> None: ...

class CheckpointPlan(_message.Message):
    __slots__ = ("every", "folder", "keep")
    EVERY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    every: int
    folder: str
    keep: int
    def __init__(self, every: _Optional[int] = ..., folder: _Optional[str] = ..., keep: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "folder", "head")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    step: int
    folder: str
    head: _record_pb2.Key
    def __init__(self, step: _Optional[int] = ..., folder: _Optional[str] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class ProcessPlace(_message.Message):
    __slots__ = ("host", "id")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    host: bytes
    id: int
    def __init__(self, host: _Optional[bytes] = ..., id: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("run_id", "node_id", "launch_slot", "incarnation", "devices", "backend", "protocol_version", "capabilities", "layout", "plan", "metrics_address", "head", "cursor", "step", "held_key", "greatest_term", "halt", "token", "mid_script", "checkpoints", "speed_hint", "pacing", "process", "spare", "arithmetic")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_KEY_FIELD_NUMBER: _ClassVar[int]
    GREATEST_TERM_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MID_SCRIPT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    SPEED_HINT_FIELD_NUMBER: _ClassVar[int]
    PACING_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node_id: str
    launch_slot: int
    incarnation: int
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    backend: str
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    layout: _layout_pb2.Layout
    plan: RunPlan
    metrics_address: str
    head: _record_pb2.Key
    cursor: _record_pb2.Cursor
    step: int
    held_key: _record_pb2.Key
    greatest_term: int
    halt: _halt_pb2.HaltEvidence
    token: bytes
    mid_script: bool
    checkpoints: CheckpointPlan
    speed_hint: float
    pacing: bytes
    process: ProcessPlace
    spare: bool
    arithmetic: _containers.RepeatedCompositeFieldContainer[ArithmeticItem]
    def __init__(self, run_id: _Optional[str] = ..., node_id: _Optional[str] = ..., launch_slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., backend: _Optional[str] = ..., protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[_layout_pb2.Layout, _Mapping]] = ..., plan: _Optional[_Union[RunPlan, _Mapping]] = ..., metrics_address: _Optional[str] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., cursor: _Optional[_Union[_record_pb2.Cursor, _Mapping]] = ..., step: _Optional[int] = ..., held_key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., greatest_term: _Optional[int] = ..., halt: _Optional[_Union[_halt_pb2.HaltEvidence, _Mapping]] = ..., token: _Optional[bytes] = ..., mid_script: bool = ..., checkpoints: _Optional[_Union[CheckpointPlan, _Mapping]] = ..., speed_hint: _Optional[float] = ..., pacing: _Optional[bytes] = ..., process: _Optional[_Union[ProcessPlace, _Mapping]] = ..., spare: bool = ..., arithmetic: _Optional[_Iterable[_Union[ArithmeticItem, _Mapping]]] = ...) -> None: ...

class ArithmeticItem(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Liveness(_message.Message):
    __slots__ = ("lease_s", "heartbeat_s", "reconnect_s")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    heartbeat_s: float
    reconnect_s: float
    def __init__(self, lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., reconnect_s: _Optional[float] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("chunk_elements", "encoding", "answer_encoding", "digest_every", "max_steps", "gradient_norm", "topology", "local_steps", "outer", "overlap", "max_grad_norm", "own_gradient_norm", "average_buffers", "quorum", "max_late", "fragments", "mix", "topk_kept", "overlap_steps", "mean")
    CHUNK_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ENCODING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_EVERY_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    OWN_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    MAX_LATE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    TOPK_KEPT_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    chunk_elements: int
    encoding: _layout_pb2.Encoding
    answer_encoding: _layout_pb2.Encoding
    digest_every: int
    max_steps: int
    gradient_norm: bool
    topology: _ring_pb2.Topology
    local_steps: int
    outer: OuterOptimizer
    overlap: bool
    max_grad_norm: float
    own_gradient_norm: bool
    average_buffers: bool
    quorum: float
    max_late: int
    fragments: int
    mix: float
    topk_kept: int
    overlap_steps: int
    mean: MeanKind
    def __init__(self, chunk_elements: _Optional[int] = ..., encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., answer_encoding: _Optional[_Union[_layout_pb2.Encoding, str]] = ..., digest_every: _Optional[int] = ..., max_steps: _Optional[int] = ..., gradient_norm: bool = ..., topology: _Optional[_Union[_ring_pb2.Topology, str]] = ..., local_steps: _Optional[int] = ..., outer: _Optional[_Union[OuterOptimizer, _Mapping]] = ..., overlap: bool = ..., max_grad_norm: _Optional[float] = ..., own_gradient_norm: bool = ..., average_buffers: bool = ..., quorum: _Optional[float] = ..., max_late: _Optional[int] = ..., fragments: _Optional[int] = ..., mix: _Optional[float] = ..., topk_kept: _Optional[int] = ..., overlap_steps: _Optional[int] = ..., mean: _Optional[_Union[MeanKind, str]] = ...) -> None: ...

class OuterOptimizer(_message.Message):
    __slots__ = ("learning_rate", "momentum")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    momentum: float
    def __init__(self, learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class ReducerShare(_message.Message):
    __slots__ = ("address", "start_element", "stop_element")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    START_ELEMENT_FIELD_NUMBER: _ClassVar[int]
    STOP_ELEMENT_FIELD_NUMBER: _ClassVar[int]
    address: str
    start_element: int
    stop_element: int
    def __init__(self, address: _Optional[str] = ..., start_element: _Optional[int] = ..., stop_element: _Optional[int] = ...) -> None: ...

class JoinAccepted(_message.Message):
    __slots__ = ("worker", "session_token", "reducers", "plan", "policy", "liveness", "join_status", "head", "step", "term", "halt", "run_id", "capabilities", "control_socket")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REDUCERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    JOIN_STATUS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    worker: int
    session_token: bytes
    reducers: _containers.RepeatedCompositeFieldContainer[ReducerShare]
    plan: RunPlan
    policy: Policy
    liveness: Liveness
    join_status: JoinStatus
    head: _record_pb2.Key
    step: int
    term: int
    halt: _halt_pb2.HaltEvidence
    run_id: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    control_socket: str
    def __init__(self, worker: _Optional[int] = ..., session_token: _Optional[bytes] = ..., reducers: _Optional[_Iterable[_Union[ReducerShare, _Mapping]]] = ..., plan: _Optional[_Union[RunPlan, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., liveness: _Optional[_Union[Liveness, _Mapping]] = ..., join_status: _Optional[_Union[JoinStatus, str]] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., step: _Optional[int] = ..., term: _Optional[int] = ..., halt: _Optional[_Union[_halt_pb2.HaltEvidence, _Mapping]] = ..., run_id: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., control_socket: _Optional[str] = ...) -> None: ...

class RequestWork(_message.Message):
    __slots__ = ("head", "ring_address", "leaves_epoch", "checkpoint", "checkpoint_begun", "voided")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    RING_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    head: _record_pb2.Key
    ring_address: str
    leaves_epoch: bool
    checkpoint: Checkpoint
    checkpoint_begun: int
    voided: _record_pb2.Key
    def __init__(self, head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., ring_address: _Optional[str] = ..., leaves_epoch: bool = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., checkpoint_begun: _Optional[int] = ..., voided: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class ShardAssignment(_message.Message):
    __slots__ = ("key", "parent", "roster", "rank", "world_size", "step", "attempt", "epoch", "positions", "batch", "micro_batches", "reducers", "ring", "writes_checkpoint", "checkpoint_step", "targets", "interleaved", "window", "learning_rate_scale", "ahead", "ahead_batch", "ahead_micro_batches", "copies_buffers", "wants_digest", "attends", "attended", "attests", "verifies", "anew", "itemised", "change_scale", "fragment", "sums")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    REDUCERS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    WRITES_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BATCH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    COPIES_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    WANTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTENDS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_FIELD_NUMBER: _ClassVar[int]
    ATTESTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIES_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    ITEMISED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_SCALE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    parent: _record_pb2.Key
    roster: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    world_size: int
    step: int
    attempt: int
    epoch: int
    positions: _containers.RepeatedCompositeFieldContainer[_record_pb2.PositionRange]
    batch: _record_pb2.PositionRange
    micro_batches: int
    reducers: _containers.RepeatedCompositeFieldContainer[ReducerShare]
    ring: _ring_pb2.RingNeighbours
    writes_checkpoint: bool
    checkpoint_step: int
    targets: _containers.RepeatedScalarFieldContainer[int]
    interleaved: bool
    window: int
    learning_rate_scale: float
    ahead: _containers.RepeatedCompositeFieldContainer[_record_pb2.PositionRange]
    ahead_batch: _record_pb2.PositionRange
    ahead_micro_batches: int
    copies_buffers: bool
    wants_digest: bool
    attends: bool
    attended: bool
    attests: bool
    verifies: _containers.RepeatedScalarFieldContainer[int]
    anew: bool
    itemised: bool
    change_scale: float
    fragment: int
    sums: _containers.RepeatedCompositeFieldContainer[NodeOwner]
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., parent: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., roster: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_record_pb2.PositionRange, _Mapping]]] = ..., batch: _Optional[_Union[_record_pb2.PositionRange, _Mapping]] = ..., micro_batches: _Optional[int] = ..., reducers: _Optional[_Iterable[_Union[ReducerShare, _Mapping]]] = ..., ring: _Optional[_Union[_ring_pb2.RingNeighbours, _Mapping]] = ..., writes_checkpoint: bool = ..., checkpoint_step: _Optional[int] = ..., targets: _Optional[_Iterable[int]] = ..., interleaved: bool = ..., window: _Optional[int] = ..., learning_rate_scale: _Optional[float] = ..., ahead: _Optional[_Iterable[_Union[_record_pb2.PositionRange, _Mapping]]] = ..., ahead_batch: _Optional[_Union[_record_pb2.PositionRange, _Mapping]] = ..., ahead_micro_batches: _Optional[int] = ..., copies_buffers: bool = ..., wants_digest: bool = ..., attends: bool = ..., attended: bool = ..., attests: bool = ..., verifies: _Optional[_Iterable[int]] = ..., anew: bool = ..., itemised: bool = ..., change_scale: _Optional[float] = ..., fragment: _Optional[int] = ..., sums: _Optional[_Iterable[_Union[NodeOwner, _Mapping]]] = ...) -> None: ...

class NodeOwner(_message.Message):
    __slots__ = ("first", "grains", "rank", "relayed")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    first: int
    grains: int
    rank: int
    relayed: bool
    def __init__(self, first: _Optional[int] = ..., grains: _Optional[int] = ..., rank: _Optional[int] = ..., relayed: bool = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("compute_s", "exchange_s", "wait_s", "data_s", "busy_s", "micro_batches", "computed")
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    compute_s: float
    exchange_s: float
    wait_s: float
    data_s: float
    busy_s: float
    micro_batches: int
    computed: int
    def __init__(self, compute_s: _Optional[float] = ..., exchange_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., data_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., micro_batches: _Optional[int] = ..., computed: _Optional[int] = ...) -> None: ...

class WeightsDigest(_message.Message):
    __slots__ = ("head", "sha256", "prefixes", "base_hashed")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    BASE_HASHED_FIELD_NUMBER: _ClassVar[int]
    head: _record_pb2.Key
    sha256: bytes
    prefixes: bytes
    base_hashed: bool
    def __init__(self, head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., sha256: _Optional[bytes] = ..., prefixes: _Optional[bytes] = ..., base_hashed: bool = ...) -> None: ...

class StepReady(_message.Message):
    __slots__ = ("key", "loss_sum", "weight", "samples", "correct", "timings", "digest", "end_of_data", "stop_reason", "total_weight", "world_size", "gradient_norm", "own_gradient_norm", "overflow", "next", "node_losses", "attested", "averages_digest", "block_norms", "mean_check", "apart")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    OWN_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_LOSSES_FIELD_NUMBER: _ClassVar[int]
    ATTESTED_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NORMS_FIELD_NUMBER: _ClassVar[int]
    MEAN_CHECK_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    loss_sum: float
    weight: float
    samples: int
    correct: int
    timings: Timings
    digest: WeightsDigest
    end_of_data: bool
    stop_reason: str
    total_weight: float
    world_size: int
    gradient_norm: float
    own_gradient_norm: float
    overflow: bool
    next: RequestWork
    node_losses: _containers.RepeatedCompositeFieldContainer[NodeLoss]
    attested: _containers.RepeatedCompositeFieldContainer[Attestation]
    averages_digest: bytes
    block_norms: _containers.RepeatedScalarFieldContainer[float]
    mean_check: MeanCheck
    apart: _containers.RepeatedCompositeFieldContainer[NodeApart]
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., loss_sum: _Optional[float] = ..., weight: _Optional[float] = ..., samples: _Optional[int] = ..., correct: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., digest: _Optional[_Union[WeightsDigest, _Mapping]] = ..., end_of_data: bool = ..., stop_reason: _Optional[str] = ..., total_weight: _Optional[float] = ..., world_size: _Optional[int] = ..., gradient_norm: _Optional[float] = ..., own_gradient_norm: _Optional[float] = ..., overflow: bool = ..., next: _Optional[_Union[RequestWork, _Mapping]] = ..., node_losses: _Optional[_Iterable[_Union[NodeLoss, _Mapping]]] = ..., attested: _Optional[_Iterable[_Union[Attestation, _Mapping]]] = ..., averages_digest: _Optional[bytes] = ..., block_norms: _Optional[_Iterable[float]] = ..., mean_check: _Optional[_Union[MeanCheck, _Mapping]] = ..., apart: _Optional[_Iterable[_Union[NodeApart, _Mapping]]] = ...) -> None: ...

class MeanCheck(_message.Message):
    __slots__ = ("expected", "came", "relayed", "apart")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    expected: bytes
    came: bytes
    relayed: _containers.RepeatedScalarFieldContainer[bytes]
    apart: ElementApart
    def __init__(self, expected: _Optional[bytes] = ..., came: _Optional[bytes] = ..., relayed: _Optional[_Iterable[bytes]] = ..., apart: _Optional[_Union[ElementApart, _Mapping]] = ...) -> None: ...

class NodeApart(_message.Message):
    __slots__ = ("first", "grains", "own", "other", "element")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    first: int
    grains: int
    own: bytes
    other: bytes
    element: ElementApart
    def __init__(self, first: _Optional[int] = ..., grains: _Optional[int] = ..., own: _Optional[bytes] = ..., other: _Optional[bytes] = ..., element: _Optional[_Union[ElementApart, _Mapping]] = ...) -> None: ...

class ElementApart(_message.Message):
    __slots__ = ("block", "element", "expected", "came")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    block: int
    element: int
    expected: float
    came: float
    def __init__(self, block: _Optional[int] = ..., element: _Optional[int] = ..., expected: _Optional[float] = ..., came: _Optional[float] = ...) -> None: ...

class Attestation(_message.Message):
    __slots__ = ("first", "grains", "digest", "samples", "components")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    grains: int
    digest: bytes
    samples: bytes
    components: bytes
    def __init__(self, first: _Optional[int] = ..., grains: _Optional[int] = ..., digest: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., components: _Optional[bytes] = ...) -> None: ...

class NodeLoss(_message.Message):
    __slots__ = ("first", "grains", "weight", "loss_sum")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    first: int
    grains: int
    weight: float
    loss_sum: float
    def __init__(self, first: _Optional[int] = ..., grains: _Optional[int] = ..., weight: _Optional[float] = ..., loss_sum: _Optional[float] = ...) -> None: ...

class StepCommitted(_message.Message):
    __slots__ = ("record", "loss", "samples", "contributors", "stop_reason", "correct", "pacing", "overflow", "gradient_scale", "assignment")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    PACING_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    record: _record_pb2.Record
    loss: float
    samples: int
    contributors: int
    stop_reason: str
    correct: int
    pacing: bytes
    overflow: bool
    gradient_scale: float
    assignment: ShardAssignment
    def __init__(self, record: _Optional[_Union[_record_pb2.Record, _Mapping]] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ..., contributors: _Optional[int] = ..., stop_reason: _Optional[str] = ..., correct: _Optional[int] = ..., pacing: _Optional[bytes] = ..., overflow: bool = ..., gradient_scale: _Optional[float] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class RoundVoided(_message.Message):
    __slots__ = ("key", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    message: str
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("key", "kind", "rank", "block", "element", "value", "message", "error_type", "greatest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    kind: FaultKind
    rank: int
    block: int
    element: int
    value: str
    message: str
    error_type: str
    greatest: _record_pb2.Key
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., kind: _Optional[_Union[FaultKind, str]] = ..., rank: _Optional[int] = ..., block: _Optional[int] = ..., element: _Optional[int] = ..., value: _Optional[str] = ..., message: _Optional[str] = ..., error_type: _Optional[str] = ..., greatest: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class LoggedScalar(_message.Message):
    __slots__ = ("name", "step", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    value: float
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "activity", "detail", "scalars", "busy_cores", "memory_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    BUSY_CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    activity: Activity
    detail: str
    scalars: _containers.RepeatedCompositeFieldContainer[LoggedScalar]
    busy_cores: float
    memory_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., activity: _Optional[_Union[Activity, str]] = ..., detail: _Optional[str] = ..., scalars: _Optional[_Iterable[_Union[LoggedScalar, _Mapping]]] = ..., busy_cores: _Optional[float] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class HeartbeatAnswer(_message.Message):
    __slots__ = ("sequence", "unix_time_s")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_time_s: float
    def __init__(self, sequence: _Optional[int] = ..., unix_time_s: _Optional[float] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ProbeAnswer(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CodeLine(_message.Message):
    __slots__ = ("file", "line", "function", "own")
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    file: str
    line: int
    function: str
    own: bool
    def __init__(self, file: _Optional[str] = ..., line: _Optional[int] = ..., function: _Optional[str] = ..., own: bool = ...) -> None: ...

class ThreadStack(_message.Message):
    __slots__ = ("thread", "lines")
    THREAD_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    thread: str
    lines: _containers.RepeatedCompositeFieldContainer[CodeLine]
    def __init__(self, thread: _Optional[str] = ..., lines: _Optional[_Iterable[_Union[CodeLine, _Mapping]]] = ...) -> None: ...

class ProcessFacts(_message.Message):
    __slots__ = ("apart_s", "script_cores", "process_cores", "child_cores", "children", "waited_for_core", "host_busy_cores", "host_cores", "major_faults", "swapped_in", "swap_bytes", "memory_bytes", "free_bytes", "waited_for_disk", "disk_bytes", "retransmitted", "unsent_bytes", "delivered", "gpu_mhz", "gpu_most_mhz", "gpu_throttled", "held_s", "threads_waited", "allowed_cores", "throttled", "stolen_cores", "cpu_pressure", "memory_pressure", "disk_pressure", "busiest", "busiest_cores", "largest", "largest_bytes")
    APART_S_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_CORES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_CORES_FIELD_NUMBER: _ClassVar[int]
    CHILD_CORES_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_CORE_FIELD_NUMBER: _ClassVar[int]
    HOST_BUSY_CORES_FIELD_NUMBER: _ClassVar[int]
    HOST_CORES_FIELD_NUMBER: _ClassVar[int]
    MAJOR_FAULTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_DISK_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_FIELD_NUMBER: _ClassVar[int]
    UNSENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    GPU_MHZ_FIELD_NUMBER: _ClassVar[int]
    GPU_MOST_MHZ_FIELD_NUMBER: _ClassVar[int]
    GPU_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    THREADS_WAITED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_CORES_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_FIELD_NUMBER: _ClassVar[int]
    STOLEN_CORES_FIELD_NUMBER: _ClassVar[int]
    CPU_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DISK_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_CORES_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    LARGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    apart_s: float
    script_cores: float
    process_cores: float
    child_cores: float
    children: int
    waited_for_core: float
    host_busy_cores: float
    host_cores: int
    major_faults: float
    swapped_in: float
    swap_bytes: int
    memory_bytes: int
    free_bytes: int
    waited_for_disk: float
    disk_bytes: float
    retransmitted: int
    unsent_bytes: int
    delivered: float
    gpu_mhz: float
    gpu_most_mhz: float
    gpu_throttled: str
    held_s: float
    threads_waited: float
    allowed_cores: float
    throttled: float
    stolen_cores: float
    cpu_pressure: float
    memory_pressure: float
    disk_pressure: float
    busiest: str
    busiest_cores: float
    largest: str
    largest_bytes: int
    def __init__(self, apart_s: _Optional[float] = ..., script_cores: _Optional[float] = ..., process_cores: _Optional[float] = ..., child_cores: _Optional[float] = ..., children: _Optional[int] = ..., waited_for_core: _Optional[float] = ..., host_busy_cores: _Optional[float] = ..., host_cores: _Optional[int] = ..., major_faults: _Optional[float] = ..., swapped_in: _Optional[float] = ..., swap_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., waited_for_disk: _Optional[float] = ..., disk_bytes: _Optional[float] = ..., retransmitted: _Optional[int] = ..., unsent_bytes: _Optional[int] = ..., delivered: _Optional[float] = ..., gpu_mhz: _Optional[float] = ..., gpu_most_mhz: _Optional[float] = ..., gpu_throttled: _Optional[str] = ..., held_s: _Optional[float] = ..., threads_waited: _Optional[float] = ..., allowed_cores: _Optional[float] = ..., throttled: _Optional[float] = ..., stolen_cores: _Optional[float] = ..., cpu_pressure: _Optional[float] = ..., memory_pressure: _Optional[float] = ..., disk_pressure: _Optional[float] = ..., busiest: _Optional[str] = ..., busiest_cores: _Optional[float] = ..., largest: _Optional[str] = ..., largest_bytes: _Optional[int] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("number", "phase", "detail", "stacks", "facts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    phase: SlowPhase
    detail: str
    stacks: _containers.RepeatedCompositeFieldContainer[ThreadStack]
    facts: ProcessFacts
    def __init__(self, number: _Optional[int] = ..., phase: _Optional[_Union[SlowPhase, str]] = ..., detail: _Optional[str] = ..., stacks: _Optional[_Iterable[_Union[ThreadStack, _Mapping]]] = ..., facts: _Optional[_Union[ProcessFacts, _Mapping]] = ...) -> None: ...

class Slowness(_message.Message):
    __slots__ = ("worker", "step", "phase", "late_s", "text", "guilty", "at_unix_s", "stacks", "facts")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GUILTY_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    step: int
    phase: SlowPhase
    late_s: float
    text: str
    guilty: CodeLine
    at_unix_s: float
    stacks: _containers.RepeatedCompositeFieldContainer[ThreadStack]
    facts: ProcessFacts
    def __init__(self, worker: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[_Union[SlowPhase, str]] = ..., late_s: _Optional[float] = ..., text: _Optional[str] = ..., guilty: _Optional[_Union[CodeLine, _Mapping]] = ..., at_unix_s: _Optional[float] = ..., stacks: _Optional[_Iterable[_Union[ThreadStack, _Mapping]]] = ..., facts: _Optional[_Union[ProcessFacts, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "message", "final_step", "digest", "checkpoint")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINAL_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    reason: LeaveReason
    message: str
    final_step: int
    digest: WeightsDigest
    checkpoint: Checkpoint
    def __init__(self, reason: _Optional[_Union[LeaveReason, str]] = ..., message: _Optional[str] = ..., final_step: _Optional[int] = ..., digest: _Optional[_Union[WeightsDigest, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Learn(_message.Message):
    __slots__ = ("reducers",)
    REDUCERS_FIELD_NUMBER: _ClassVar[int]
    reducers: _containers.RepeatedCompositeFieldContainer[ReducerShare]
    def __init__(self, reducers: _Optional[_Iterable[_Union[ReducerShare, _Mapping]]] = ...) -> None: ...

class Listening(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateTransfer(_message.Message):
    __slots__ = ("transfer_id", "head", "role", "address", "peer", "step", "cursor", "beside_training", "checkpoint")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BESIDE_TRAINING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    head: _record_pb2.Key
    role: TransferRole
    address: str
    peer: int
    step: int
    cursor: _record_pb2.Cursor
    beside_training: bool
    checkpoint: Checkpoint
    def __init__(self, transfer_id: _Optional[int] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., role: _Optional[_Union[TransferRole, str]] = ..., address: _Optional[str] = ..., peer: _Optional[int] = ..., step: _Optional[int] = ..., cursor: _Optional[_Union[_record_pb2.Cursor, _Mapping]] = ..., beside_training: bool = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class StateReport(_message.Message):
    __slots__ = ("transfer_id", "head", "failure")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    head: _record_pb2.Key
    failure: str
    def __init__(self, transfer_id: _Optional[int] = ..., head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class ScalarAllReduce(_message.Message):
    __slots__ = ("head", "sequence", "value", "weight", "digest", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: _record_pb2.Key
    sequence: int
    value: float
    weight: float
    digest: WeightsDigest
    data: bytes
    def __init__(self, head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., sequence: _Optional[int] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ..., digest: _Optional[_Union[WeightsDigest, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ScalarAllReduceResult(_message.Message):
    __slots__ = ("head", "sequence", "value", "weight", "contributors", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: _record_pb2.Key
    sequence: int
    value: float
    weight: float
    contributors: int
    data: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, head: _Optional[_Union[_record_pb2.Key, _Mapping]] = ..., sequence: _Optional[int] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ..., contributors: _Optional[int] = ..., data: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Halt(_message.Message):
    __slots__ = ("evidence",)
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    evidence: _halt_pb2.HaltEvidence
    def __init__(self, evidence: _Optional[_Union[_halt_pb2.HaltEvidence, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("halt_id", "answer")
    HALT_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    halt_id: int
    answer: HaltAnswer
    def __init__(self, halt_id: _Optional[int] = ..., answer: _Optional[_Union[HaltAnswer, str]] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("message", "stop_reason", "keep_state")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATE_FIELD_NUMBER: _ClassVar[int]
    message: str
    stop_reason: str
    keep_state: bool
    def __init__(self, message: _Optional[str] = ..., stop_reason: _Optional[str] = ..., keep_state: bool = ...) -> None: ...

class RegisterReducerRequest(_message.Message):
    __slots__ = ("offer", "proof")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    offer: ReducerOffer
    proof: ReducerProof
    def __init__(self, offer: _Optional[_Union[ReducerOffer, _Mapping]] = ..., proof: _Optional[_Union[ReducerProof, _Mapping]] = ...) -> None: ...

class RegisterReducerResponse(_message.Message):
    __slots__ = ("challenge", "registered", "dismissed", "round_opening", "transfer_opening", "sessions_revoked")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    DISMISSED_FIELD_NUMBER: _ClassVar[int]
    ROUND_OPENING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_OPENING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    challenge: ReducerChallenge
    registered: ReducerRegistered
    dismissed: ReducerDismissed
    round_opening: RoundOpening
    transfer_opening: TransferOpening
    sessions_revoked: SessionsRevoked
    def __init__(self, challenge: _Optional[_Union[ReducerChallenge, _Mapping]] = ..., registered: _Optional[_Union[ReducerRegistered, _Mapping]] = ..., dismissed: _Optional[_Union[ReducerDismissed, _Mapping]] = ..., round_opening: _Optional[_Union[RoundOpening, _Mapping]] = ..., transfer_opening: _Optional[_Union[TransferOpening, _Mapping]] = ..., sessions_revoked: _Optional[_Union[SessionsRevoked, _Mapping]] = ...) -> None: ...

class ReducerOffer(_message.Message):
    __slots__ = ("run_id", "address", "protocol_version", "metrics_address")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    address: str
    protocol_version: int
    metrics_address: str
    def __init__(self, run_id: _Optional[str] = ..., address: _Optional[str] = ..., protocol_version: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class ReducerChallenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class ReducerProof(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    def __init__(self, mac: _Optional[bytes] = ...) -> None: ...

class ReducerRegistered(_message.Message):
    __slots__ = ("run_id", "announces")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    announces: bool
    def __init__(self, run_id: _Optional[str] = ..., announces: bool = ...) -> None: ...

class RoundOpening(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _record_pb2.Key
    def __init__(self, key: _Optional[_Union[_record_pb2.Key, _Mapping]] = ...) -> None: ...

class TransferOpening(_message.Message):
    __slots__ = ("transfer_id", "donor", "joiner", "beside_training", "holds_up")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    JOINER_FIELD_NUMBER: _ClassVar[int]
    BESIDE_TRAINING_FIELD_NUMBER: _ClassVar[int]
    HOLDS_UP_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    donor: Session
    joiner: Session
    beside_training: bool
    holds_up: bool
    def __init__(self, transfer_id: _Optional[int] = ..., donor: _Optional[_Union[Session, _Mapping]] = ..., joiner: _Optional[_Union[Session, _Mapping]] = ..., beside_training: bool = ..., holds_up: bool = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("worker", "term", "number")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    term: int
    number: int
    def __init__(self, worker: _Optional[int] = ..., term: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SessionsRevoked(_message.Message):
    __slots__ = ("least",)
    LEAST_FIELD_NUMBER: _ClassVar[int]
    least: Session
    def __init__(self, least: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ReducerDismissed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "rank", "node_id", "device", "activity", "detail", "step", "samples_per_second", "waiting_ratio", "heartbeat_age_s", "live", "metrics_address", "final_digest", "share", "micro_batches", "hardware", "timings", "step_s", "late_records", "owed_positions", "slowness", "slow", "notice")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WAITING_RATIO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINAL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LATE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    OWED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    rank: int
    node_id: str
    device: str
    activity: Activity
    detail: str
    step: int
    samples_per_second: float
    waiting_ratio: float
    heartbeat_age_s: float
    live: bool
    metrics_address: str
    final_digest: bytes
    share: float
    micro_batches: int
    hardware: Device
    timings: Timings
    step_s: float
    late_records: int
    owed_positions: int
    slowness: Slowness
    slow: str
    notice: str
    def __init__(self, worker: _Optional[int] = ..., rank: _Optional[int] = ..., node_id: _Optional[str] = ..., device: _Optional[str] = ..., activity: _Optional[_Union[Activity, str]] = ..., detail: _Optional[str] = ..., step: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., waiting_ratio: _Optional[float] = ..., heartbeat_age_s: _Optional[float] = ..., live: bool = ..., metrics_address: _Optional[str] = ..., final_digest: _Optional[bytes] = ..., share: _Optional[float] = ..., micro_batches: _Optional[int] = ..., hardware: _Optional[_Union[Device, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., step_s: _Optional[float] = ..., late_records: _Optional[int] = ..., owed_positions: _Optional[int] = ..., slowness: _Optional[_Union[Slowness, _Mapping]] = ..., slow: _Optional[str] = ..., notice: _Optional[str] = ...) -> None: ...

class LineStatus(_message.Message):
    __slots__ = ("run_id", "state", "step", "attempt", "cursor", "loss", "total_steps", "live", "participating", "workers", "halt", "samples_per_second", "exchange_s", "hidden_ratio", "metrics_url", "expect_workers", "waiting_for", "samples", "stop_reason", "reducers", "expect_reducers", "correct", "checkpoints", "schedule", "schedule_note", "tcp_port", "session", "grain", "verification", "one_arithmetic", "quorum", "fragments", "slowness", "cost", "noise_scale", "mean", "trimmed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_RATIO_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    EXPECT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    REDUCERS_FIELD_NUMBER: _ClassVar[int]
    EXPECT_REDUCERS_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_NOTE_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GRAIN_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    ONE_ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NOISE_SCALE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: LineState
    step: int
    attempt: int
    cursor: _record_pb2.Cursor
    loss: float
    total_steps: int
    live: int
    participating: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    halt: _halt_pb2.HaltEvidence
    samples_per_second: float
    exchange_s: float
    hidden_ratio: float
    metrics_url: str
    expect_workers: int
    waiting_for: str
    samples: int
    stop_reason: str
    reducers: _containers.RepeatedCompositeFieldContainer[ReducerStatus]
    expect_reducers: int
    correct: int
    checkpoints: CheckpointStatus
    schedule: str
    schedule_note: str
    tcp_port: int
    session: _session_pb2.SessionStatus
    grain: int
    verification: VerificationStatus
    one_arithmetic: bool
    quorum: float
    fragments: int
    slowness: _containers.RepeatedCompositeFieldContainer[Slowness]
    cost: RunCost
    noise_scale: float
    mean: MeanKind
    trimmed: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[LineState, str]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., cursor: _Optional[_Union[_record_pb2.Cursor, _Mapping]] = ..., loss: _Optional[float] = ..., total_steps: _Optional[int] = ..., live: _Optional[int] = ..., participating: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., halt: _Optional[_Union[_halt_pb2.HaltEvidence, _Mapping]] = ..., samples_per_second: _Optional[float] = ..., exchange_s: _Optional[float] = ..., hidden_ratio: _Optional[float] = ..., metrics_url: _Optional[str] = ..., expect_workers: _Optional[int] = ..., waiting_for: _Optional[str] = ..., samples: _Optional[int] = ..., stop_reason: _Optional[str] = ..., reducers: _Optional[_Iterable[_Union[ReducerStatus, _Mapping]]] = ..., expect_reducers: _Optional[int] = ..., correct: _Optional[int] = ..., checkpoints: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., schedule: _Optional[str] = ..., schedule_note: _Optional[str] = ..., tcp_port: _Optional[int] = ..., session: _Optional[_Union[_session_pb2.SessionStatus, _Mapping]] = ..., grain: _Optional[int] = ..., verification: _Optional[_Union[VerificationStatus, _Mapping]] = ..., one_arithmetic: bool = ..., quorum: _Optional[float] = ..., fragments: _Optional[int] = ..., slowness: _Optional[_Iterable[_Union[Slowness, _Mapping]]] = ..., cost: _Optional[_Union[RunCost, _Mapping]] = ..., noise_scale: _Optional[float] = ..., mean: _Optional[_Union[MeanKind, str]] = ..., trimmed: _Optional[int] = ...) -> None: ...

class RunCost(_message.Message):
    __slots__ = ("machine_seconds", "price_per_hour", "currency", "cost", "samples_per_unit", "tokens_per_unit")
    MACHINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_UNIT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_UNIT_FIELD_NUMBER: _ClassVar[int]
    machine_seconds: float
    price_per_hour: float
    currency: str
    cost: float
    samples_per_unit: float
    tokens_per_unit: float
    def __init__(self, machine_seconds: _Optional[float] = ..., price_per_hour: _Optional[float] = ..., currency: _Optional[str] = ..., cost: _Optional[float] = ..., samples_per_unit: _Optional[float] = ..., tokens_per_unit: _Optional[float] = ...) -> None: ...

class VerificationStatus(_message.Message):
    __slots__ = ("fraction", "steps", "grains", "differences", "convicted")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    CONVICTED_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    steps: int
    grains: int
    differences: int
    convicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fraction: _Optional[float] = ..., steps: _Optional[int] = ..., grains: _Optional[int] = ..., differences: _Optional[int] = ..., convicted: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckpointStatus(_message.Message):
    __slots__ = ("writer", "node_id", "folder", "every", "last", "overdue", "elsewhere")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    writer: int
    node_id: str
    folder: str
    every: int
    last: Checkpoint
    overdue: int
    elsewhere: bool
    def __init__(self, writer: _Optional[int] = ..., node_id: _Optional[str] = ..., folder: _Optional[str] = ..., every: _Optional[int] = ..., last: _Optional[_Union[Checkpoint, _Mapping]] = ..., overdue: _Optional[int] = ..., elsewhere: bool = ...) -> None: ...

class ReducerStatus(_message.Message):
    __slots__ = ("address", "elements")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    elements: int
    def __init__(self, address: _Optional[str] = ..., elements: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: LineStatus
    def __init__(self, status: _Optional[_Union[LineStatus, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: LineStatus
    def __init__(self, status: _Optional[_Union[LineStatus, _Mapping]] = ...) -> None: ...

class PullCordRequest(_message.Message):
    __slots__ = ("run_id", "reason", "operator")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    operator: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., operator: _Optional[str] = ...) -> None: ...

class PullCordResponse(_message.Message):
    __slots__ = ("halt",)
    HALT_FIELD_NUMBER: _ClassVar[int]
    halt: _halt_pb2.HaltEvidence
    def __init__(self, halt: _Optional[_Union[_halt_pb2.HaltEvidence, _Mapping]] = ...) -> None: ...

class ClearHaltRequest(_message.Message):
    __slots__ = ("run_id", "halt_id", "answer", "worker", "operator")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HALT_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    halt_id: int
    answer: HaltAnswer
    worker: int
    operator: str
    def __init__(self, run_id: _Optional[str] = ..., halt_id: _Optional[int] = ..., answer: _Optional[_Union[HaltAnswer, str]] = ..., worker: _Optional[int] = ..., operator: _Optional[str] = ...) -> None: ...

class ClearHaltResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: LineStatus
    def __init__(self, status: _Optional[_Union[LineStatus, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id", "operator")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    operator: str
    def __init__(self, run_id: _Optional[str] = ..., operator: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: LineStatus
    def __init__(self, status: _Optional[_Union[LineStatus, _Mapping]] = ...) -> None: ...
