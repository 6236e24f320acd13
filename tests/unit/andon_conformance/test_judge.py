"""The judge of clients: its numbers, its findings, and its list of checks in the documentation."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from andon.host.errors import UsageError
from andon.protocol.encoding import Encoding, decode
from andon.protocol.messages import AveragedBlock
from andon.v1 import reducer_pb2
from andon.wire.frames import parse_response
from andon_conformance.config import JudgeConfig, read_config
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import (
    Check,
    Outcome,
    Overdue,
    Stopped,
    Verdict,
    Verdicts,
    is_wanted,
)
from andon_conformance.judge.rounds import weighted_mean
from andon_conformance.judge.scenarios.averaging import oddly
from andon_conformance.judge.trial import SCENARIOS, PlayedScenario, refuse_strange_names
from andon_conformance.report import client_json, client_summary, scenario_lines
from unit.project.documents import ROOT, Document

CHECKS = (
    Check("walk.left", "goes left", "rule 1"),
    Check("walk.right", "goes right", "rule 2"),
)
VECTORS = json.loads((ROOT / "conformance/mean.json").read_text())["means"]
DIVIDED = [vector for vector in VECTORS if vector["total_weight"]]
"""If all ranks abstain, nothing is."""


@pytest.mark.parametrize("vector", DIVIDED, ids=lambda vector: vector["name"])
def test_the_mean_is_that_of_the_vectors_to_the_bit(vector: dict[str, object]) -> None:
    weights, contributions = vector["weights"], vector["contributions"]
    assert isinstance(weights, list)
    assert isinstance(contributions, list)
    numbers = [np.frombuffer(bytes.fromhex(text), dtype="<f4") for text in contributions]
    parts = [(weight, each) for weight, each in zip(weights, numbers, strict=True) if weight]

    mean = weighted_mean(parts)

    assert mean.astype("<f4").tobytes().hex() == vector["mean"]


def test_an_oddly_written_average_is_the_same_average() -> None:
    block = reducer_pb2.AveragedBlock(
        key={"term": 7, "round": 2},
        operation=reducer_pb2.OPERATION_WEIGHTED_MEAN,
        contributors=2,
        world_size=2,
        block=1,
        element_offset=3,
        element_count=2,
        total_weight=5.0,
        encoding="ENCODING_FLOAT32",
        payload=np.array([1.5, -2.0], dtype="<f4").tobytes(),
    )
    plain = reducer_pb2.ReduceResponse(averaged_block=block).SerializeToString()

    odd = oddly(block)

    assert odd != plain
    message = parse_response(odd)
    assert isinstance(message, AveragedBlock)
    assert message == parse_response(plain)
    assert decode(message.payload, Encoding.FLOAT32).tolist() == [1.5, -2.0]


def test_a_check_that_failed_stays_failed() -> None:
    verdicts = Verdicts(CHECKS)

    verdicts.failed("walk.left", "went right")
    verdicts.passed("walk.left", "went left")
    verdicts.passed("walk.right", "went right")
    verdicts.failed("walk.right", "then left")

    outcomes = [(verdict.outcome, verdict.evidence) for verdict in verdicts.all("")]
    assert outcomes == [(Outcome.FAILED, "went right"), (Outcome.FAILED, "then left")]


def test_what_comes_too_late_fails_its_check_and_leaves_the_others_open() -> None:
    verdicts = Verdicts(CHECKS)

    with pytest.raises(Stopped), verdicts.deciding("walk.left"):
        raise Overdue("nothing came")

    left, right = verdicts.all("it ended before")
    assert (left.outcome, left.evidence) == (Outcome.FAILED, "nothing came")
    assert (right.outcome, right.evidence) == (Outcome.UNREACHED, "it ended before")


def test_a_check_is_wanted_by_its_own_name_or_its_scenarios() -> None:
    wanted = [is_wanted("walk.left", only) for only in ((), ("walk",), ("walk.left",), ("wal",))]

    assert wanted == [True, True, True, False]


def _played(*outcomes: Outcome) -> PlayedScenario:
    async def play(bench: Bench) -> None:
        raise AssertionError

    return PlayedScenario(
        scenario=Scenario(name="walk", summary="two steps", checks=CHECKS, play=play),
        verdicts=tuple(
            Verdict(check, outcome, f"saw {outcome.value}")
            for check, outcome in zip(CHECKS, outcomes, strict=True)
        ),
        seconds=1.0,
        said="hello",
    )


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        (Outcome.PASSED, True),
        (Outcome.SKIPPED, True),
        (Outcome.FAILED, False),
        (Outcome.UNREACHED, False),
    ],
)
def test_a_client_passes_only_if_nothing_failed_or_was_left_open(
    outcome: Outcome, *, holds: bool
) -> None:
    played = _played(Outcome.PASSED, outcome)

    assert played.holds is holds
    assert json.loads(client_json([played], 1.0))["passed"] is holds
    assert ("    | hello" in scenario_lines(played)) is not holds


def test_the_report_has_evidence_only_where_a_check_did_not_pass() -> None:
    lines = "\n".join(scenario_lines(_played(Outcome.PASSED, Outcome.FAILED)))

    assert "saw pass" not in lines
    assert "saw fail" in lines
    assert client_summary([_played(Outcome.PASSED, Outcome.FAILED)], 2.0) == (
        "1 passed, 1 failed, in 2.0 s"
    )


def test_names_of_no_check_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"'lave'.*leave"):
        refuse_strange_names(["step", "lave"])


def test_the_clients_own_flags_come_after_two_dashes() -> None:
    argv = ["judge", "--only", "step", "halt.skip", "--jobs", "4", "--"]

    config = read_config([*argv, sys.executable, "--jobs", "9"], {})

    assert config == JudgeConfig(
        command=(sys.executable, "--jobs", "9"), only=("step", "halt.skip"), jobs=4
    )


@pytest.mark.parametrize(
    ("command", "fact"), [((), "no client to judge"), (("/no/such/client",), "can't be started")]
)
def test_a_client_that_is_not_there_is_refused(command: tuple[str, ...], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        JudgeConfig(command=command)


def test_the_document_lists_the_checks_that_there_are() -> None:
    text = Document(ROOT / "docs/conformance-clients.md").text

    listed = re.findall(r"^\| `([a-z-]+\.[a-z-]+)` \| (.+) \| (\w+ \d+) \|$", text, re.MULTILINE)

    assert listed == [
        (check.name, check.claim, check.rule) for scenario in SCENARIOS for check in scenario.checks
    ]
    for scenario in SCENARIOS:
        assert (
            f"### {scenario.name}\n\n{scenario.summary[0].upper()}{scenario.summary[1:]}." in text
        )


def test_names_of_checks_are_unique_and_begin_with_their_scenarios() -> None:
    names = [check.name for scenario in SCENARIOS for check in scenario.checks]

    assert len(set(names)) == len(names)
    for scenario in SCENARIOS:
        assert all(check.name.startswith(f"{scenario.name}.") for check in scenario.checks)
