"""The base image of `make containers`: what skips its tests, and what fails them."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers.images import fetch_base
from containers.machine import Missing


def test_a_base_image_that_can_not_be_had_skips(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no mirror"):
        fetch_base(["sh", "-c", "echo no mirror; exit 1"], tmp_path / "log", 30.0)


def test_a_base_image_that_is_slow_fails_and_its_command_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no base image after"):
        fetch_base(["python3", "-c", "import time; time.sleep(600)"], tmp_path / "log", 0.3)
