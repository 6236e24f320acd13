"""Subverbs of `andon conformance`: what each is made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["ConformanceConfig", "Subverb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceConfig:
    """What a subverb is to do; `app.py` beside this finds out which by its class."""


@dataclass(frozen=True, slots=True)
class Subverb:
    """One subverb of `andon conformance`."""

    summary: str
    epilog: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    read: Callable[[Settings], ConformanceConfig]
