"""Encodings: rounded to nearest even, never a NaN or an infinity made or lost in silence."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

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
from vectors.floats import BFLOAT16, FLOAT16, FLOAT32, Format

pytestmark = pytest.mark.usefixtures("arithmetic")

FLOATING = [Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16]
OTHERS = [each for each in Encoding if each not in FLOATING and not each.loses_much]


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def from_bits(*bits: int) -> npt.NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def halves(payload: memoryview) -> list[int]:
    return list(struct.unpack(f"<{payload.nbytes // 2}H", payload))


HALVES = {Encoding.FLOAT16: FLOAT16, Encoding.BFLOAT16: BFLOAT16}


@st.composite
def near_ties(draw: st.DrawFn, form: Format) -> np.float32:
    """A float32 that lies in the middle between two numbers of a format, or next to it."""
    low = draw(st.integers(0, form.infinity - 1) | st.just(form.infinity - 1))
    above, below = form.read(low).size, form.read(low - 1).size if low else Fraction(0)
    assert above is not None
    assert below is not None
    step = above - below
    if low + 1 < form.infinity:
        step = (form.read(low + 1).size or Fraction(0)) - above
    middle = np.float32(above + step / 2)
    towards = draw(st.sampled_from([middle, np.float32(np.inf), np.float32(0)]))
    return np.float32(draw(st.sampled_from([1, -1])) * np.nextafter(middle, towards))


@pytest.mark.parametrize("encoding", HALVES)
@BOUNDED
@given(data=st.data())
def test_a_number_is_rounded_to_the_nearest_with_ties_to_even_or_is_refused_by_its_place(
    encoding: Encoding, data: st.DataObject
) -> None:
    form = HALVES[encoding]
    value = data.draw(near_ties(form) | st.floats(width=32, allow_nan=False, allow_infinity=False))
    values = floats(1.0, float(value))
    rounded = form.round(FLOAT32.read(int(values.view(np.uint32)[1])))

    assert encodable(values, encoding) == form.is_finite(rounded)
    if form.is_finite(rounded):
        assert halves(encode(values, encoding)) == [form.of(1.0), rounded]
    else:
        with pytest.raises(EncodingOverflow, match="element 1 is") as caught:
            encode(values, encoding)
        assert (caught.value.encoding, caught.value.value) == (encoding, values[1])


@pytest.mark.parametrize("encoding", FLOATING)
def test_any_nan_stays_a_nan_of_its_sign(encoding: Encoding) -> None:
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001):
        values = np.concatenate([floats(1.5), from_bits(bits), floats(-2.0)])

        decoded = decode(encode(values, encoding), encoding)

        assert np.isnan(decoded).tolist() == [False, True, False], hex(bits)
        assert np.signbit(decoded[1]) == bool(bits >> 31), hex(bits)
        assert decoded[[0, 2]].tolist() == [1.5, -2.0], hex(bits)


@pytest.mark.parametrize("encoding", HALVES)
@BOUNDED
@given(patterns=st.lists(st.integers(0, 2**16 - 1)))
def test_every_number_of_two_bytes_but_a_signalling_nan_round_trips(
    encoding: Encoding, patterns: list[int]
) -> None:
    form = HALVES[encoding]
    payload = struct.pack(f"<{len(patterns)}H", *patterns)

    again = halves(encode(decode(payload, encoding), encoding))

    quiet = 1 << form.fraction_bits - 1
    is_nan = [form.text(each) == "nan" and not form.is_finite(each) for each in patterns]
    quieted = [each | quiet * nan for each, nan in zip(patterns, is_nan, strict=True)]
    # Whether a signalling NaN is made quiet depends on the processor, and on how many numbers there
    # are; everything else is what it was.
    assert all(
        got in either
        for got, either in zip(again, zip(patterns, quieted, strict=True), strict=True)
    )


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
        "INT2_BLOCK": 5,
        "TOPK": 4,
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


@pytest.mark.parametrize("encoding", FLOATING)
def test_nothing_that_is_not_finite_is_encodable(encoding: Encoding) -> None:
    values = np.zeros(100_000, np.float32)
    assert encodable(values, encoding)

    for element in (0, 65_535, 65_536, 99_999):
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            values[element] = value
            assert not encodable(values, encoding), (element, value)
        values[element] = 0.0
