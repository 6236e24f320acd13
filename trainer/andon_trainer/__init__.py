"""The worker: PyTorch's side of the line. Users import from here.

Names are imported when they are first used, so that a program which needs the protocol alone
(`andon_trainer.place.membership` and what is below it) never loads PyTorch.

gRPC is loaded here, before anything else can load it, because of forks. Its handlers try to carry
gRPC over into each forked child. A child that loads samples has no use for it, and the handlers
abort such a child now and then. gRPC asks the environment once, as it is loaded, whether it wants
them; a variable that the user has set stands.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from andon_trainer.data.feed import Shard
    from andon_trainer.errors import (
        AndonError,
        CheckpointRefused,
        HostLost,
        JoinRefused,
        LineHalted,
        LineLost,
        RunOver,
    )
    from andon_trainer.fit.callbacks import Callback, Epoch, Evaluation, Report, Step
    from andon_trainer.fit.fit import Trainer
    from andon_trainer.fit.handle import TrainingMetrics, TrainingRun
    from andon_trainer.fit.settings import Fit
    from andon_trainer.line.line import Line

__all__ = [
    "AndonError",
    "Callback",
    "CheckpointRefused",
    "Epoch",
    "Evaluation",
    "Fit",
    "HostLost",
    "JoinRefused",
    "Line",
    "LineHalted",
    "LineLost",
    "Report",
    "RunOver",
    "Shard",
    "Step",
    "Trainer",
    "TrainingMetrics",
    "TrainingRun",
]

_HOMES = {
    **dict.fromkeys(
        (
            "AndonError",
            "CheckpointRefused",
            "HostLost",
            "JoinRefused",
            "LineHalted",
            "LineLost",
            "RunOver",
        ),
        "errors",
    ),
    "Line": "line.line",
    "Shard": "data.feed",
    **dict.fromkeys(("Callback", "Epoch", "Evaluation", "Report", "Step"), "fit.callbacks"),
    "Fit": "fit.settings",
    "Trainer": "fit.fit",
    **dict.fromkeys(("TrainingMetrics", "TrainingRun"), "fit.handle"),
}


_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def _load_grpc() -> None:
    """Loads gRPC without its handlers of forks; the environment is as before afterwards."""
    if _FORK_SUPPORT in os.environ:
        import_module("grpc")
        return
    os.environ[_FORK_SUPPORT] = "0"
    try:
        import_module("grpc")
    finally:
        del os.environ[_FORK_SUPPORT]


_load_grpc()


def __getattr__(name: str) -> object:
    """A public name, from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
