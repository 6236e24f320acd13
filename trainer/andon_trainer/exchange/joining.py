"""Joining: what a worker says of itself, and what the coordinator answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.records import Cursor, Key
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, Policy, RunPlan

__all__ = ["Joined", "Joining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What a worker says of itself each time it joins."""

    run_id: str
    incarnation: int
    layout: Layout
    plan: RunPlan
    node_id: str
    launch_slot: int | None
    device: tuple[str, str, int]
    """Kind, name and memory in bytes."""
    token: bytes = field(default=b"", repr=False)
    metrics_address: str = ""
    """Where its metrics are scraped, as host:port; empty if nowhere."""
    head: Key | None = None
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    held_key: Key | None = None
    greatest_term: int = 0
    halt: HaltEvidence | None = None
    """The halt that it stands in."""
    mid_script: bool = False
    """Whether it takes no state before it asks for work."""
    checkpoints: tuple[int, str] | None = None
    """Every how many steps it would write checkpoints, and where; None: it can't."""
    protocol_version: int = PROTOCOL_VERSION
    capabilities: tuple[str, ...] = ()
    """What it can do beside what every worker can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The coordinator's answer."""

    worker: int
    session_token: bytes = field(repr=False)
    reducers: tuple[ReducerShare, ...]
    """Who averages what, unless an assignment says otherwise."""
    plan: RunPlan
    policy: Policy
    liveness: Liveness
    in_sync: bool
    behind: bool
    """Whether the line's state is to come."""
    head: Key | None
    step: int
    term: int
    halt: HaltEvidence | None
    """The halt that the line stands in."""
    run_id: str = ""
    """The run; empty if the coordinator is of a version that does not say it."""
