"""PyTorch's own tests of collectives, with the backend "andon": the list in ids.txt."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from integration.fixtures.launched import Launched
from integration.harness import clean_environment

HERE = Path(__file__).parent
ALL = "ANDON_C10D" in os.environ
PATIENCE_S = 850.0


def listed() -> dict[str, list[str]]:
    """What is to become of each test: `always` or `all` with ranks and backend, or `never`."""
    rows = (row.split() for row in (HERE / "ids.txt").read_text("ascii").splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0] != "#"}


def chosen() -> list[tuple[str, str, list[str]]]:
    """The runs: ranks, backend, names."""
    runs: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (when, *how) in listed().items():
        if when == "always" or (when == "all" and ALL):
            runs[how[0], how[1]].append(name)
    return [(*run, names) for run, names in runs.items()]


def run(*arguments: str) -> list[str]:
    """The lines that the runner prints."""
    command = [str(HERE / "runner.py"), *arguments]
    process = Launched("trainer", command, clean_environment(), Path.cwd())
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors[-2000:]
    return output.splitlines()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "backend", "names"), chosen(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_pytorchs_tests_pass(ranks: str, backend: str, names: list[str]) -> None:
    outcomes = [json.loads(line) for line in run(ranks, backend, *names)]

    failed = [f"{name} {how}\n{why[-1500:]}" for name, how, why in outcomes if how != "passed"]
    assert not failed, "\n".join(failed)
    assert [name for name, *_ in outcomes] == names


@pytest.mark.skipif(not ALL, reason="CI sets ANDON_C10D: make test ARGS=tests/c10d")
def test_every_test_of_pytorchs_is_listed() -> None:
    assert run("2", "gloo") == sorted(listed())


def test_the_list_holds_what_it_must() -> None:
    rows = listed()

    assert sum(when == "always" for when, *_ in rows.values()) == 20
    assert sum(when != "never" for when, *_ in rows.values()) >= 100
    assert all(len(how) >= 1 for _, *how in rows.values())
