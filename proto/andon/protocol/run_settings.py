"""The terms of a run: what a script means to do, and how the line works."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from andon.protocol.encoding import Encoding
from andon.protocol.limits import BATCH_LIMIT, CHUNK_ELEMENTS, COUNT_LIMIT

__all__ = ["DRAINED", "SILENCE_LEASES", "Liveness", "Policy", "RunPlan", "Topology"]

DRAINED = "drained"
"""The stop reason of a run that a person ends before its time."""

SILENCE_LEASES = 20
"""A worker whose connection lives is lost only if it says nothing for so many leases."""

_SHA256 = re.compile("[0-9a-f]{64}")


def _require_count(
    name: str, count: int | None, *, least: int = 0, below: int = COUNT_LIMIT
) -> None:
    if count is None:
        return
    if count < least:
        raise ValueError(f"{name} must be at least {least}, not {count}")
    if count >= below:
        raise ValueError(f"{name} must be below {below}, not {count}")


class Topology(enum.Enum):
    """How blocks travel between workers; values are those of `andon.v1.Topology`."""

    STAR = 1
    """Over the reducers."""
    RING = 2
    """From each rank to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a script means to do. All workers of a run must agree on it."""

    global_batch: int
    """Samples in one step of the whole line."""
    dataset_size: int | None = None
    """Samples in the training set; None if unknown."""
    seed: int = 0
    """Seeds the order of the samples; 64 bits."""
    total_steps: int | None = None
    """Steps after which the script ends, if it sets them."""
    total_epochs: int | None = None
    """Epochs after which the script ends, if it sets them."""
    data_digest: str = ""
    """SHA-256 of what the training set is, hexadecimal; empty if the worker does not tell."""
    drop_last: bool = False
    """Whether an epoch ends with its last whole batch; the positions behind it are left out."""

    def __post_init__(self) -> None:
        """Refuses a batch without samples and numbers that the wire can't hold."""
        _require_count("global_batch", self.global_batch, least=1, below=BATCH_LIMIT)
        _require_count("dataset_size", self.dataset_size, least=1)
        _require_count("total_steps", self.total_steps)
        _require_count("total_epochs", self.total_epochs)
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an unsigned 64-bit number, not {self.seed}")
        if self.data_digest and not _SHA256.fullmatch(self.data_digest):
            raise ValueError(f"data_digest must be a SHA-256, not {self.data_digest!r}")
        if self.drop_last and (self.dataset_size or 0) < self.global_batch:
            raise ValueError(
                f"drop_last leaves no batch of {self.global_batch} in a dataset of "
                f"{self.dataset_size or 'unknown'} samples"
            )

    @property
    def epoch_size(self) -> int | None:
        """Positions that an epoch deals out: all, or whole batches; None if it does not end."""
        if self.dataset_size is None or not self.drop_last:
            return self.dataset_size
        return self.dataset_size - self.dataset_size % self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How often and how long: one knob, `lease_s`, from which the others derive."""

    lease_s: float = 3.0
    """A worker silent for so long is lost."""
    reconnect_s: float = 300.0
    """How long a worker keeps trying to reach the coordinator."""

    def __post_init__(self) -> None:
        """Refuses a lease that no heartbeat could keep."""
        if not (math.isfinite(self.lease_s) and self.lease_s >= 0.1):
            raise ValueError(f"lease_s must be at least 0.1 s, not {self.lease_s}")
        if not (math.isfinite(self.reconnect_s) and self.reconnect_s >= 0):
            raise ValueError(f"reconnect_s must be 0 s or more, not {self.reconnect_s}")

    @property
    def heartbeat_s(self) -> float:
        """How often a worker sends Heartbeat: three times a lease, so that one may be late."""
        return self.lease_s / 3

    @property
    def silence_s(self) -> float:
        """How long a worker may say nothing on a connection that lives: its script hangs."""
        return SILENCE_LEASES * self.lease_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the line works; the server's configuration, handed to every worker."""

    chunk_elements: int = CHUNK_ELEMENTS
    """Elements in one chunk; the last chunk of a block is shorter."""
    encoding: Encoding = Encoding.FLOAT32
    """How gradients travel."""
    answer_encoding: Encoding | None = None
    """How averages travel; None is as the gradients."""
    digest_every: int = 50
    """Compare digests of the weights every so many steps; 0 is never."""
    max_steps: int | None = None
    """The line ends after so many steps; None if the script decides."""
    gradient_norm: bool = False
    """Whether workers tell the norm of the averaged gradients of each step."""
    topology: Topology = Topology.STAR
    """How blocks travel between workers."""

    def __post_init__(self) -> None:
        """Refuses numbers that make no sense."""
        _require_count("chunk_elements", self.chunk_elements, least=1, below=2**32)
        _require_count("digest_every", self.digest_every, below=2**32)
        _require_count("max_steps", self.max_steps, least=1)
