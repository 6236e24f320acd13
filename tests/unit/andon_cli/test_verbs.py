"""What every command has: an example, and JSON if it prints something for programs."""

from __future__ import annotations

from dataclasses import fields

import pytest

from andon_cli.app import main
from andon_cli.verbs import OVERVIEW, VERBS, imported

_FOR_PROGRAMS_OTHERWISE = {"run", "serve"}
"""`andon run --report FILE` and `andon serve --announce` write JSON."""


@pytest.mark.parametrize("name", VERBS)
def test_the_help_of_every_command_has_an_example_and_says_its_exit_codes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0

    _, example, after = capsys.readouterr().out.partition("\nexample:\n")
    assert example
    assert f"andon {name}" in after.split("\n\n")[0]
    assert "exit code" in after.lower()


@pytest.mark.parametrize("name", sorted(VERBS.keys() - _FOR_PROGRAMS_OTHERWISE))
def test_every_command_that_prints_something_has_json(name: str) -> None:
    schema = imported(VERBS[name].schema)

    assert "format" in {each.name for each in fields(schema)}


def test_the_overview_begins_with_what_people_do_first() -> None:
    assert "andon status --watch" in OVERVIEW
    assert "andon history" in OVERVIEW
