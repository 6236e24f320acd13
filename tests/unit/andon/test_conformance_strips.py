"""INT8_BLOCK and INT4_BLOCK: the shipped passes give what conformance/strips.json says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encode
from andon_conformance.runner import reference
from unit.andon.golden import by_name, golden

_CASES = golden("strips")
pytestmark = pytest.mark.usefixtures("arithmetic")


@pytest.mark.parametrize("case", [case for case in _CASES if "values" in case], ids=by_name)
def test_values_are_encoded_as_the_vector_says(case: dict[str, Any]) -> None:
    values = np.frombuffer(bytes.fromhex(case["values"]), "<f4")
    encoding = Encoding[case["encoding"]]
    assert values.size == case["element_count"]

    if "overflow" in case:
        with pytest.raises(EncodingOverflow) as caught:
            encode(values, encoding)
        assert caught.value.element == case["overflow"]
        with pytest.raises(reference.EncodingTooSmall):
            reference.encode(values.tolist(), encoding)
    else:
        assert encode(values, encoding).hex() == case["payload"]
        assert reference.encode(values.tolist(), encoding).hex() == case["payload"]


@pytest.mark.parametrize("case", [case for case in _CASES if "decoded" in case], ids=by_name)
def test_payloads_are_decoded_as_the_vector_says(case: dict[str, Any]) -> None:
    payload, count = bytes.fromhex(case["payload"]), case["element_count"]
    encoding = Encoding[case["encoding"]]

    decoded = decode(payload, encoding, count)

    assert len(payload) == encoding.payload_bytes(count)
    expected = np.frombuffer(bytes.fromhex(case["decoded"]), "<f4")
    for found in (decoded, np.array(reference.decode(payload, encoding, count), np.float32)):
        np.testing.assert_array_equal(found, expected)
        there = ~np.isnan(expected)
        assert np.signbit(found[there]).tolist() == np.signbit(expected[there]).tolist()
