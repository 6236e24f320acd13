"""The worker: PyTorch's side of the line. Users import from here."""

from andon_trainer.errors import AndonError, JoinRefused, LineHalted, LineLost
from andon_trainer.line import Line
from andon_trainer.loaders import Shard
from andon_trainer.trainer import Callback, Evaluation, Fit, Report, Step, Trainer

__all__ = [
    "AndonError",
    "Callback",
    "Evaluation",
    "Fit",
    "JoinRefused",
    "Line",
    "LineHalted",
    "LineLost",
    "Report",
    "Shard",
    "Step",
    "Trainer",
]
