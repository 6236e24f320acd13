"""Configuration of `andon conformance`: one entry a subverb, with its flags and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from andon_conformance.judge.config import JUDGE
from andon_conformance.runner.config import RUN
from andon_conformance.subverb import ConformanceConfig, Subverb

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["SUBVERBS", "ConformanceConfig", "Subverb", "conformance_config"]

SUBVERBS: dict[str, Subverb] = {"run": RUN, "judge": JUDGE}
"""The subverbs; a new one is a line here and a case in `app.py`."""


def conformance_config(settings: Settings) -> ConformanceConfig:
    """What `andon conformance SUBVERB` is to do."""
    return SUBVERBS[settings.subverb].read(settings)
