"""Halts: evidence as people read it, reasons as metrics count them."""

from __future__ import annotations

import math

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value, shown


def test_a_label_is_the_reason_in_lower_case() -> None:
    assert HaltReason.NON_FINITE_GRADIENT.label == "non_finite_gradient"
    assert len({reason.label for reason in HaltReason}) == 16


@pytest.mark.parametrize(
    ("parameter", "element", "block", "place"),
    [
        ("blocks.3.attn.weight", (17, 204), 3, "blocks.3.attn.weight[17, 204] (block 3)"),
        ("scale", (), 0, "scale (block 0)"),
        ("scale", (), None, "scale"),
        ("", (), 2, "block 2"),
        ("", (), None, ""),
    ],
)
def test_a_place_is_what_people_can_find(
    parameter: str, element: tuple[int, ...], block: int | None, place: str
) -> None:
    evidence = HaltEvidence(
        id=1,
        reason=HaltReason.NON_FINITE_GRADIENT,
        step=9,
        parameter=parameter,
        element=element,
        block=block,
    )

    assert evidence.place == place


def test_evidence_is_one_sentence() -> None:
    evidence = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=9, message="loss looks odd")
    untold = HaltEvidence(id=1, reason=HaltReason.STATE_LOST, step=9)

    assert str(evidence) == "halted at step 9: loss looks odd"
    assert str(untold) == "halted at step 9: state lost"


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0.1, "0.1"), (1, "1.0")],
)
def test_a_value_is_described_shortly(value: float, text: str) -> None:
    assert describe_value(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.25"),
        (0.10000000149011612, "0.1"),
        (0.25000002980232239, "0.25000003"),
        (3.4028234663852886e38, "3.4028235e+38"),
        (-0.0, "-0"),
        (float("inf"), "inf"),
    ],
)
def test_a_float32_number_is_shown_in_as_many_digits_as_tell_it_from_others(
    value: float, text: str
) -> None:
    assert shown(value) == text
