"""Capabilities: what a program can do that one of an earlier version can't.

A worker names its own in Join, and a coordinator in JoinAccepted. Where the one relies on the other
for something that not every version does, it looks for the name first. So two versions either work
together, or the missing capability is named; neither takes silence for consent. Those that belong
to a schedule are in `schedules`, and the ring's is in `ring`.
"""

from __future__ import annotations

__all__ = [
    "COORDINATOR_CAPABILITIES",
    "HASHED_BASE",
    "MEAN_BUFFERS",
    "NORMS",
    "OVERFLOW",
    "WORKER_CAPABILITIES",
]

NORMS = "norms.v1"
"""The worker obeys `Policy.max_grad_norm` and `Policy.own_gradient_norm`."""
MEAN_BUFFERS = "mean-buffers.v1"
"""The worker obeys `Policy.average_buffers`."""
OVERFLOW = "overflow.v1"
"""The worker obeys `StepCommitted.overflow`; the coordinator sets it."""
HASHED_BASE = "hashed-base.v1"
"""The coordinator tells digests that have hashes of frozen parameters from those that do not."""

WORKER_CAPABILITIES = (NORMS, MEAN_BUFFERS, OVERFLOW)
"""What each PyTorch worker of this version can do; its Join may add others."""
COORDINATOR_CAPABILITIES = (HASHED_BASE, OVERFLOW)
"""What a coordinator of this version can do."""
