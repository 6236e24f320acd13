"""Does not send a step's record to the last worker."""

from __future__ import annotations

from andon.protocol.records import Record, RecordKind
from andon_coordinator.core.effects import StepResult
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

announce = CoreState.announce


def to_others(
    core: CoreState, member: LineMember, record: Record, result: StepResult | None
) -> None:
    before = len(core.effects)
    announce(core, member, record, result)
    if record.kind is RecordKind.STEP and member.worker == max(record.roster):
        del core.effects[before:]


if __name__ == "__main__":
    serve_with((CoreState, "announce", to_others))
