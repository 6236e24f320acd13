"""The golden vectors of `conformance/`, to which other languages are held as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "by_name", "golden", "naming"]

FOLDER = Path(__file__).resolve().parents[3] / "conformance"


def golden(file: str, name: str = "") -> list[dict[str, Any]]:
    """The cases of a file, under this name in it; by default under the file's own."""
    cases: list[dict[str, Any]] = json.loads((FOLDER / f"{file}.json").read_text("utf-8"))[
        name or file
    ]
    return cases


def by_name(case: dict[str, Any]) -> str:
    """A test's id."""
    return str(case["name"])


@contextmanager
def naming(case: dict[str, Any]) -> Iterator[None]:
    """Names a case in whatever goes wrong with it: one test goes through hundreds of them."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case['name']}")
        raise
