"""The chain of records, where the line's history ends, and the keys that name its records.

A record is one commit. Each record names its parent, so that the records form a chain; the key of
the last one is the line's head. Keys are never reused, not even across restarts (rules 1 and 2 of
docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable

from andon.protocol.records import (
    Cursor,
    Key,
    Record,
    RecordKind,
    latest_plausible_term,
    make_term,
)
from andon_coordinator.core.step_results import StepResult

__all__ = ["Chain", "Keys"]


class Keys:
    """Issues the keys of the current term; a term is durable before its first key is issued."""

    def __init__(self, term: int, random_bits: Callable[[], int]) -> None:
        """Starts in `term`, which is durable; `random_bits` draws 32 bits for each later term."""
        self.term = term
        self.saved = True
        self._round = 0
        self._random_bits = random_bits

    def draw(self) -> Key:
        """A key that was never used."""
        # Were a key used before its term is durable, a coordinator that crashes and restarts could
        # take the same term and issue the same key for something else.
        assert self.saved, "a term is made durable before its first key is used"
        self._round += 1
        return Key(self.term, self._round)

    def start_term_above(self, greatest: int, wall: float) -> int:
        """Starts a term above `greatest`; no key is drawn until `saved` is set again.

        `greatest` must be plausible (see `is_plausible`), so that there is a term above it.
        """
        self.term = make_term(max(greatest, self.term), wall, self._random_bits())
        # From here on no key is drawn: a term is durable before its first key (rule 2).
        self.saved = False
        self._round = 0
        return self.term

    def is_plausible(self, term: int, wall: float) -> bool:
        """Whether a coordinator could have had a term that a peer reports."""
        return term <= max(self.term, latest_plausible_term(self.term, wall))

    def covers(self, key: Key) -> bool:
        """Whether a key is not newer than any key that we issued.

        A key of our own term beyond our last round is newer too: we did not issue it, and the next
        key that we issue might not be above it.
        """
        return key <= Key(self.term, self._round)


class Chain:
    """The line's head, and the record that made it the head.

    `result` is the result of `record` if that is a STEP; `last_result` is that of the last STEP.
    `record` is None if the head is known only from a worker's Join (rule 9).
    `request_heads` are the heads whose work requests are still valid: a MARK keeps earlier
    requests valid, because it moves no weights.
    """

    def __init__(self, record: Record | None = None, result: StepResult | None = None) -> None:
        """Starts at the journal's last record."""
        self.head: Key | None = None
        self.step = 0
        self.cursor = Cursor(0, 0)
        self.record: Record | None = None
        self.result: StepResult | None = None
        self.last_result: StepResult | None = None
        self.request_heads: set[Key] = set()
        if record is not None:
            self.append(record, result)

    def append(self, record: Record, result: StepResult | None) -> None:
        """Moves the head to a durable record."""
        assert self.head is None or record.parent == self.head, "a record's parent is the head"
        # Before `_move`, which adds the new head.
        if record.kind is not RecordKind.MARK:
            self.request_heads.clear()
        elif record.parent is not None:
            # Usually the parent is in the set already. It is not if this MARK is the last record
            # of a journal that was just opened.
            self.request_heads.add(record.parent)
        self._move(record.key, record.step, record.cursor)
        self.record = record
        self.result = result
        self.last_result = result or self.last_result

    def go_back(self, record: Record) -> None:
        """Moves the head back to an older record of the history; a MARK follows it (rule 12)."""
        assert self.head is not None
        assert record.key < self.head, "the head itself needs no going back"
        self.request_heads.clear()
        self._move(record.key, record.step, record.cursor)
        self.record = record
        self.result = None
        self.last_result = None

    def adopt(self, head: Key, step: int, cursor: Cursor) -> None:
        """Takes over a worker's head that is newer than the journal's last record (rule 9)."""
        assert self.head is None or head > self.head, "recovery never goes back"
        self.request_heads.clear()
        self._move(head, step, cursor)
        # Only the worker's position is known, not the record: it can't be sent to anybody else.
        self.record = None
        self.result = None
        self.last_result = None

    def normalize_cursor(self, epoch_size: int | None) -> None:
        """Reads a cursor beyond the epoch's end as the first position of the next epoch.

        Older versions accepted such a cursor from a worker and wrote it to the journal. No position
        lies between the two, so no sample is left out.
        """
        if epoch_size is not None and self.cursor.position >= epoch_size:
            self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def _move(self, head: Key, step: int, cursor: Cursor) -> None:
        self.head = head
        self.step = step
        self.cursor = cursor
        self.request_heads.add(head)
