"""The tests in two halves, for two processes at once: always the same tests share a process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

_IN_THE_OTHER_HALF = tuple(
    f"tests/integration/test_{name}.py"
    for name in ("by_hand", "elastic", "launch", "leaving", "parity", "restarts", "ring")
)
"""Of tests/integration, so that both halves take as long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Says which half each test is of, to `pytest -n 2 --dist loadgroup`."""
    for item in items:
        name = item.nodeid
        first = name.startswith("tests/integration/") and not name.startswith(_IN_THE_OTHER_HALF)
        item.add_marker(pytest.mark.xdist_group("first" if first else "second"))
