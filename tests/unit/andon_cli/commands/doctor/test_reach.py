"""Reach: what a line's own word is worth."""

from __future__ import annotations

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import LineStatus
from andon_cli.commands.doctor.reach import judge_status


def test_a_line_that_runs_is_well() -> None:
    finding = judge_status(LineStatus(run_id="7f3a", state="RUNNING", step=118, live=2))

    assert str(finding) == "ok    run 7f3a is RUNNING at step 118, 2 live"


def test_a_halted_line_is_told_with_its_evidence() -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3, message="lea pulled the cord")

    finding = judge_status(LineStatus(run_id="7f3a", state="HALTED", step=2, halt=halt))

    assert str(finding) == (
        "warn  run 7f3a: HALTED at step 3: lea pulled the cord. No weight moved: "
        "answer it with `andon resume`"
    )
