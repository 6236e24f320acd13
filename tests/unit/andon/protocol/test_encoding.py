"""Encodings: rounded to nearest even, never a NaN or an infinity made or lost in silence."""

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
    encodable,
    encode,
)
from unit.andon.strategies import BOUNDED

pytestmark = pytest.mark.usefixtures("arithmetic")

FLOATING = [Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16]
STRIPPED = [Encoding.INT8_BLOCK, Encoding.INT4_BLOCK]
OTHERS = [each for each in Encoding if each not in FLOATING + STRIPPED]


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def from_bits(*bits: int) -> npt.NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def halves(payload: memoryview) -> list[int]:
    return list(struct.unpack(f"<{payload.nbytes // 2}H", payload))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1.0
        (0x3F808000, 0x3F80),  # a tie, down to even
        (0x3F818000, 0x3F82),  # a tie, up to even
        (0x3F808001, 0x3F81),  # just above a tie
        (0x3F817FFF, 0x3F81),  # just below a tie
        (0x3FFF8000, 0x4000),  # carries into the exponent
        (0xBF818000, 0xBF82),  # the sign takes no part
        (0x80000000, 0x8000),  # -0.0
        (0x00008000, 0x0000),  # a subnormal tie, down to zero
        (0x00018000, 0x0002),  # a subnormal tie, up to even
        (0x007FFFFF, 0x0080),  # the greatest subnormal becomes normal
        (0x7F7F7FFF, 0x7F7F),  # the greatest that does not overflow
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
    ],
)
def test_bfloat16_is_rounded_to_nearest_even(bits: int, rounded: int) -> None:
    assert halves(encode(from_bits(bits), Encoding.BFLOAT16)) == [rounded]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 0x3C00),
        (1.0 + 2**-11, 0x3C00),  # a tie, down to even
        (1.0 + 3 * 2**-11, 0x3C02),  # a tie, up to even
        (1.0 + 2**-11 + 2**-20, 0x3C01),
        (-1.0 - 3 * 2**-11, 0xBC02),
        (65504.0, 0x7BFF),  # the greatest
        (65519.996, 0x7BFF),  # just below the tie with infinity
        (2**-24, 0x0001),  # the least subnormal
        (2**-25, 0x0000),  # a tie, down to zero
        (3 * 2**-25, 0x0002),  # a tie, up to even
        (-0.0, 0x8000),
        (math.inf, 0x7C00),
        (-math.inf, 0xFC00),
    ],
)
def test_float16_is_rounded_to_nearest_even(value: float, rounded: int) -> None:
    assert halves(encode(floats(value), Encoding.FLOAT16)) == [rounded]


@pytest.mark.parametrize(
    ("encoding", "values", "element"),
    [
        (Encoding.FLOAT16, floats(1.0, 65520.0, 1e30), 1),
        (Encoding.FLOAT16, floats(math.inf, -65520.0), 1),
        (Encoding.BFLOAT16, from_bits(0, 0x7F7F8000), 1),
        (Encoding.BFLOAT16, from_bits(0xFF7FFFFF), 0),
    ],
)
def test_a_finite_value_that_does_not_fit_is_refused_by_element(
    encoding: Encoding, values: npt.NDArray[np.float32], element: int
) -> None:
    with pytest.raises(EncodingOverflow, match=f"element {element} is") as caught:
        encode(values, encoding)

    assert caught.value.encoding is encoding
    assert caught.value.element == element
    assert caught.value.value == values[element]


@pytest.mark.parametrize("encoding", FLOATING)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_any_nan_stays_a_nan_of_its_sign(encoding: Encoding, bits: int) -> None:
    values = np.concatenate([floats(1.5), from_bits(bits), floats(-2.0)])

    decoded = decode(encode(values, encoding), encoding)

    assert np.isnan(decoded).tolist() == [False, True, False]
    assert np.signbit(decoded[1]) == bool(bits >> 31)
    assert decoded[[0, 2]].tolist() == [1.5, -2.0]


@BOUNDED
@given(st.lists(st.integers(0, 2**16 - 1)))
def test_every_bfloat16_but_a_signalling_nan_round_trips(patterns: list[int]) -> None:
    payload = struct.pack(f"<{len(patterns)}H", *patterns)

    again = halves(encode(decode(payload, Encoding.BFLOAT16), Encoding.BFLOAT16))

    quieted = [
        pattern | 0x40 if pattern & 0x7F80 == 0x7F80 and pattern & 0x7F else pattern
        for pattern in patterns
    ]
    assert again == quieted


@BOUNDED
@given(st.lists(st.floats(width=16, allow_nan=False)))
def test_every_float16_round_trips(values: list[float]) -> None:
    payload = np.array(values, "<f2").tobytes()

    assert bytes(encode(decode(payload, Encoding.FLOAT16), Encoding.FLOAT16)) == payload


@BOUNDED
@given(st.lists(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127)))
def test_bfloat16_is_within_half_a_unit_of_the_last_place(values: list[float]) -> None:
    exact = floats(*values)

    rounded = decode(encode(exact, Encoding.BFLOAT16), Encoding.BFLOAT16)

    error = np.abs(rounded.astype(np.float64) - exact.astype(np.float64))
    assert (error <= np.maximum(np.abs(exact.astype(np.float64)) * 2**-8, 2.0**-134)).all()


def test_float32_is_a_view_both_ways() -> None:
    values = floats(1.0, math.nan, -0.0)

    payload = encode(values, Encoding.FLOAT32)

    assert bytes(payload) == values.tobytes()
    assert np.shares_memory(decode(payload, Encoding.FLOAT32), values)


@pytest.mark.parametrize("encoding", FLOATING)
def test_no_numbers_are_no_bytes(encoding: Encoding) -> None:
    payload = encode(floats(), encoding)

    assert payload.nbytes == 0
    assert decode(payload, encoding).shape == (0,)


def test_numbers_that_lie_apart_are_encoded_in_their_order() -> None:
    apart = np.arange(6, dtype=np.float32)[::2]

    for encoding in FLOATING:
        assert decode(encode(apart, encoding), encoding).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("encoding", FLOATING)
def test_half_an_element_is_refused(encoding: Encoding) -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        decode(bytes(encoding.payload_bytes(1) + 1), encoding)


@pytest.mark.parametrize("encoding", OTHERS)
def test_other_encodings_are_not_float32(encoding: Encoding) -> None:
    with pytest.raises(ValueError, match=encoding.label):
        decode(b"", encoding)
    with pytest.raises(ValueError, match=encoding.label):
        encode(floats(), encoding)
    with pytest.raises(ValueError, match=encoding.label):
        encodable(floats(), encoding)


def test_a_payload_is_as_long_as_its_elements() -> None:
    assert {each.name: each.payload_bytes(1) for each in Encoding} == {
        "FLOAT32": 4,
        "FLOAT16": 2,
        "BFLOAT16": 2,
        "FLOAT64": 8,
        "INT32": 4,
        "INT64": 8,
        "UINT8": 1,
        "INT8_BLOCK": 5,
        "INT4_BLOCK": 5,
    }


@pytest.mark.parametrize("encoding", [Encoding.FLOAT16, Encoding.BFLOAT16])
def test_an_overflow_far_into_a_vector_is_told_by_its_place(encoding: Encoding) -> None:
    values = np.ones(200_000, np.float32)
    values[170_001] = -3.4e38

    with pytest.raises(EncodingOverflow) as caught:
        encode(values, encoding)

    assert caught.value.element == 170_001


@pytest.mark.parametrize("encoding", FLOATING)
def test_what_is_decoded_into_place_is_what_is_decoded(encoding: Encoding) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    payload = encode(values, encoding)
    place = np.zeros(1002, np.float32)

    decode_into(payload, encoding, place[1:-1])

    assert place[[0, -1]].tolist() == [0.0, 0.0]
    assert place[1:-1].tobytes() == decode(payload, encoding).tobytes()


@pytest.mark.parametrize("encoding", FLOATING)
def test_numbers_that_do_not_fill_their_place_are_refused(encoding: Encoding) -> None:
    with pytest.raises(ValueError, match="1 numbers do not fill 2 places"):
        decode_into(encode(floats(1.0), encoding), encoding, np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("encoding", "greatest", "least_beyond"),
    [
        (Encoding.FLOAT16, 65519.996, 65520.0),
        (Encoding.BFLOAT16, from_bits(0x7F7F7FFF)[0], from_bits(0x7F7F8000)[0]),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_encodable_ends_where_rounding_makes_an_infinity(
    encoding: Encoding, greatest: float, least_beyond: float, sign: int
) -> None:
    assert encodable(floats(0.0, sign * greatest), encoding)
    assert not encodable(floats(0.0, sign * least_beyond), encoding)


@pytest.mark.parametrize("encoding", FLOATING)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 65_535, 65_536, 99_999])
def test_nothing_that_is_not_finite_is_encodable(
    encoding: Encoding, value: float, element: int
) -> None:
    values = np.zeros(100_000, np.float32)
    values[element] = value

    assert not encodable(values, encoding)


@pytest.mark.parametrize("encoding", FLOATING)
def test_what_is_encodable_encodes(encoding: Encoding) -> None:
    values = np.random.default_rng(2).standard_normal(70_000).astype(np.float32)

    assert encodable(values, encoding)
    assert encodable(floats(), encoding)
    encode(values, encoding)
