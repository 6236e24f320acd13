"""Capabilities: what a program can do that one of an earlier version can't.

A worker names its own in Join, and a coordinator in JoinAccepted. Where the one relies on the other
for something that not every version does, it looks for the name first. So two versions either work
together, or the missing capability is named. A name that is absent always means no. Those that
belong to a schedule are in `schedules`, and the ring's is in `ring`.
"""

from __future__ import annotations

from collections.abc import Iterable

from andon.protocol.encoding import Encoding

__all__ = [
    "BACK",
    "BLOCK_NORMS",
    "CONTROL_SOCKET",
    "COORDINATOR_CAPABILITIES",
    "COPIED_BUFFERS",
    "EXPLAINS",
    "HASHED_BASE",
    "INT2",
    "INT4",
    "INT8",
    "LEARNING",
    "LIMITS",
    "LISTENING",
    "MEAN_BUFFERS",
    "NORMS",
    "NOTICE",
    "OVERFLOW",
    "PROBE",
    "REDUCER_CAPABILITIES",
    "SAME_BITS",
    "STANDING",
    "TOPK",
    "TRIMMED",
    "VERIFIES",
    "WORKER_CAPABILITIES",
    "capabilities_of",
]

NORMS = "norms.v1"
"""The worker obeys `Policy.max_grad_norm` and `Policy.own_gradient_norm`."""
MEAN_BUFFERS = "mean-buffers.v1"
"""The worker obeys `Policy.average_buffers`."""
COPIED_BUFFERS = "copied-buffers.v1"
"""The worker obeys `ShardAssignment.copies_buffers`."""
OVERFLOW = "overflow.v1"
"""The worker obeys `StepCommitted.overflow`; the coordinator sets it."""
HASHED_BASE = "hashed-base.v1"
"""The coordinator tells digests that have hashes of frozen parameters from those that do not."""
LIMITS = "limits.v1"
"""The worker obeys `StepCommitted.gradient_scale`."""
BACK = "back.v1"
"""The worker obeys `StateTransfer.checkpoint`, and sets `Checkpoint.head`."""
BLOCK_NORMS = "block-norms.v1"
"""The coordinator compares `StepReady.block_norms`."""
INT8 = "int8.v1"
"""The program knows the encoding INT8_BLOCK: a worker sends and reads it, a reducer averages it."""
INT4 = "int4.v1"
"""The program knows the encoding INT4_BLOCK, likewise."""
INT2 = "int2.v1"
"""The program knows the encoding INT2_BLOCK: a worker sends it, a reducer averages it."""
TOPK = "topk.v1"
"""The program knows the encoding TOPK: a worker sends and reads it, a reducer averages it."""
STANDING = "standing.v1"
"""The coordinator takes `StepReady.next`, and answers it with `StepCommitted.assignment`."""
LEARNING = "learning.v1"
"""The worker can learn the line's state while the line trains; the coordinator lets it."""
PROBE = "probe.v1"
"""The worker answers `Probe` at once, whatever its script does."""
EXPLAINS = "explains.v1"
"""The worker answers `Explain`: what it does, and how its process is."""
CONTROL_SOCKET = "control-socket.v1"
"""The worker chooses at once between gRPC and `JoinAccepted.control_socket`, if that is offered."""
NOTICE = "notice.v1"
"""The coordinator takes `Notice`, and sends the worker away once it has nothing left to give."""
LISTENING = "listening.v1"
"""The reducer takes streams that only listen."""
SAME_BITS = "same-bits.v1"
"""The worker computes whole grains and sends their nodes; the reducer adds those along the tree."""
VERIFIES = "verifies.v1"
"""The worker obeys `ShardAssignment.attests` and what goes with it; it has SAME_BITS as well."""
TRIMMED = "trimmed.v1"
"""A worker asks for the mean that `Policy.mean` names; a reducer makes a trimmed one."""

WORKER_CAPABILITIES = (
    *(NORMS, MEAN_BUFFERS, OVERFLOW, COPIED_BUFFERS),
    *(INT8, INT4, INT2, TOPK, TRIMMED),
)
"""What each PyTorch worker of this version can do; its Join may add others."""
COORDINATOR_CAPABILITIES = (BLOCK_NORMS, HASHED_BASE, OVERFLOW, STANDING, NOTICE)
"""What a coordinator of this version can do."""
REDUCER_CAPABILITIES = (INT8, INT4, INT2, TOPK, TRIMMED, LISTENING, SAME_BITS)
"""What a reducer of this version can do on every machine; RoundOpened may name others."""

_ENCODINGS = {
    Encoding.INT8_BLOCK: INT8,
    Encoding.INT4_BLOCK: INT4,
    Encoding.INT2_BLOCK: INT2,
    Encoding.TOPK: TOPK,
}


def capabilities_of(encodings: Iterable[Encoding | None]) -> tuple[str, ...]:
    """The capabilities that a receiver of these encodings needs, sorted."""
    return tuple(sorted({_ENCODINGS[each] for each in encodings if each in _ENCODINGS}))
