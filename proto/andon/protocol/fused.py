"""The compiled passes, if they were built when Andon was installed; see `_fused.c`.

They read numbers as this processor has them, and the wire's are little-endian.
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["fused"]

fused: ModuleType | None
"""The module; None if Andon was installed without a C compiler."""

try:
    from andon.protocol import _fused
except ImportError:
    fused = None
else:
    fused = _fused if sys.byteorder == "little" else None
