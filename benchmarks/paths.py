"""The data paths that can be measured, by their name in `--paths`."""

from __future__ import annotations

from pathlib import Path

from andon.host.shared_dir import DEFAULT_SHARED_DIR

__all__ = ["PATHS"]

PATHS: dict[str, Path | None] = {"wire": None, "shared-memory": DEFAULT_SHARED_DIR, "ring": None}
"""The folder in which workers share memory with the reducer, for each path; None: they don't. The
service announces whether its line is a ring."""
