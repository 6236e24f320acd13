"""The engine of a session: what it shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_torch.engine import _memory
from andon_trainer.peers.memory import can_share


@pytest.mark.skipif(not can_share(), reason="needs Linux and the compiled part: make install")
def test_without_a_folder_to_share_in_there_is_one_warning_and_lanes_carry_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, identity = _memory(tmp_path)
    assert (folder, len(identity)) == (tmp_path, 16)

    assert _memory(tmp_path / "missing") == (None, b"")

    (record,) = caplog.records
    assert "TCP lanes" in record.getMessage()
    assert "ANDON_SHARED_DIR" in record.getMessage()


def test_sharing_can_be_switched_off() -> None:
    assert _memory(None) == (None, b"")
