"""The catalogue of checks: chosen by name, each once, and listed in the documentation as it is."""

from __future__ import annotations

import re

import pytest

from andon.host.errors import UsageError
from andon_conformance.config import RunnerConfig, read_config
from andon_conformance.reach import Reach
from andon_conformance.report import check_line, server_summary
from andon_conformance.runner.app import CHECKS
from andon_conformance.runner.checks import Result, chosen
from unit.project.documents import ROOT, protocol


def test_every_check_has_a_name_of_its_own() -> None:
    names = [each.name for each in CHECKS]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+\.[a-z_0-9]+", name) for name in names)


def test_the_documentation_lists_every_check_as_it_is() -> None:
    text = (ROOT / "docs/conformance.md").read_text("utf-8")

    rows = re.findall(r"^\| `([a-z]+\.[a-z_0-9]+)` \| ([\d.]+) \| (\d) \| (.+) \|$", text, re.M)

    assert rows == [(each.name, each.rule, str(each.workers), each.claim) for each in CHECKS]


def test_rules_are_of_the_protocol() -> None:
    text = protocol()
    sections = set(re.findall(r"^## (\d+)\. ", text, re.M))
    rules = set(re.findall(r"^(\d+)\. \*\*", text, re.M))

    for each in CHECKS:
        section, _, rule = each.rule.partition(".")
        assert section in sections, each.name
        assert not rule or rule in rules, each.name


def test_checks_are_chosen_by_name_and_by_group() -> None:
    names = [each.name for each in chosen(CHECKS, ["journal", "average.order"])]

    assert names == ["average.order", "journal.head", "journal.record", "journal.not_forward"]
    assert chosen(CHECKS, []) == list(CHECKS)


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no check 'average\.speed'"):
        chosen(CHECKS, ["average.speed"])


def test_the_command_line_says_what_is_judged() -> None:
    argv = "run --target alpha:1 --workers 3 --only join average.order --patience 2"

    config = read_config(argv.split(), {"ANDON_FORMAT": "json", "ANDON_WORKERS": "9"})

    assert config == RunnerConfig(
        reach=Reach(address="alpha:1"), workers=3, only=("join", "average.order"), patience_s=2.0
    )


def test_a_run_without_a_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_config(["run"], {})

    assert "--target" in capsys.readouterr().err


def test_a_failure_is_shown_with_what_was_expected_and_what_came() -> None:
    result = Result(
        name="commit.loss", rule="3", claim="It is right", outcome="fail", expected="1", came="2"
    )

    lines = check_line(result).splitlines()

    assert lines[0].startswith("FAIL  commit.loss")
    assert [line.split() for line in lines[1:]] == [["expected", "1"], ["came", "2"]]
    assert server_summary([result, result]) == "0 passed, 2 failed, 0 skipped"
