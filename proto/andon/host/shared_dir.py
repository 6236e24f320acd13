"""The folder in which processes of one host share memory.

Apart from `andon.host.arena`, since every command imports it, and must start without NumPy.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEFAULT_SHARED_DIR", "shared_dir_of"]

DEFAULT_SHARED_DIR = Path("/dev/shm")
"""The folder unless another is named."""


def shared_dir_of(text: str) -> Path | None:
    """The folder that `ANDON_SHARED_DIR` names; the default if it is empty, None if it is `off`."""
    if text == "off":
        return None
    return Path(text) if text else DEFAULT_SHARED_DIR
