"""Core stories, told in `tests/scenarios/line-*.txt`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scenarios.line_transcript import play

_TRANSCRIPTS = sorted((Path(__file__).parents[2] / "scenarios").glob("line-*.txt"))


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_line_does_what_its_transcript_says(path: Path) -> None:
    expected = path.read_text()

    played = play(expected)

    if os.environ.get("ANDON_REWRITE_TRANSCRIPTS"):
        path.write_text(played)
    else:
        assert played == expected


def test_there_are_transcripts() -> None:
    assert len(_TRANSCRIPTS) >= 10
