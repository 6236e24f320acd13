"""Encodings with a scale for each strip, against the conformance suite's reference.

Ties, signs, scales and what is not finite are in `conformance/strips.json`, and tested with it
(`test_conformance_strips`).
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.encoding import (
    Encoding,
    EncodingOverflow,
    decode,
    decode_into,
    decode_part,
    encodable,
    encode,
)
from andon_conformance.runner import reference
from unit.andon.strategies import BOUNDED

pytestmark = pytest.mark.usefixtures("arithmetic")

STRIPPED = [Encoding.INT8_BLOCK, Encoding.INT4_BLOCK, Encoding.INT2_BLOCK]
all_of_them = pytest.mark.parametrize("encoding", STRIPPED, ids=["int8", "int4", "int2"])
both = pytest.mark.parametrize("encoding", STRIPPED[:2], ids=["int8", "int4"])

any_bits = st.lists(
    st.floats(width=32, min_value=-(2.0**120), max_value=2.0**120)
    | st.sampled_from([0.0, -0.0, 2.0**-126, -(2.0**-149), 127 * 2.0**-126, 2.0**120, 0.5, 63.5]),
    max_size=300,
)


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


@all_of_them
@BOUNDED
@given(values=any_bits)
def test_every_bit_is_that_of_the_reference(encoding: Encoding, values: list[float]) -> None:
    payload = encode(floats(*values), encoding)

    assert bytes(payload) == reference.encode(values, encoding)
    assert payload.nbytes == encoding.payload_bytes(len(values))
    decoded = decode(payload, encoding, len(values))
    expected = np.array(reference.decode(bytes(payload), encoding, len(values)), np.float32)
    assert decoded.tobytes() == expected.tobytes()


@all_of_them
@BOUNDED
@given(data=st.data())
def test_any_payload_decodes_as_the_reference_says(encoding: Encoding, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 300))
    size = encoding.payload_bytes(count)
    payload = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    scale = data.draw(st.sampled_from([1.0, -1.0, -0.0, math.nan, math.inf, 2.0**-140, 3e38]))
    if count:
        payload[:4] = struct.pack("<f", scale)

    found = decode(bytes(payload), encoding, count)

    expected = np.array(reference.decode(bytes(payload), encoding, count), np.float32)
    np.testing.assert_array_equal(found, expected)
    assert np.signbit(found[found == 0]).tolist() == np.signbit(expected[found == 0]).tolist()


@both
@BOUNDED
@given(values=any_bits)
def test_what_was_decoded_is_encoded_to_the_same_bytes(
    encoding: Encoding, values: list[float]
) -> None:
    payload = encode(floats(*values), encoding)

    decoded = decode(payload, encoding, len(values))

    assert bytes(encode(decoded, encoding)) == bytes(payload)
    assert decode(payload, encoding, len(values)).tobytes() == decoded.tobytes()


@all_of_them
@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_value_is_2_to_the_120(encoding: Encoding, sign: int) -> None:
    beyond = np.nextafter(np.float32(2.0**120), np.float32(np.inf))

    assert encodable(floats(sign * 2.0**120), encoding)
    assert not encodable(floats(0.0, sign * beyond), encoding)
    with pytest.raises(EncodingOverflow, match=r"element 70001 is .*beyond what int") as caught:
        encode(np.concatenate([np.zeros(70_001), [sign * beyond]]).astype(np.float32), encoding)
    assert (caught.value.element, caught.value.value) == (70_001, sign * beyond)
    np.testing.assert_array_less(
        np.abs(decode(encode(floats(2.0**120), encoding), encoding, 1)), 1.4e36
    )


@all_of_them
@BOUNDED
@given(values=any_bits)
def test_the_residual_is_what_the_encoding_lost(encoding: Encoding, values: list[float]) -> None:
    numbers = floats(*values)
    residual = np.full(numbers.size, np.nan, np.float32)

    payload = encode(numbers, encoding, residual)

    assert residual.tobytes() == (numbers - decode(payload, encoding, numbers.size)).tobytes()
    assert bytes(payload) == bytes(encode(numbers, encoding))


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16])
def test_other_encodings_have_a_residual_too(encoding: Encoding) -> None:
    numbers = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    residual = np.empty_like(numbers)

    payload = encode(numbers, encoding, residual)

    assert residual.tobytes() == (numbers - decode(payload, encoding, numbers.size)).tobytes()


@all_of_them
def test_a_part_is_decoded_by_itself(encoding: Encoding) -> None:
    values = np.random.default_rng(5).standard_normal(1001).astype(np.float32)
    payload = encode(values, encoding)
    whole = decode(payload, encoding, 1001)

    for start, stop in ((0, 128), (128, 131), (256, 1001), (896, 1000), (0, 0)):
        part = np.full(stop - start, np.nan, np.float32)
        decode_part(payload, encoding, 1001, start, part)
        assert part.tobytes() == whole[start:stop].tobytes()
    with pytest.raises(ValueError, match="elements 896 to 1024 are not among 1001"):
        decode_part(payload, encoding, 1001, 896, np.zeros(128, np.float32))


@all_of_them
def test_a_payload_of_another_length_is_refused(encoding: Encoding) -> None:
    payload = bytes(encoding.payload_bytes(40) + 1)

    with pytest.raises(ValueError, match=rf"{len(payload)} bytes are not 40 elements of int"):
        decode_into(payload, encoding, np.zeros(40, np.float32))
    with pytest.raises(ValueError, match="does not say how many numbers"):
        decode(payload, encoding)


@all_of_them
def test_the_bytes_of_a_long_vector_do_not_depend_on_how_it_is_worked_through(
    encoding: Encoding,
) -> None:
    values = np.random.default_rng(6).standard_normal(2**16 + 77).astype(np.float32)

    payload = encode(values, encoding)

    assert bytes(payload) == reference.encode(values.tolist(), encoding)


@all_of_them
def test_numbers_that_lie_apart_are_encoded_in_order(encoding: Encoding) -> None:
    apart = np.arange(-300, 300, dtype=np.float32)

    assert bytes(encode(apart[::2], encoding)) == bytes(encode(apart[::2].copy(), encoding))
