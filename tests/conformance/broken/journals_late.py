"""Announces a record before it is written; it is written with the next change, or never."""

from __future__ import annotations

from andon_coordinator.core.effects import SaveRecord
from andon_coordinator.core.events import Event, RecordSaved
from andon_coordinator.transport.journal import Journal, JournalEffect
from conformance.breaking import serve_with

apply = Journal._apply
late: list[SaveRecord] = []


def later(journal: Journal, effect: JournalEffect) -> Event | None:
    while late:
        apply(journal, late.pop())
    if not isinstance(effect, SaveRecord):
        return apply(journal, effect)
    late.append(effect)
    return RecordSaved(effect.record.key)


if __name__ == "__main__":
    serve_with((Journal, "_apply", later))
