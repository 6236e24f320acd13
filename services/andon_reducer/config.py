"""Configuration of a reducer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from andon.host.settings import LIMITS, Count, check, whole
from andon.protocol.limits import MAX_CONNECTIONS, MAX_PAYLOAD_BYTES

__all__ = ["ReducerConfig", "ReducerLimits"]


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerLimits:
    """How much of a reducer its clients may take.

    Each field is a setting of the process that serves it, and its docstring is the setting's help.
    """

    max_streams_per_worker: Count = 8
    """Streams of one worker at one reducer: Reduce, and as many ends of state transfers."""
    max_held_bytes: Annotated[int, whole(2**28)] = 4 * 2**30
    """Bytes that a reducer holds at once: contributions, jobs and averages of all runs."""
    max_state_pieces: Count = 4
    """Pieces of one state transfer that a reducer holds at once."""

    def __post_init__(self) -> None:
        """Refuses values beyond their limits."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class ReducerConfig:
    """How a reducer works."""

    window_bytes: int = 64 * 2**20
    """Bytes of contributions held for a run beyond its lowest incomplete chunk.

    Jobs and averages on their way out may take as much again.
    """

    listener_bytes: int = 2**30
    """Bytes of averages that may be on their way to one stream that only listens.

    They hold nobody back: a listener that falls further behind is ended. So it must be worth a few
    seconds of averages, which is how long a process that loads a state may read nothing.
    """

    threads: int = 2
    """Threads that compute averages."""

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """The largest payload of a chunk, in bytes."""

    chunk_elements: int | None = None
    """Chunks start at multiples of it and are no longer; None: anywhere, and of any length."""

    shared_dir: Path | None = None
    """The folder for memory that is shared with workers of this host; None: nothing is shared."""

    max_lane_streams: int = 256
    """Streams that get TCP lanes: each takes two threads. The others use gRPC."""

    lane_connections: int | None = None
    """Connections of a lane each way, where the worker can use several; None: as many as raise the
    rate."""

    limits: ReducerLimits = field(default_factory=ReducerLimits)
    """How much of it its clients may take."""

    opening_s: float = 30.0
    """Seconds that a client has for its first message, and to read the rest after a half-close."""

    state_s: float = 60.0
    """Seconds that a state transfer may take, unless rounds run meanwhile."""

    state_bytes_per_s: float = 16e6
    """A state that takes longer than `state_s` at this rate gets that much time."""

    state_hopeless_s: float = 2.0
    """Seconds after which a transfer is given up for which workers wait that could train, if it is
    too slow to end in its time."""

    state_stalled_s: float = 20.0
    """Seconds after which a transfer that does not progress is given up."""

    state_patience_s: float = 300.0
    """Seconds that one end of a state transfer waits for the other, which may be busy, or gone."""

    def __post_init__(self) -> None:
        """Refuses values that can't work."""
        for name in ("window_bytes", "listener_bytes", "threads", "max_payload_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lane_connections is not None and not 1 <= self.lane_connections <= MAX_CONNECTIONS:
            raise ValueError(
                f"lane_connections must be 1 to {MAX_CONNECTIONS}, not {self.lane_connections}"
            )
        if self.chunk_elements is not None and self.chunk_elements < 1:
            raise ValueError(f"chunk_elements must be at least 1, not {self.chunk_elements}")
        for name in (
            *("opening_s", "state_s", "state_bytes_per_s", "state_hopeless_s"),
            *("state_stalled_s", "state_patience_s"),
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.max_payload_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"max_payload_bytes is {self.max_payload_bytes}, but no client may be asked for "
                f"more than {MAX_PAYLOAD_BYTES}"
            )

    def longest_transfer_s(self, size_bytes: int) -> float:
        """Seconds that a transfer of a state of this size may take."""
        return max(self.state_s, size_bytes / self.state_bytes_per_s)
