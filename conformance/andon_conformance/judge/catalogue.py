"""The catalogue: every scenario, in the order in which they are reported."""

from __future__ import annotations

from andon_conformance.judge.scenarios.averaging import AVERAGING
from andon_conformance.judge.scenarios.bootstrapping import BOOTSTRAP
from andon_conformance.judge.scenarios.committing import COMMITTING
from andon_conformance.judge.scenarios.faulting import FAULTING
from andon_conformance.judge.scenarios.halting import HALTING
from andon_conformance.judge.scenarios.joining import JOINING
from andon_conformance.judge.scenarios.leaving import LEAVING
from andon_conformance.judge.scenarios.malforming import MALFORMING
from andon_conformance.judge.scenarios.outages import ABSENCE, REFUSAL, SHUTDOWN
from andon_conformance.judge.scenarios.receiving import RECEIVING
from andon_conformance.judge.scenarios.reducing import REDUCING
from andon_conformance.judge.scenarios.rejoining import REJOINING
from andon_conformance.judge.scenarios.stepping import ENCODING, STEPPING

__all__ = ["SCENARIOS"]

SCENARIOS = (
    JOINING,
    REFUSAL,
    ABSENCE,
    BOOTSTRAP,
    RECEIVING,
    STEPPING,
    ENCODING,
    COMMITTING,
    AVERAGING,
    MALFORMING,
    REDUCING,
    FAULTING,
    HALTING,
    REJOINING,
    LEAVING,
    SHUTDOWN,
)
