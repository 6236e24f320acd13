"""PyTorch's process group backend "andon", for scripts that own their loop.

`torch.distributed.init_process_group("andon")` needs no import of this package: PyTorch finds it by
its entry point. What a script may want besides:

* `log`: numbers for the curves of status, board and metrics;
* `watch_hook`: the gate for DistributedDataParallel over another backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from andon_torch.hooks import watch_hook
    from andon_torch.numbers import log

__all__ = ["log", "watch_hook"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: every `import torch` imports this package."""
    if name == "log":
        from andon_torch.numbers import log

        return log
    if name == "watch_hook":
        from andon_torch.hooks import watch_hook

        return watch_hook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
