"""The table of what of PyTorch works names tests that exist, and every row of the harness."""

from __future__ import annotations

import re

from unit.project.documents import ROOT

PAGE = (ROOT / "docs/guide/pytorch.md").read_text("utf-8")
ROWS = ROOT / "tests/integration/rows"


def test_every_test_that_the_table_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))

    missing = [
        name for name in named if not (ROOT / f"tests/unit/andon_trainer/{name}.py").is_file()
    ]

    assert len(named) > 20
    assert missing == []


def test_the_table_names_every_row_and_no_other() -> None:
    # Each is a key of a dict literal, `"name": Row(`; importing them would need PyTorch.
    sources = "".join(path.read_text("utf-8") for path in ROWS.glob("*.py"))
    rows = set(re.findall(r'"([^"]+)": Row\(', sources))

    named = set(re.findall(r"row \*([^*]+)\*", PAGE))

    assert rows == named
