"""The golden vectors of `conformance/`, to which other languages are held as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "by_name", "golden"]

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
