"""The compiled passes, if they were built when Andon was installed; see `_fused.c`."""

from __future__ import annotations

from types import ModuleType

__all__ = ["fused"]

fused: ModuleType | None
"""The module; None if Andon was installed without a C compiler."""

try:
    from andon import _fused
except ImportError:
    fused = None
else:
    fused = _fused
