"""What PyTorch's entry points call at the end of `import torch`: it registers the backend.

An error here would break every `import torch` of this environment, and time spent here is spent by
every program that imports PyTorch. So nothing is imported that PyTorch has not imported itself; the
rest follows when a process group is made.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "andon"
"""The backend's name: `torch.distributed.init_process_group("andon")`."""

log = logging.getLogger(__name__)


def register() -> None:
    """Registers the backend, once; never raises."""
    try:
        _register()
    except Exception:
        # The boundary to PyTorch: a PyTorch that has changed must still be imported.
        log.warning('the process group backend "andon" could not be registered', exc_info=True)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    """Makes a process group, as PyTorch's `extended_api` calls it."""
    from andon_torch.groups import create

    return create(options, backend_options)
