"""A round continues without the worker that it lost."""

from __future__ import annotations

import pytest

from conformance.breaking import serve_with
from search.mutants import shrinking_roster

if __name__ == "__main__":
    shrinking_roster(pytest.MonkeyPatch())
    serve_with()
