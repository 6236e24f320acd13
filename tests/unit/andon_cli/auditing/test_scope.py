"""The scope of an audit: which steps can't be recomputed on one machine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon_cli.auditing.scope import AuditRefused, scope_of
from andon_coordinator.core import effects
from andon_coordinator.transport.audit_book import AuditBook
from unit.andon_coordinator.journal_bench import INITIAL, LAYOUT, PLAN, RESULT, STEP, Writing


@pytest.mark.parametrize("trimmed", [None, 0, 1])
def test_a_step_with_a_trimmed_mean_is_refused_by_name(trimmed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Writing(path) as writing:
        writing.journal.save(effects.SaveRun(PLAN, LAYOUT))
        step = effects.SaveRecord(STEP, replace(RESULT, trimmed=trimmed))
        writing.save(effects.SaveRecord(INITIAL), step)

    with closing(AuditBook(path)) as book:
        scope = scope_of(book, tmp_path, None, None)
        if not trimmed:
            assert [each.step for each in scope.records(book)] == [1]
            return
        with pytest.raises(AuditRefused, match=r"step 1 has a trimmed mean"):
            list(scope.records(book))
