"""The catalogue: every check of a server, in the order in which they are made."""

from __future__ import annotations

from andon_conformance.runner import (
    averages,
    ending,
    faults,
    founding,
    halts,
    joins,
    rejoins,
    rounds,
    sessions,
    voids,
)
from andon_conformance.runner.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *founding.CHECKS,
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
