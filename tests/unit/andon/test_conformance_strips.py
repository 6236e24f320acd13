"""INT8_BLOCK, INT4_BLOCK, INT2_BLOCK and TOPK: the shipped passes give what conformance/ says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encode
from andon_conformance.runner import reference
from unit.andon.golden import golden, naming

_CASES = [*golden("strips"), *({**case, "encoding": "TOPK"} for case in golden("topk"))]
pytestmark = pytest.mark.usefixtures("arithmetic")


def _with(field: str) -> list[dict[str, Any]]:
    """The cases that have a field: there are some."""
    cases = [case for case in _CASES if field in case]
    assert cases
    return cases


def test_values_are_encoded_as_the_vector_says() -> None:
    for case in _with("values"):
        with naming(case):
            values = np.frombuffer(bytes.fromhex(case["values"]), "<f4")
            encoding, kept = Encoding[case["encoding"]], case.get("kept")
            assert values.size == case["element_count"]

            if "overflow" in case:
                with pytest.raises(EncodingOverflow) as caught:
                    encode(values, encoding, kept=kept)
                assert caught.value.element == case["overflow"]
                with pytest.raises(reference.EncodingTooSmall):
                    reference.encode(values.tolist(), encoding, kept)
            else:
                assert encode(values, encoding, kept=kept).hex() == case["payload"]
                assert reference.encode(values.tolist(), encoding, kept).hex() == case["payload"]


def test_payloads_are_decoded_as_the_vector_says() -> None:
    for case in _with("decoded"):
        with naming(case):
            payload, count = bytes.fromhex(case["payload"]), case["element_count"]
            encoding = Encoding[case["encoding"]]

            decoded = decode(payload, encoding, count)

            assert encoding.fits(len(payload), count)
            expected = np.frombuffer(bytes.fromhex(case["decoded"]), "<f4")
            for found in (
                decoded,
                np.array(reference.decode(payload, encoding, count), np.float32),
            ):
                np.testing.assert_array_equal(found, expected)
                there = ~np.isnan(expected)
                assert np.signbit(found[there]).tolist() == np.signbit(expected[there]).tolist()


def test_a_list_that_contradicts_itself_is_refused_with_the_reason() -> None:
    about = {"the counts": "no counts", "the length": "are not", "the places": "listed places"}

    for case in _with("why"):
        match = about.get(case["why"], "runs of -0.0")
        with naming(case), pytest.raises(ValueError, match=match):
            decode(bytes.fromhex(case["payload"]), Encoding.TOPK, case["element_count"])
