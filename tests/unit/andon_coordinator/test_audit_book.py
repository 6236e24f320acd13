"""The audit book: what an audit reads of a journal is of the line's present history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_coordinator.core import effects
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduceMean, ScalarAllReduces
from andon_coordinator.transport.audit_book import AuditBook, ComparedWeights
from unit.andon_coordinator.journal_bench import INITIAL, RESULT, STEP, TERM, Writing


def steered(step: int, sequence: int, *data: bytes) -> effects.SaveSteered:
    return effects.SaveSteered(step, ScalarAllReduceMean(sequence, 0.1, 2.0, len(data), data))


def test_what_was_rolled_back_steers_no_audit(path: Path) -> None:
    back = Record(Key(TERM, 8), INITIAL.key, RecordKind.MARK, 0, INITIAL.cursor, (0,))
    again = Record(Key(TERM, 9), back.key, RecordKind.STEP, 1, Cursor(0, 4), (0,))
    left = effects.SaveDeparture(0, LeaveReason.COMPLETE, "", 1, bytes([7]) * 32)

    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        writing.journal.save(steered(0, 0, b"first"))
        writing.save(effects.SaveRecord(STEP, RESULT))
        writing.journal.save(steered(1, 0, b"given up"))
        writing.journal.save(replace(left, digest=bytes(32)))
        writing.save(effects.SaveRecord(back, rolls_back=True))
        writing.save(effects.SaveRecord(again, RESULT))
        writing.journal.save(steered(1, 0, b"a", b"b"))
        writing.journal.save(replace(steered(1, 1), left_out=True))
        writing.journal.save(left)

    with AuditBook(path) as book:
        assert [entry.record for entry in book.forward(None)] == [INITIAL, back, again]
        assert [entry.record for entry in book.forward(back.key)] == [again]
        assert [each["data"] for each in book.answers(0)] == [["Zmlyc3Q="]]
        answer = {"value": 0.1, "weight": 2.0, "contributors": 2, "data": ["YQ==", "Yg=="]}
        assert book.answers(1) == [{"sequence": 0, **answer}, {"sequence": 1}]
        assert book.weights() == {1: ComparedWeights("07" * 32)}


def test_a_journal_without_grains_has_nothing_for_an_audit(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))

    with AuditBook(path) as book:
        assert (book.answers(1), book.weights(), book.attested(STEP.key)) == ([], {}, None)


def test_what_workers_gave_is_kept_up_to_a_bound_between_two_steps() -> None:
    reduces = ScalarAllReduces()
    large = ScalarAllReduceMean(0, 0.0, 1.0, 1, (bytes(2**17),))

    kept = [reduces.keep(replace(large, sequence=number)) for number in range(4)]

    left_out = replace(large, sequence=2, data=())
    assert kept == [(large, False), (replace(large, sequence=1), False), (left_out, True), None]
    reduces.close()
    assert reduces.keep(large) == (large, False)
