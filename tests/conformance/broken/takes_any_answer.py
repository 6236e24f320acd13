"""An operator's answer counts for the current halt, whichever halt it names."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.halts import HaltEvidence
from andon_coordinator.core import operators
from andon_coordinator.core.events import HaltCleared
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

objection = operators._objection


def easily(core: CoreState, halt: HaltEvidence, event: HaltCleared) -> str:
    return objection(core, halt, replace(event, halt_id=halt.id))


if __name__ == "__main__":
    serve_with((operators, "_objection", easily))
