"""Configuration of a coordinator."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from andon.protocol.limits import MAX_WORKERS
from andon.protocol.records import Key
from andon.protocol.ring import RING_CAPABILITY
from andon.protocol.run_settings import Liveness, Policy, Topology
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport.store import JournalSync

__all__ = ["CoordinatorConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How one run's coordinator works; the only knobs that it has."""

    run_id: str
    """The run that is served."""
    journal: Path
    """The database file, `runs/<run_id>/journal.sqlite`; made if it is not there."""
    journal_sync: JournalSync = "normal"
    """`normal` survives the death of any process, `full` also that of the power."""
    expect_workers: int = 1
    """The line waits for so many before step 0."""
    min_workers: int = 1
    """Below so many in sync the line waits for workers."""
    max_workers: int | None = None
    """Worker ids are below this; None is as many as are expected."""
    expect_reducers: int = 1
    """The line waits for so many before its first round."""
    own_reducer: bool = True
    """Whether this process is one of them: a reducer is served at the coordinator's address."""
    registers: bool = False
    """Whether reducers that are processes of their own may register: they share the secret."""
    policy: Policy = field(default_factory=Policy)
    """How the line works, handed to every worker."""
    liveness: Liveness = field(default_factory=Liveness)
    """How long a silent worker is waited for, handed to every worker."""
    rejoin_grace_s: float = 0.2
    """How long a broken stream may be a blip."""
    join_s: float = 30.0
    """How long a stream has to send Join."""
    recovery_window_s: float = 30.0
    """A line that was restarted goes on without all its workers after so long."""
    max_attempts: int = 3
    """So many attempts of one step may lose a worker before the line halts."""
    forming_timeout_s: float | None = None
    """The line halts once it has waited so long for workers or reducers; None: it waits on."""
    straggler_timeout_s: float | None = None
    """A worker that the others wait for so long is cut off; None: nobody is, for being slow."""
    token: bytes = field(default=b"", repr=False)
    """The run's token, which workers show when they join, and people who look; empty: none."""
    operator_token: bytes = field(default=b"", repr=False)
    """What people show who halt, resume and drain; empty: the run's token will do."""
    resume_from: Key | None = None
    """Go on from this record of the journal, whatever came after it; None: from the last one."""
    metrics_url: str = ""
    """Where the service's metrics are, for statuses."""
    loss_spike: float | None = None
    """Deviations above the usual that a step's loss may be; None: any. See `core.detectors`."""
    gradient_norm_spike: float | None = None
    """Likewise for the norm of the averaged gradients; `policy.gradient_norm` must be set."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if not self.run_id or any(character in self.run_id for character in "/\\\0\n"):
            raise ValueError(f"a run id is a short name without separators, not {self.run_id!r}")
        if not self.registers and (self.expect_reducers > 1 or not self.own_reducer):
            raise ValueError("reducers that are processes of their own need `registers`")
        if not self.join_s > 0:
            raise ValueError(f"join_s must be above 0, not {self.join_s}")
        if self.journal_sync not in ("normal", "full"):
            raise ValueError(f"journal_sync must be normal or full, not {self.journal_sync!r}")
        self.line_settings()

    def line_settings(self) -> LineSettings:
        """What the line's core is told.

        Raises:
            ValueError: values contradict each other.
        """
        ring = self.policy.topology is Topology.RING
        most = self.expect_workers if self.max_workers is None else self.max_workers
        return LineSettings(
            run_id=self.run_id,
            expect_workers=self.expect_workers,
            min_workers=self.min_workers,
            max_workers=min(most, MAX_WORKERS) if self.max_workers is None else most,
            expect_reducers=self.expect_reducers,
            own_reducer=self.own_reducer,
            policy=self.policy,
            liveness=self.liveness,
            rejoin_grace_s=self.rejoin_grace_s,
            recovery_window_s=self.recovery_window_s,
            max_attempts=self.max_attempts,
            forming_timeout_s=self.forming_timeout_s,
            straggler_timeout_s=self.straggler_timeout_s,
            host=socket.gethostname(),
            token=self.token,
            loss_spike=self.loss_spike,
            gradient_norm_spike=self.gradient_norm_spike,
            capabilities=frozenset({RING_CAPABILITY} if ring else ()),
        )
