"""Judging: the first difference between what was recomputed and the journal, named narrowly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_cli.auditing.judging import Difference, Judge
from andon_cli.auditing.scope import AuditRefused
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport.audit_book import AttestedNode, AttestedStep, ComparedWeights
from andon_coordinator.transport.reader import JournalEntry
from scenarios import line_values

RESULT = line_values.result(loss=0.5, correct=None)
ATTESTED = AttestedStep(
    (
        AttestedNode(0, 1, 4, "a0", "5a", b"same component!!" + b"of the first one"),
        AttestedNode(1, 1, 7, "a1", "5b"),
        AttestedNode(1, 1, 4, "a1", "5b"),
        AttestedNode(0, 2, 4, "b0", ""),
    ),
    averages="c0",
)


def entry(step: int, result: StepResult = RESULT) -> JournalEntry:
    record = Record(Key(1, step + 1), Key(1, step), RecordKind.STEP, step, Cursor(0, step), (0,))
    return JournalEntry(record, result)


def judge(result: StepResult = RESULT, attested: AttestedStep | None = None) -> Judge:
    weights = {1: ComparedWeights("f1", base_hashed=False), 2: ComparedWeights("f2")}
    entries = iter([entry(1), entry(2, result)])
    return Judge(entries, weights, lambda key: attested if key == Key(1, 3) else None)


def step(number: int, **other: Any) -> dict[str, Any]:
    names = ("loss", "samples", "weight", "correct", "overflow")
    said = {name: getattr(RESULT, name) for name in names}
    return {"what": "step", "step": number, "attested": [], "averages": "", **said, **other}


def weights(number: int, sha256: str, *, base_hashed: bool = False) -> dict[str, Any]:
    return {"what": "weights", "step": number, "sha256": sha256, "base_hashed": base_hashed}


def found(judge: Judge, *lines: dict[str, Any]) -> Difference | None:
    return next(filter(None, map(judge.take, lines)), None)


def test_equal_steps_have_no_difference() -> None:
    judged = judge(attested=ATTESTED)
    leaves = [[0, 1, "a0", "5a", ""], [1, 1, "a1", "5b", ""], [0, 2, "b0", "", ""]]

    difference = found(
        judged, step(1), weights(1, "f1"), step(2, attested=leaves, averages="c0"), weights(2, "f2")
    )

    assert difference is None
    assert (judged.step, judged.weights_at, judged.nodes) == (2, 2, 4)


def test_a_loss_that_is_not_a_number_equals_itself() -> None:
    judged = judge(replace(RESULT, loss=math.nan))

    assert found(judged, step(1), step(2, loss=math.nan)) is None


def test_digests_of_two_kinds_are_not_compared() -> None:
    assert found(judge(), step(1), weights(1, "other", base_hashed=True)) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            weights(2, "other"),
            "step 2 differs: its weights are f2 by the journal, and other recomputed; the weights "
            "before it, after step 1, are equal",
        ),
        (
            {"what": "evaluation", "step": 2, "batches": [3, 4]},
            "the evaluation after step 2 differs: the line has other sums for batches 3, 4, and "
            "all losses until then are equal",
        ),
    ],
)
def test_what_follows_a_step_is_named_with_it(line: dict[str, Any], words: str) -> None:
    difference = found(judge(), step(1), weights(1, "f1"), step(2), line)

    assert difference is not None
    assert difference.in_words == words


def test_a_loss_that_differs_may_be_the_fault_of_an_earlier_step() -> None:
    difference = found(judge(), step(1), step(2, loss=0.25))

    assert difference is not None
    assert difference.in_words == (
        "step 2 differs: its loss is 0.5 by the journal, and 0.25 recomputed; no weights before it "
        "were compared, so an earlier step may be at fault"
    )


@pytest.mark.parametrize(
    ("leaf", "what", "workers"),
    [([1, 1, "wrong", "5b", ""], "gradient", (4, 7)), ([0, 1, "a0", "wrong", ""], "data", (4,))],
)
def test_attestations_name_the_grain_and_who_computed_it(
    leaf: list[Any], what: str, workers: tuple[int, ...]
) -> None:
    judged = judge(attested=ATTESTED)
    leaves = {0: [0, 1, "a0", "5a", ""], 1: [1, 1, "a1", "5b", ""]} | {leaf[0]: leaf}

    # The loss differs as well: the grain says more.
    difference = found(judged, step(1), step(2, attested=[*leaves.values()], loss=0.25))

    assert difference is not None
    named = difference.what, difference.grains, difference.workers
    assert named == (what, f"grain {leaf[0]}", workers)


def test_averages_are_compared_once_all_grains_are_equal() -> None:
    judged = judge(attested=ATTESTED)

    difference = found(
        judged, step(1), step(2, attested=[[0, 1, "a0", "5a", ""]], averages="wrong")
    )

    assert difference is not None
    assert difference.what == "averages"


def test_the_first_parameter_that_differs_is_named_where_the_journal_has_its_hash() -> None:
    layout = Layout(
        tuple(
            Block(BlockKind.TRANSFORMER_BLOCK, name, (Component(name, (4,)),))
            for name in ("lower", "upper")
        )
    )
    apart = {"parameter": "upper", "element": [2], "there": "0.5", "here": "0.25"}
    components = (b"same component!!" + bytes(16)).hex()
    prefixes = {1: ComparedWeights("f1", base_hashed=False, prefixes=b"upper666lower555")}
    judged = Judge(iter([entry(1), entry(2)]), prefixes, lambda key: ATTESTED, layout)

    weights_differ = judged.take(weights(1, "f0") | {"prefixes": (b"upper666" + bytes(8)).hex()})
    element_differs = judged.take(weights(1, "f0") | {"apart": apart})
    grain_differs = found(judged, step(1, attested=[[0, 1, "wrong", "5a", components]]))

    assert weights_differ is not None
    assert "recomputed, first in lower; no weights before it" in weights_differ.in_words
    assert element_differs is not None
    words = "first in upper[2] (0.5 in the run's checkpoint, 0.25 recomputed); no weights"
    assert words in element_differs.in_words
    assert grain_differs is not None
    assert (grain_differs.what, grain_differs.parameter) == ("gradient", "upper")


def nearly(*lines: dict[str, Any]) -> tuple[Judge, Difference | None]:
    """The same of a run of two workers without equal bits, to one part of a hundred."""
    entries = (replace(each, record=replace(each.record, roster=(0, 1))) for each in (entry(1),))
    judged = Judge(entries, {}, lambda key: None, None, 0.01)
    return judged, found(judged, *lines)


def test_without_equal_bits_a_loss_may_differ_by_a_part_of_it() -> None:
    judged, difference = nearly(step(1, loss=0.502, left_behind="", correct=9))
    assert (difference, judged.step) == (None, 1)
    part, at = judged.farthest
    assert (part, at) == (abs(0.5 - 0.502) / 0.502, 1)

    _, difference = nearly(step(1, loss=0.51, left_behind=""))
    assert difference is not None
    assert (difference.what, difference.step) == ("loss", 1)


def test_without_equal_bits_a_step_that_draws_can_not_be_compared() -> None:
    with pytest.raises(AuditRefused, match="step 1 can't be compared: its loop body draws"):
        nearly(step(1, left_behind="draws random numbers, as dropout does"))
