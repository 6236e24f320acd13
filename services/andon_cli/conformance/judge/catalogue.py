"""The catalogue: every scenario, in the order in which they are reported."""

from __future__ import annotations

from andon_cli.conformance.judge.scenarios.averaging import AVERAGING
from andon_cli.conformance.judge.scenarios.committing import COMMITTING
from andon_cli.conformance.judge.scenarios.faulting import FAULTING
from andon_cli.conformance.judge.scenarios.founding import FOUNDING
from andon_cli.conformance.judge.scenarios.halting import HALTING
from andon_cli.conformance.judge.scenarios.joining import JOINING
from andon_cli.conformance.judge.scenarios.leaving import LEAVING
from andon_cli.conformance.judge.scenarios.malforming import MALFORMING
from andon_cli.conformance.judge.scenarios.outages import ABSENCE, REFUSAL, SHUTDOWN
from andon_cli.conformance.judge.scenarios.receiving import RECEIVING
from andon_cli.conformance.judge.scenarios.reducing import REDUCING
from andon_cli.conformance.judge.scenarios.rejoining import REJOINING
from andon_cli.conformance.judge.scenarios.stepping import ENCODING, STEPPING

__all__ = ["SCENARIOS"]

SCENARIOS = (
    JOINING,
    REFUSAL,
    ABSENCE,
    FOUNDING,
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
