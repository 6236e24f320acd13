"""Four languages in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.languages import LANGUAGES
from clients.rig import mixed_line

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    *(mark for language in LANGUAGES.values() for mark in language.marks),
]


def test_four_languages_train_one_model_and_one_is_killed_on_the_way(tmp_path: Path) -> None:
    languages = ["python", *LANGUAGES]
    lost = languages.index("go")
    more = ("--min-workers", "3", "--grad-norm-spike", "1000")
    with mixed_line(tmp_path, 4, 50, *more, small_chunks=True) as line:
        for slot, language in enumerate(languages):
            line.start(slot, language, hold_at="20" if language == "python" else "")
        line.await_step(19)
        line.processes.pop(lost).kill()
        line.await_live(3)
        line.go(20)
        end = line.ended_alike()

    chain = line.judge()
    assert end["step"] == 50
    assert all(entry.record.roster == (0, 1, 2, 3) for entry in chain[1:20])
    assert all(lost not in entry.record.roster for entry in chain[20:])
