"""An audit's own folder: it goes on where it was, and touches nothing of anybody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_cli.auditing.folder import AuditFolder
from andon_cli.auditing.scope import AuditRefused

AUDIT = {"run": "7f3a", "first": 1, "last": 500}


def test_only_the_same_audit_goes_on_and_only_if_it_is_not_over(tmp_path: Path) -> None:
    with AuditFolder.open(tmp_path / "audit") as folder:
        assert folder.equal_to(AUDIT) == 0
        folder.note(AUDIT, 311)
        assert folder.equal_to(AUDIT) == 311
        assert folder.equal_to({**AUDIT, "last": 400}) == 0
        folder.note(AUDIT, 500, over=True)
        assert folder.equal_to(AUDIT) == 0


def test_two_audits_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        AuditFolder.open(tmp_path / "audit"),
        pytest.raises(AuditRefused, match="another audit uses"),
    ):
        AuditFolder.open(tmp_path / "audit")


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)

    with pytest.raises(AuditRefused, match="holds something else"):
        AuditFolder.open(tmp_path)

    assert checkpoint.exists()
