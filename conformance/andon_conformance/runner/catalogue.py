"""The catalogue: every check of a server, in the order in which they are made."""

from __future__ import annotations

from andon_conformance.runner import (
    averages,
    bootstrap,
    ending,
    faults,
    halts,
    joins,
    rejoins,
    rounds,
    sessions,
    voids,
)
from andon_conformance.runner.checks import ServerCheck

__all__ = ["CHECKS"]

CHECKS: tuple[ServerCheck, ...] = (
    *bootstrap.CHECKS,
    *joins.CHECKS,
    *sessions.CHECKS,
    *averages.CHECKS,
    *faults.CHECKS,
    *rounds.CHECKS,
    *voids.CHECKS,
    *halts.CHECKS,
    *rejoins.CHECKS,
    *ending.CHECKS,
)
