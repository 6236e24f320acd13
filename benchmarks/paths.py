"""The data paths that can be measured, by the name that `--paths` takes."""

from __future__ import annotations

from pathlib import Path

from andon.host.shared_dir import DEFAULT_SHARED_DIR

__all__ = ["PATHS"]

PATHS: dict[str, Path | None] = {"wire": None, "shared-memory": DEFAULT_SHARED_DIR, "ring": None}
"""Where workers on each path share memory with the reducer; None: nowhere. That a line is a ring,
its service says."""
