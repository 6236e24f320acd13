"""What all tests share: two halves for two processes at once, always of the same tests; and that
modules which need PyTorch are skipped where there is none (`make test-core`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

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


class _WithoutTorch(pytest.Module):
    """A module of tests where PyTorch is not installed: skipped if it imports it."""

    def collect(self) -> Sequence[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name == "torch":
                pytest.skip("needs PyTorch: make install", allow_module_level=True)
            raise


if find_spec("torch") is None:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _WithoutTorch.from_parent(parent, path=module_path)
