"""Core stories, told in `tests/scenarios/line-*.txt` and `session-*.txt`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scenarios import line_transcript, session_transcript

_FOLDER = Path(__file__).parents[2] / "scenarios"
_PLAYERS = {"line": line_transcript.play, "session": session_transcript.play}
_TRANSCRIPTS = sorted(path for kind in _PLAYERS for path in _FOLDER.glob(f"{kind}-*.txt"))


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_core_does_what_its_transcript_says(path: Path) -> None:
    expected = path.read_text()

    played = _PLAYERS[path.stem.partition("-")[0]](expected)

    if os.environ.get("ANDON_REWRITE_TRANSCRIPTS"):
        path.write_text(played)
    else:
        assert played == expected


def test_there_are_transcripts() -> None:
    assert len(_TRANSCRIPTS) >= 10
