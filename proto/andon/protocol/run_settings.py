"""Run settings: what a script intends to do, and how the line works."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from andon.protocol.encoding import Encoding, answers_defect
from andon.protocol.limits import BATCH_LIMIT, CHUNK_ELEMENTS, COUNT_LIMIT, MAX_COMPONENTS
from andon.protocol.schedules import AVERAGING, OuterOptimizer
from andon.protocol.sparse import KEPT, MOST_KEPT

__all__ = [
    "DRAINED",
    "HEARTBEATS_A_SECOND",
    "LEAST_TRIMMED",
    "SILENCE_LEASES",
    "Liveness",
    "MeanKind",
    "Policy",
    "RunPlan",
    "Topology",
    "cut_at_each_end",
]

DRAINED = "drained"
"""The stop reason of a run that a person has drained."""

HEARTBEATS_A_SECOND = 256
"""So many heartbeats take the coordinator about a twentieth of a processor."""
SILENCE_LEASES = 20
"""A worker whose connection is alive is lost only if it sends nothing for so many leases."""

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
    """Each worker exchanges with the reducers."""
    RING = 2
    """Each rank sends to the next one."""


class MeanKind(enum.Enum):
    """Which mean gradients have; values are those of `andon.v1.MeanKind`."""

    WEIGHTED = 1
    """Of all contributions."""
    TRIMMED = 2
    """Without the lowest and highest contributions to each element; see `cut_at_each_end`."""


LEAST_TRIMMED = 5
"""Of fewer contributions nothing is cut: their mean is the weighted one."""


def cut_at_each_end(contributions: int) -> int:
    """How many of an element's contributions a trimmed mean leaves out at each end: a fifth."""
    return contributions // LEAST_TRIMMED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a script intends to do. All workers of a run must agree on it."""

    global_batch: int
    """Samples in one step of the whole line."""
    dataset_size: int | None = None
    """Samples in the training set; None if unknown."""
    seed: int = 0
    """The seed of the samples' order; 64 bits."""
    total_steps: int | None = None
    """Steps after which the script ends; None if it does not say."""
    total_epochs: int | None = None
    """Epochs after which the script ends; None if it does not say."""
    data_digest: str = ""
    """SHA-256 of the training set's data, hexadecimal; empty if the worker does not say."""
    drop_last: bool = False
    """Whether an epoch ends with its last whole batch, and leaves out the positions after it."""
    sparse: bool = False
    """Whether a position may hold no sample."""
    grain: int = 0
    """Positions that one forward and backward sees, on a line of equal bits; else 0."""
    tree: int = 0
    """The version of the tree along which grains are added; 0 without a grain."""

    def __post_init__(self) -> None:
        """Refuses an empty batch, and numbers that the wire can't hold."""
        _require_count("global_batch", self.global_batch, least=1, below=BATCH_LIMIT)
        _require_count("dataset_size", self.dataset_size, least=1)
        _require_count("total_steps", self.total_steps)
        _require_count("total_epochs", self.total_epochs)
        _require_count("grain", self.grain, below=BATCH_LIMIT)
        _require_count("tree", self.tree, below=2**32)
        if (self.grain > 0) != (self.tree > 0):
            raise ValueError("a plan with a grain names the version of its tree, and no other does")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an unsigned 64-bit number, not {self.seed}")
        if self.data_digest and not _SHA256.fullmatch(self.data_digest):
            raise ValueError(f"data_digest must be a SHA-256, not {self.data_digest!r}")
        if self.drop_last and (self.dataset_size or 0) < self.global_batch:
            raise ValueError(
                f"drop_last leaves no batch of {self.global_batch} in a dataset of "
                f"{self.dataset_size or 'unknown'} samples"
            )

    def to_json(self) -> dict[str, Any]:
        """Its fields as values of JSON, without those that have their default.

        So a program of an earlier version, which does not know the latest fields, reads a plan that
        does not use them.
        """
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return {each.name: value for each, value in values if value != each.default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            TypeError, ValueError: a field is missing, illegal, or of a later version.
        """
        if unknown := sorted(values.keys() - {each.name for each in fields(cls)}):
            raise ValueError(
                f"the run's plan has {', '.join(unknown)}, which this version of Andon does not "
                "know: use the version that wrote it, or a later one"
            )
        return cls(**values)

    @property
    def epoch_size(self) -> int | None:
        """Positions of an epoch: all, or those of whole batches; None if it does not end."""
        if self.dataset_size is None or not self.drop_last:
            return self.dataset_size
        return self.dataset_size - self.dataset_size % self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How a lost worker is noticed. `lease_s` is the one setting; other times derive from it."""

    lease_s: float = 3.0
    """A worker that sends nothing for so long is lost, unless its connection is alive."""
    reconnect_s: float = 300.0
    """How long a worker keeps trying to reach the coordinator."""
    slower_s: float = 0.0
    """A worker sends a Heartbeat so often, if that is less often than three times a lease."""

    def __post_init__(self) -> None:
        """Refuses a lease that no heartbeat could keep."""
        if not (math.isfinite(self.lease_s) and self.lease_s >= 0.1):
            raise ValueError(f"lease_s must be at least 0.1 s, not {self.lease_s}")
        if not (math.isfinite(self.reconnect_s) and self.reconnect_s >= 0):
            raise ValueError(f"reconnect_s must be 0 s or more, not {self.reconnect_s}")
        if not 0 <= self.slower_s <= self.lease_s:
            raise ValueError(f"slower_s must be from 0 s to lease_s, not {self.slower_s}")

    @classmethod
    def of_line(cls, lease_s: float, workers: int) -> Liveness:
        """The liveness of a line that may have so many workers.

        Many send their heartbeats less often, so that the coordinator hears no more than
        `HEARTBEATS_A_SECOND` of them together, or little more: none is ever longer than a lease.
        Pings keep the lease, and a heartbeat only says what its worker does.
        """
        slower_s = min(workers / HEARTBEATS_A_SECOND, 0.9 * lease_s)
        return cls(lease_s=lease_s, slower_s=slower_s if slower_s > lease_s / 3 else 0.0)

    @property
    def heartbeat_s(self) -> float:
        """A worker sends a Heartbeat so often: three times a lease, so that one may be late."""
        return max(self.lease_s / 3, self.slower_s)

    @property
    def silence_s(self) -> float:
        """How long a worker may send nothing on a live connection: then its script hangs."""
        return SILENCE_LEASES * self.lease_s


def _require_quorum(policy: Policy) -> None:
    """Refuses a quorum where a window can't go on without a worker."""
    if policy.quorum is None or not 0 < policy.quorum <= 1:
        raise ValueError(f"quorum must be above 0 and at most 1, not {policy.quorum}")
    _require_count("max_late", policy.max_late, least=1, below=2**32)
    if not policy.local_steps:
        raise ValueError("a quorum needs local steps: each step needs everybody's gradients")
    if policy.topology is Topology.RING:
        raise ValueError("a quorum needs reducers: on a ring, averages pass through every worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the line works. The server is configured with it, and hands it to every worker."""

    chunk_elements: int = CHUNK_ELEMENTS
    """Elements in one chunk; the last chunk of a block may be shorter."""
    encoding: Encoding = Encoding.FLOAT32
    """How gradients travel."""
    answer_encoding: Encoding | None = None
    """How averages travel; None: as the gradients do."""
    digest_every: int = 50
    """Digests of the weights are compared every so many steps; 0: never."""
    max_steps: int | None = None
    """The line ends after so many steps; None if the script decides."""
    gradient_norm: bool = False
    """Whether workers report the norm of the averaged gradients of each step."""
    topology: Topology = Topology.STAR
    """How blocks travel between workers."""
    local_steps: int = 0
    """Optimizer steps of a worker's own between two exchanges; 0: gradients are averaged."""
    outer: OuterOptimizer = AVERAGING
    """What applies the mean change of the weights, if there are local steps."""
    overlap: bool = False
    """Whether a window of local steps is exchanged while the next one is computed."""
    overlap_steps: int = 0
    """So many local steps of the next window are made while one is exchanged; 0: all."""
    max_grad_norm: float | None = None
    """The greatest norm of a rank's own gradient, which is scaled down to it; None: any."""
    own_gradient_norm: bool = False
    """Whether workers report the norm of their own contributions."""
    average_buffers: bool = False
    """Whether running statistics are averaged; if not, all workers take rank 0's."""
    quorum: float | None = None
    """The part of its workers that a window of local steps waits for; None: always all."""
    max_late: int = 8
    """A worker is left out of at most so many consecutive records, if there is a quorum."""
    fragments: int = 1
    """In how many groups of blocks the model is exchanged, if there are local steps; 1: whole."""
    mix: float = 0.0
    """With which factor a worker keeps its own weights where a fragment's average arrives."""
    topk_kept: int = KEPT
    """Of the encoding TOPK: elements of each 256 of a contribution that are listed."""
    mean: MeanKind = MeanKind.WEIGHTED
    """Which mean gradients have."""

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        _require_count("chunk_elements", self.chunk_elements, least=1, below=2**32)
        _require_count("digest_every", self.digest_every, below=2**32)
        _require_count("max_steps", self.max_steps, least=1)
        _require_count("local_steps", self.local_steps, below=2**32)
        if self.overlap and not self.local_steps:
            raise ValueError("overlap needs local steps: gradients are needed before the next step")
        _require_count("overlap_steps", self.overlap_steps, below=2**32)
        if self.overlap_steps and not self.overlap:
            raise ValueError("overlap_steps needs overlap: nothing is computed ahead without")
        if self.quorum is not None:
            _require_quorum(self)
        self._check_fragments()
        norm = self.max_grad_norm
        if norm is not None and not (math.isfinite(norm) and norm > 0):
            raise ValueError(f"max_grad_norm must be above 0, not {norm}")
        _require_count("topk_kept", self.topk_kept, least=1, below=MOST_KEPT + 1)
        if defect := answers_defect(self.encoding, self.answer_encoding):
            raise ValueError(defect)
        if self.encoding is Encoding.TOPK and self.topology is Topology.RING:
            raise ValueError("a ring adds sums of all elements, so TOPK needs reducers")
        if self.trims and (self.topology is Topology.RING or self.local_steps):
            raise ValueError("a trimmed mean needs reducers, and gradients of each step")
        if self.trims and any(each.loses_much for each in self.encodings):
            raise ValueError("a trimmed mean needs 16 bits or more an element")

    def _check_fragments(self) -> None:
        _require_count("fragments", self.fragments, least=1, below=MAX_COMPONENTS + 1)
        if not 0 <= self.mix < 1:
            raise ValueError(f"mix must be from 0 below 1, not {self.mix}")
        if self.mix and not (self.in_fragments or self.overlap):
            raise ValueError("mix needs fragments or overlap: otherwise an average is all there is")
        if not self.in_fragments:
            return
        if not self.local_steps or self.local_steps % self.fragments:
            raise ValueError(
                f"{self.fragments} fragments need a number of local steps that they divide, not "
                f"{self.local_steps}"
            )
        if self.topology is Topology.RING:
            raise ValueError("fragments need a star: a ring passes on the whole model")

    @property
    def trims(self) -> bool:
        """Whether gradients have a trimmed mean."""
        return self.mean is MeanKind.TRIMMED

    @property
    def in_fragments(self) -> bool:
        """Whether a round may exchange a part of the model."""
        return self.fragments > 1

    @property
    def steps_a_round(self) -> int:
        """Local steps between two exchanges; 0: gradients are averaged."""
        return self.local_steps // self.fragments

    @property
    def encodings(self) -> frozenset[Encoding]:
        """Those that contributions and averages of numbers travel in."""
        named = {self.encoding, self.answer_encoding or self.encoding}
        if self.encoding.loses_much and (self.average_buffers or self.local_steps):
            named.add(Encoding.FLOAT32)  # Running statistics: see section 18 of the protocol.
        return frozenset(named)
