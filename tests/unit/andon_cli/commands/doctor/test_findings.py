"""Findings: one line or one object each, and a remedy for every problem."""

from __future__ import annotations

import json

import pytest

from andon_cli.commands.doctor.findings import Finding, fail, findings_json, healthy, ok, warn

FINDINGS = [
    ok("packages", "python 3.11.7"),
    warn("devices", "no CUDA device", "workers run on the CPU"),
    fail("runs", "runs/ can't be written (Read-only file system)", "pass --run-dir"),
]


def test_a_finding_is_one_line_with_its_remedy() -> None:
    assert [str(finding) for finding in FINDINGS] == [
        "ok    python 3.11.7",
        "warn  no CUDA device: workers run on the CPU",
        "fail  runs/ can't be written (Read-only file system): pass --run-dir",
    ]


def test_only_a_failure_is_unhealthy() -> None:
    assert healthy(FINDINGS[:2])
    assert not healthy(FINDINGS)


def test_json_says_whether_the_host_is_healthy_and_what_was_found() -> None:
    told = json.loads(findings_json(FINDINGS))

    assert told["healthy"] is False
    assert told["findings"][1] == {
        "check": "devices",
        "level": "warn",
        "fact": "no CUDA device",
        "remedy": "workers run on the CPU",
    }


def test_a_problem_without_a_remedy_can_not_be_told() -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("clock", "fail", "the clock says 1970")
