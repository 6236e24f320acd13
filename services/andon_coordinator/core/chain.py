"""The chain: where the line's history ends. Only records move it."""

from __future__ import annotations

from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_coordinator.core.effects import StepResult

__all__ = ["Chain"]


class Chain:
    """The line's head and what goes with it.

    `result` is what `record` came to, `last_result` what the last STEP did. `record` is None if
    the head is known from a worker's Join only (rule 9). `standing` holds the heads whose requests
    for work still stand: a MARK changes the head, not the wish.
    """

    def __init__(self, record: Record | None = None, result: StepResult | None = None) -> None:
        """Starts at the journal's last record."""
        self.head: Key | None = None
        self.step = 0
        self.cursor = Cursor(0, 0)
        self.record: Record | None = None
        self.result: StepResult | None = None
        self.last_result: StepResult | None = None
        self.standing: set[Key] = set()
        if record is not None:
            self.append(record, result)

    def append(self, record: Record, result: StepResult | None) -> None:
        """Moves the head to a durable record."""
        assert self.head is None or record.parent == self.head, "a record's parent is the head"
        if record.kind is not RecordKind.MARK:
            self.standing.clear()
        elif record.parent is not None:
            self.standing.add(record.parent)  # Not there yet if this is the journal's last record.
        self._move(record.key, record.step, record.cursor)
        self.record = record
        self.result = result
        self.last_result = result or self.last_result

    def adopt(self, head: Key, step: int, cursor: Cursor) -> None:
        """Takes a worker's head, newer than what the journal knows (rule 9)."""
        assert self.head is None or head > self.head, "recovery never goes back"
        self.standing.clear()
        self._move(head, step, cursor)
        self.record = None
        self.result = None
        self.last_result = None

    def keep_within(self, epoch_size: int | None) -> None:
        """Reads a cursor beyond the epoch's end as the next epoch's first position.

        An older Andon believed a worker that had such a cursor, and wrote it down. No position
        lies between the two, so that nothing is left out.
        """
        if epoch_size is not None and self.cursor.position >= epoch_size:
            self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def _move(self, head: Key, step: int, cursor: Cursor) -> None:
        self.head = head
        self.step = step
        self.cursor = cursor
        self.standing.add(head)
