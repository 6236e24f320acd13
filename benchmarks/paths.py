"""The data paths that can be measured, by their name in `--paths`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from andon.host.shared_dir import DEFAULT_SHARED_DIR

__all__ = ["PATHS", "Way"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a worker's and its line's settings make of a path."""

    shared_dir: Path | None = None
    """The folder in which the worker shares memory with a reducer of its host; None: it doesn't."""
    tcp: bool = True
    """Whether bulk goes over TCP lanes, where both ends have them; if not, over gRPC."""
    ring: bool = False

    @property
    def flags(self) -> list[str]:
        """The flags of `andon serve` that belong to it."""
        return ["--topology", "ring"] if self.ring else []


PATHS = {
    "wire": Way(tcp=False),
    "tcp": Way(),
    "shared-memory": Way(shared_dir=DEFAULT_SHARED_DIR),
    "ring": Way(ring=True),
    "ring-grpc": Way(ring=True, tcp=False),
}
