"""Leaves the old stream open when a worker joins again."""

from __future__ import annotations

from andon_coordinator.core import departures
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

cut_off = departures.cut_off


def leave_open(
    core: CoreState, member: LineMember, message: str, why: str, *, grace_s: float
) -> None:
    if "joined again" not in message:
        cut_off(core, member, message, why, grace_s=grace_s)
    elif member.stream is not None:
        departures.detach(core, member, why, grace_s=grace_s)


if __name__ == "__main__":
    serve_with((departures, "cut_off", leave_open))
