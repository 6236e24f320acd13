"""The judge passes Andon's own workers, and finds the one defect of each broken worker."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Literal

import pytest

from andon_conformance.judge.checks import Outcome, Verdict, is_wanted
from andon_conformance.judge.client import Launch
from conformance.grain_defects import GRAIN_DEFECTS
from conformance.judged_defects import DEFECTS, Defect
from conformance.trials import AT_ONCE, CLIENTS, forked, judged
from integration.fixtures.console import andon

pytestmark = pytest.mark.integration

WHOLE = int(os.environ.get("ANDON_JUDGED", "0"))
"""How many broken clients play every scenario; `make soak` runs all of them."""

BROKEN = {**GRAIN_DEFECTS, **DEFECTS}


def _broken(name: str) -> Launch:
    if name in GRAIN_DEFECTS:
        return forked("trainer", "judged_line.py", name)
    return forked("service", "judged_numpy.py", name)


@pytest.fixture(scope="module")
def findings_of_broken_ones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Verdict]]:
    """Runs each defective client in the scenario of its check, all at the same time."""
    folder = tmp_path_factory.mktemp("broken")

    async def judge_all() -> dict[str, list[Verdict]]:
        turn = asyncio.Semaphore(AT_ONCE)

        async def judge_one(name: str, defect: Defect) -> list[Verdict]:
            async with turn:
                return await judged(
                    _broken(name),
                    folder / name,
                    [defect.found_by.partition(".")[0]],
                    patience_s=defect.patience_s,
                    quiet_s=1.0,
                )

        found = await asyncio.gather(*itertools.starmap(judge_one, BROKEN.items()))
        return dict(zip(BROKEN, found, strict=True))

    return asyncio.run(judge_all())


def _named(verdicts: list[Verdict], *outcomes: Outcome) -> dict[str, str]:
    return {
        verdict.check.name: verdict.evidence for verdict in verdicts if verdict.outcome in outcomes
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("room", "client"), [("service", "judged_numpy.py"), ("trainer", "judged_line.py")]
)
def test_andons_worker_passes_every_check_without_pytorch_and_as_a_script_with_a_line(
    tmp_path: Path, room: Literal["service", "trainer"], client: str
) -> None:
    verdicts = asyncio.run(judged(forked(room, client), tmp_path / "judged"))

    wrong = _named(verdicts, Outcome.FAILED, Outcome.UNREACHED, Outcome.SKIPPED)
    without = {"its plan has no grain"} if client == "judged_numpy.py" else set()
    assert verdicts
    assert set(wrong.values()) == without


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_client_fails_by_the_one_check_meant(
    name: str, findings_of_broken_ones: dict[str, list[Verdict]]
) -> None:
    verdicts = findings_of_broken_ones[name]

    assert list(_named(verdicts, Outcome.FAILED)) == [BROKEN[name].found_by], verdicts


def test_a_client_that_ends_at_a_halt_is_not_told_wrong_for_it(tmp_path: Path) -> None:
    launch = forked("service", "judged_numpy.py", ANDON_ON_HALT="raise")

    verdicts = asyncio.run(judged(launch, tmp_path / "judged", ["halt"]))

    assert list(_named(verdicts, Outcome.PASSED)) == ["halt.silence"]
    assert list(_named(verdicts, Outcome.SKIPPED)) == [
        "halt.reported",
        "halt.answered",
        "halt.joined",
        "halt.resume",
        "halt.weights",
        "halt.unknown",
        "halt.skip",
    ]


@pytest.mark.skipif(not WHOLE, reason="a soak: ANDON_JUDGED says how many")
@pytest.mark.parametrize("name", list(BROKEN)[: max(1, WHOLE)])
def test_a_broken_client_fails_by_the_check_meant_among_all_others(
    name: str, tmp_path: Path
) -> None:
    broken = BROKEN[name]

    verdicts = asyncio.run(judged(_broken(name), tmp_path / "judged", patience_s=broken.patience_s))

    failed = _named(verdicts, Outcome.FAILED)
    assert broken.found_by in failed
    others = [check for check in failed if check != broken.found_by]
    assert all(broken.may_fail and is_wanted(it, broken.may_fail) for it in others)


def test_the_command_says_what_it_found_as_json(tmp_path: Path) -> None:
    client = [sys.executable, str(CLIENTS / "judged_numpy.py"), "turns-the-digest"]
    names = ["join.layout-digest", "join.run"]
    words = ["conformance", "judge", "--format", "json", "--only", *names, "--", *client]

    code, output, _ = andon(tmp_path, *words, PYTHONPATH=":".join(filter(None, sys.path)))

    report = json.loads(output)
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert (code, report["passed"]) == (1, False)
    assert outcomes == {"join.layout-digest": "fail", "join.run": "pass"}
