"""Four languages in one run, and lines that a client can't be on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.languages import LANGUAGES
from clients.rig import mixed_line

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    *(mark for language in LANGUAGES.values() for mark in language.marks),
]


def test_four_languages_train_one_model_in_grains_and_one_is_killed_on_the_way(
    tmp_path: Path,
) -> None:
    languages = ["python", *LANGUAGES]
    lost = languages.index("go")
    more = ("--min-workers", "3", "--grad-norm-spike", "1000")
    grains = ("--arithmetic", "tell", "--verify", "0.3")
    with mixed_line(tmp_path, 4, 30, *more, *grains, small_chunks=True, grain=3) as line:
        for slot, language in enumerate(languages):
            line.start(slot, language, hold_at="20" if language == "python" else "")
        line.await_step(19)
        line.processes.pop(lost).kill()
        line.await_live(3)
        line.go(20)
        end = line.ended_alike()

    chain = line.judge()
    assert end["step"] == 30
    assert all(entry.record.roster == (0, 1, 2, 3) for entry in chain[1:20])
    assert all(lost not in entry.record.roster for entry in chain[20:])


def test_shares_move_to_faster_workers_overflows_move_nobody_and_all_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    languages = ["python", *LANGUAGES]
    more = ("--shares", "balanced", "--max-grad-norm", "0.05", "--worker-grad-norm", "1000")
    with mixed_line(tmp_path, 4, 30, *more) as line:
        for slot, language in enumerate(languages):
            # Only Python's worker obeys these.
            line.start(slot, language, SLOWED_S="0.1", OVERFLOWS_AT="7,12")
        end = line.ended_alike()

    chain = line.judge()
    assert end["step"] == 30
    steps = [entry for entry in chain if entry.result is not None]
    assert [entry.record.step for entry in steps if entry.result.overflow] == [7, 12]
    first, last = _samples(chain[1:2]), _samples(chain[-5:])
    assert set(first.values()) == {8}
    assert last[0] == min(last.values()) < 5 * 4
    assert max(last.values()) > 5 * 8


def test_five_workers_of_four_languages_have_a_trimmed_mean(tmp_path: Path) -> None:
    with mixed_line(tmp_path, 5, 8, "--mean", "trimmed") as line:
        for slot, language in enumerate(("python", *LANGUAGES, "node")):
            line.start(slot, language)
        line.ended_alike()

    steps = [entry.result for entry in line.judge() if entry.result is not None]
    assert [result.trimmed for result in steps] == [1] * 8


def test_a_client_on_a_line_with_local_steps_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with mixed_line(tmp_path, 3, 5, "--schedule", "local") as line:
        for slot, language in enumerate(LANGUAGES):
            line.start(slot, language)
        codes = {slot: worker.process.wait(60) for slot, worker in line.processes.items()}

    assert codes == dict.fromkeys(range(3), 4)
    for worker in line.processes.values():
        said = worker.errors.read_text()
        assert "the line needs local.v1, which the worker lacks" in said
        assert "start the line with --schedule every-step" in said


def _samples(steps: Sequence[Any]) -> Counter[int]:
    """The samples of each worker in some steps of the journal."""
    taken: Counter[int] = Counter()
    for entry in steps:
        for worker, part in zip(entry.record.roster, entry.result.contributions, strict=True):
            taken[worker] += sum(map(len, part.positions))
    return taken
