"""What a worker tells the coordinator: its Join, each finished step, and why it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.grains import NodeLoss
from andon.protocol.halts import HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.records import Cursor, Key
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, Policy, RunPlan

__all__ = [
    "NO_DIGEST",
    "Digest",
    "Joined",
    "Joining",
    "LeaveReport",
    "Standing",
    "StepReport",
    "Timings",
    "WrittenCheckpoint",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What a worker says about itself each time it joins."""

    run_id: str
    incarnation: int
    layout: Layout
    plan: RunPlan
    node_id: str
    launch_slot: int | None
    device: tuple[str, str, int, int]
    """Kind, name, memory in bytes, and cores."""
    token: bytes = field(default=b"", repr=False)
    metrics_address: str = ""
    """Where Prometheus scrapes it, as host:port; empty: nowhere."""
    head: Key | None = None
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    held_key: Key | None = None
    """The round whose averages it holds, and whose record it may have missed (rule 8)."""
    greatest_term: int = 0
    halt: HaltEvidence | None = None
    """The halt that it knows of and that was not answered yet."""
    mid_script: bool = False
    """True: the script is in the middle of a step, so state must not be replaced yet."""
    checkpoints: tuple[int, str, int] | None = None
    """It would write a checkpoint every so many steps to this folder, and keep so many; None: it
    can't."""
    speed_hint: float | None = None
    """How fast it is, compared with the others; None if it does not know."""
    spare: bool = False
    """Whether it computes nothing as long as the line has all its workers."""
    pacing: bytes = field(default=b"", repr=False)
    """The `pacing` of the last commit that it applied."""
    arithmetic: Arithmetic = ()
    """What decides the bits of its results; empty: it does not say."""
    protocol_version: int = PROTOCOL_VERSION
    capabilities: tuple[str, ...] = ()
    """What it supports beyond what every worker must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The coordinator's answer to Join."""

    worker: int
    session_token: bytes = field(repr=False)
    reducers: tuple[ReducerShare, ...]
    """The map of reducers, unless an assignment has another."""
    plan: RunPlan
    policy: Policy
    liveness: Liveness
    in_sync: bool
    behind: bool
    """True: the worker will get the line's state by a transfer."""
    head: Key | None
    step: int
    term: int
    halt: HaltEvidence | None
    """The halt that the line is in, if any."""
    run_id: str = ""
    """Empty if the coordinator is of a version that does not say it."""
    capabilities: frozenset[str] = frozenset()
    """What the coordinator can do that one of an earlier version can't."""
    control_socket: str = ""
    """The name of a socket that may carry the stream's messages from here on; empty: none may."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest of a worker's weights at one head; empty if there is nothing to say."""

    sha256: bytes = b""
    prefixes: bytes = b""
    """The running digest after each component, from the layout's last block to its first."""
    base_hashed: bool = False
    """Whether it has hashes of frozen parameters in the place of their elements."""


NO_DIGEST = Digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the parts of one step took this worker, in seconds."""

    compute_s: float = 0.0
    """From the assignment to the end of the last backward."""
    exchange_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    busy_s: float = 0.0
    """Forward and backward of all micro-batches computed in this attempt, by the device's time."""
    micro_batches: int = 0
    """How many these were."""
    computed: int = 0
    """Samples that `busy_s` covers: neither borrowed ones nor those of a kept gradient."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that this worker wrote, or started from, and the record that it is of."""

    step: int
    folder: str
    head: Key


@dataclass(frozen=True, slots=True)
class Standing:
    """A request for the step after this one: its assignment may come with the commit."""

    ring_address: str = ""
    checkpoint: WrittenCheckpoint | None = None
    """The last one that this worker wrote or started from."""
    checkpoint_begun: int = 0
    """The step of one that is being written beside training; 0: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """This worker holds all averages of round `key`.

    `loss_sum` is the sum of weight times loss over its share. `digest` is of the weights that the
    step started from, or empty.
    """

    key: Key
    loss_sum: float
    weight: float
    samples: int
    timings: Timings
    digest: Digest = NO_DIGEST
    digest_head: Key | None = None
    stop_reason: str = ""
    end_of_data: bool = False
    """Whether the stream of samples ended in this step; its last samples are in `samples`."""
    total_weight: float = 0.0
    world_size: int = 1
    correct: int | None = None
    """Samples that the model got right; None if the script does not count them."""
    gradient_norm: float | None = None
    """The norm of the averaged gradients, if the line asks for it."""
    own_gradient_norm: float | None = None
    """The norm of this worker's own contribution, if the line asks for it."""
    block_norms: tuple[float, ...] = ()
    """That of each block of the layout; empty: it does not say."""
    overflow: bool = False
    """Whether scaled gradients overflowed, so that zeros were sent in their place."""
    standing: Standing | None = None
    """What is asked for with it; None: the script may want something else after this step."""
    node_losses: tuple[NodeLoss, ...] = ()
    """On a line of grains: what each of this worker's nodes adds to the step's loss."""
    attested: tuple[Attestation, ...] = ()
    """What it has computed, if the round is verified."""
    averages_digest: bytes = b""
    """Of the averages as its optimizer will read them, if the round is verified."""
    mean_check: MeanCheck | None = None
    """The mean that it made of all nodes by itself, if the assignment has `sums`."""
    apart: tuple[NodeApart, ...] = ()
    """Where two results of one node differ, as far as this worker has seen both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReport:
    """Why a worker leaves (`reason` is a name of `andon.v1.LeaveReason`), and its final state."""

    reason: str
    message: str = ""
    error_type: str = ""
    """The type of the exception that the script raised."""
    final_step: int = 0
    head: Key | None = None
    digest: Digest = NO_DIGEST
    checkpoint: WrittenCheckpoint | None = None
    """The last checkpoint that it wrote or started from."""
