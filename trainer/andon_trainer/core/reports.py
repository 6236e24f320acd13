"""Reports: what a worker tells the coordinator of a step, and of its leaving."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.records import Key

__all__ = ["NO_DIGEST", "Departure", "Digest", "StepReport", "Timings"]


@dataclass(frozen=True, slots=True)
class Digest:
    """What a worker tells of its weights, at the head that goes with it; empty if nothing."""

    sha256: bytes = b""
    prefixes: bytes = b""
    """Of the running digest, after each component of the layout from its last block on."""


NO_DIGEST = Digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long one step took this worker, in seconds."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """All averages of round `key` are here; this is the worker's share of the loss.

    `loss_sum` is the sum of weight times loss; `digest` is of the weights that the step started
    from, or empty.
    """

    key: Key
    loss_sum: float
    weight: float
    samples: int
    timings: Timings
    digest: Digest = NO_DIGEST
    digest_head: Key | None = None
    stop_reason: str = ""
    total_weight: float = 0.0
    world_size: int = 1
    correct: int | None = None
    """Samples that the model got right; None if the script does not count them."""
    gradient_norm: float | None = None
    """Of the averaged gradients, if the line asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Why a worker leaves (a name of `andon.v1.LeaveReason`), and what it leaves with."""

    reason: str
    message: str = ""
    error_type: str = ""
    """The type of what the script raised."""
    final_step: int = 0
    head: Key | None = None
    digest: Digest = NO_DIGEST
    checkpoint: tuple[int, str] | None = None
    """Step and folder of the last checkpoint that it wrote or goes on from."""
