"""The folder in which processes of one host share memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SHARED_DIR", "shared_dir_of"]

SHARED_DIR = Path("/dev/shm")
"""Where they do unless they are told otherwise."""


def shared_dir_of(text: str) -> Path | None:
    """The folder that `ANDON_SHARED_DIR` names; None if that is `off`."""
    if text == "off":
        return None
    return Path(text) if text else SHARED_DIR
