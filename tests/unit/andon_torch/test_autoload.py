"""The entry points: they register the backend, raise nothing, and import nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch.distributed as dist

from andon_torch import autoload


def test_pytorch_finds_the_backend_by_itself() -> None:
    (found,) = entry_points(group="torch.backends", name="andon")
    (other,) = entry_points(group="torch.distributed.backends", name="andon")

    assert found.load() is other.load() is autoload.register
    assert dist.is_backend_available("andon")


def test_registering_twice_does_nothing() -> None:
    before = dist.Backend._plugins["ANDON"]

    autoload.register()

    assert dist.Backend._plugins["ANDON"] is before


def test_an_error_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise RuntimeError("changed")

    monkeypatch.setattr(dist, "is_available", fail)

    autoload.register()

    assert "could not be registered" in caplog.text


def test_import_torch_imports_nothing_else_of_ours() -> None:
    script = (
        "import torch, sys; print(*(m for m in sys.modules if m.partition('.')[0] in "
        "('andon', 'andon_torch', 'andon_trainer', 'grpc')))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["andon_torch", "andon_torch.autoload"]
