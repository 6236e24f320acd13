"""Runs each target on its corpus and on all inputs that once failed; see `targets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

_HERE = Path(__file__).parent
_MOST_FILES, _MOST_BYTES = 1000, 2**20


def _inputs(name: str) -> Iterator[Path]:
    for folder in ("corpus", "regressions"):
        yield from sorted((_HERE / folder / name).glob("*"))


@pytest.mark.parametrize("name", TARGETS)
def test_c_wire_002_the_corpus_is_read_or_refused(name: str) -> None:
    inputs = list(_inputs(name))
    assert inputs, "a target has a corpus"

    for path in inputs:
        try:
            TARGETS[name](path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.name} broke a contract of {name}") from error


def test_the_corpus_is_small() -> None:
    files = [path for path in (_HERE / "corpus").rglob("*") if path.is_file()]

    assert len(files) < _MOST_FILES
    assert sum(path.stat().st_size for path in files) < _MOST_BYTES
    assert {path.parent.name for path in files} == set(TARGETS)
