"""Encodings with a scale for each strip, by docs/protocol-data.md and on exact fractions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vectors.book import rows
from vectors.floats import FLOAT32, Format, Number
from vectors.mean import Contribution, first_fault, mean

__all__ = ["STRIP_FORMS", "StripForm", "strip_averages", "strip_faults", "strips_file"]

Case = dict[str, Any]

_SCALE = Format("of 16 significant bits", 8, 15)
_LEAST = FLOAT32.of(2.0**-126)
_MOST = Fraction(2) ** 120
_NAN = 0x7FC00000
_BLOCK, _OFFSET = 3, 128


@dataclass(frozen=True, slots=True)
class StripForm:
    """INT8_BLOCK, INT4_BLOCK or INT2_BLOCK."""

    name: str
    bits: int
    strip: int

    @property
    def greatest(self) -> int:
        """Q of the protocol."""
        return (1 << (self.bits - 1)) - 1

    def encode(self, numbers: Sequence[int]) -> bytes:
        """The payload of FLOAT32 bits, none of which is beyond 2^120."""
        scales, codes = [], []
        for start in range(0, len(numbers), self.strip):
            scale, part = self._encode_strip(numbers[start : start + self.strip])
            scales.append(scale)
            codes += part
        return FLOAT32.pack(scales) + self._packed(codes)

    def of(self, scales: Sequence[int], codes: Sequence[int]) -> bytes:
        """A payload of these scales, as FLOAT32 bits, and codes."""
        return FLOAT32.pack(list(scales)) + self._packed(codes)

    def decode(self, payload: bytes, count: int) -> list[int]:
        """The FLOAT32 bits of a payload's numbers; every NaN is the quiet one."""
        strips = -(-count // self.strip)
        codes = self._codes(payload[4 * strips :])[:count]
        return [
            self._decode(int.from_bytes(payload[4 * at : 4 * at + 4], "little"), code)
            for at, code in ((element // self.strip, code) for element, code in enumerate(codes))
        ]

    def _encode_strip(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        lowest = -self.greatest - 1
        if not all(map(FLOAT32.is_finite, numbers)):
            return _NAN, [1 if FLOAT32.is_finite(each) else lowest for each in numbers]
        read = [FLOAT32.read(each) for each in numbers]
        sizes = [each.size or Fraction(0) for each in read]
        assert max(sizes) <= _MOST
        quotient = max(sizes) * Fraction(3, 4) if self.bits == 2 else max(sizes) / self.greatest
        scale = FLOAT32.round(Number(False, quotient))
        if scale < _LEAST:
            return 0, [lowest if each == FLOAT32.sign else 0 for each in numbers]
        scale = _SCALE.round(FLOAT32.read(scale)) << 8
        exact = FLOAT32.read(scale).size
        assert exact
        factor = FLOAT32.rounded(Number(False, 1 / exact))
        codes = []
        for bits, number in zip(numbers, read, strict=True):
            product = FLOAT32.rounded(number.times(factor))
            assert product.size is not None
            # Fraction's round is to the nearest integer, ties to even.
            code = round(-product.size if product.negative else product.size)
            codes.append(lowest if bits == FLOAT32.sign else code)
        return scale, codes

    def _decode(self, scale: int, code: int) -> int:
        if scale >= FLOAT32.infinity:
            return 0 if code == 1 else _NAN
        if code == -self.greatest - 1:
            return FLOAT32.sign
        exact = FLOAT32.read(scale).size
        assert exact is not None
        return FLOAT32.round(Number(code < 0, abs(code) * exact)) if code else 0

    def _packed(self, codes: Sequence[int]) -> bytes:
        each, mask = 8 // self.bits, (1 << self.bits) - 1
        return bytes(
            sum(
                (code & mask) << self.bits * at
                for at, code in enumerate(codes[start : start + each])
            )
            for start in range(0, len(codes), each)
        )

    def _codes(self, data: bytes) -> list[int]:
        size = 1 << self.bits
        codes = [byte >> shift & size - 1 for byte in data for shift in range(0, 8, self.bits)]
        return [code - size if code >= size // 2 else code for code in codes]


STRIP_FORMS = (
    StripForm("INT8_BLOCK", 8, 128),
    StripForm("INT4_BLOCK", 4, 32),
    StripForm("INT2_BLOCK", 2, 64),
)


def strips_file() -> bytes:
    """`strips.json`."""
    about = (
        "INT8_BLOCK, INT4_BLOCK and INT2_BLOCK, bit for bit; docs/protocol-data.md, Integers with "
        "scales. Values and decoded are little-endian float32 in hexadecimal; a NaN in decoded "
        "stands for any. A case without values is only decoded. One with overflow can't be "
        "encoded: the element says which value does not fit."
    )
    cases = [case for form in STRIP_FORMS for case in (*_encoded(form), *_decoded(form))]
    return rows("strips", about, cases)


def _encoded(form: StripForm) -> list[Case]:
    top, draw = float(form.greatest), random.Random(form.name)
    of, sign = FLOAT32.of, FLOAT32.sign
    inf, power = FLOAT32.infinity, FLOAT32.of(2.0**120)
    tiny = FLOAT32.round(Number(False, form.greatest * Fraction(2) ** -126))
    half = tiny - (1 << FLOAT32.fraction_bits)
    normal = [of(draw.gauss(0, 1) * 2.0 ** draw.randint(-12, 12)) for _ in range(form.strip + 3)]
    halves = [top, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5]
    cases = {
        "no elements": [],
        "one element": [of(-0.3)],
        "two strips, the second of three elements": normal,
        "ties go to even": [of(each) for each in halves],
        "values just beside a tie": [of(top), of(0.5) - 1, of(0.5) + 1, of(1.5) - 1, of(1.5) + 1],
        "a scale that is rounded to 16 bits": [of(each) for each in (1.0, 0.7, -0.1, 0.004)],
        "zeros of both signs": [0, sign, of(1.0), sign, 0],
        "zeros of both signs and nothing else": [0, sign, sign],
        "minus zero throughout: there is no gradient": [sign] * (form.strip + 1),
        "values that are rounded to zero are +0": [of(top), of(-0.25), of(0.25), sign],
        "the least scale": [tiny, tiny | sign, tiny - 1, 1],
        "below the least scale all is zero but -0": [half, half | sign, sign, 1, sign | 1],
        "the greatest values": [power, power | sign, of(2.0**119), of(-1.0)],
        "NaN and infinities leave a mark each": [of(1.0), inf, of(-2.0), sign | inf, inf | 5, sign],
        "a strip beside one that is not finite": [*normal[: form.strip], _NAN, of(2.0)],
    }
    found = [
        _case(form, what, form.encode(numbers), len(numbers), numbers)
        for what, numbers in cases.items()
    ]
    beyond = [of(1.0)] * form.strip + [0, power + 1, (power + 1) | sign]
    return [
        *found,
        {
            "name": f"{form.name}, a value above 2^120",
            "encoding": form.name,
            "element_count": len(beyond),
            "values": FLOAT32.pack(beyond).hex(),
            "overflow": form.strip + 1,
        },
    ]


def _decoded(form: StripForm) -> list[Case]:
    """Payloads that no sender makes, which everybody decodes alike."""
    low, top, one = -form.greatest - 1, form.greatest, FLOAT32.of(1.0)
    codes = [low, -top, -1, 0, 1, min(2, top), top]
    scales = {
        "a NaN of other bits": 0x7F800001,
        "an infinite scale": FLOAT32.infinity,
        "a negative scale": FLOAT32.sign | one,
        "a scale of minus zero": FLOAT32.sign,
        "a subnormal scale": 12345,
        "a scale of all 24 bits": 0x3F7FFFFF,
        "a scale so great that codes are infinite": FLOAT32.infinity - 1,
    }
    cases = [_case(form, what, form.of([scale], codes), 7) for what, scale in scales.items()]
    if form.bits != 8:
        payload = bytearray(form.of([one], [1, top, low]))
        payload[-1] |= 0x70 if form.bits == 4 else 0xC0
        what = "the last half of an odd count says nothing"
        cases.append(
            _case(form, what if form.bits == 4 else what.replace("half", "bits"), bytes(payload), 3)
        )
    return cases


def _case(
    form: StripForm, what: str, payload: bytes, count: int, values: list[int] | None = None
) -> Case:
    given = {} if values is None else {"values": FLOAT32.pack(values).hex()}
    return {
        "name": f"{form.name}, {what}",
        "encoding": form.name,
        "element_count": count,
        **given,
        "payload": payload.hex(),
        "decoded": FLOAT32.pack(form.decode(payload, count)).hex(),
    }


def strip_averages() -> list[Case]:
    """Cases of `averages.json`."""
    return [case for form in STRIP_FORMS for case in _averages(form)]


def _averages(form: StripForm) -> list[Case]:
    first, second, third = (_payload(form, seed) for seed in range(3))
    name, count = form.name, form.strip + 3
    zeros = form.encode([FLOAT32.sign] * count)
    if form.bits == 2:
        return [
            _average(f"{name}, {what}, answered in {answer}", given, form, answer)
            for answer in ("FLOAT32", "INT8_BLOCK")
            for what, given in (
                ("one worker", [(3.0, first)]),
                ("uneven", [(13.0, first), (0.75, second), (1e6, third)]),
                ("one has a gradient", [(1.0, zeros), (2.0, first)]),
            )
        ]
    odd = form.of([FLOAT32.of(3.0)] * 2, [1, 2, -form.greatest - 1] * (count // 3 + 1))[
        : len(first)
    ]
    return [
        _average(f"{name}, one worker: its bytes, unchanged", [(3.0, odd)], form),
        _average(f"{name}, two equal weights", [(32.0, first), (32.0, second)], form),
        _average(f"{name}, thirds", [(1.0, first), (1.0, second), (1.0, third)], form),
        _average(f"{name}, uneven", [(13.0, first), (0.75, second), (1e6, third)], form),
        _average(f"{name}, nobody has a gradient", [(1.0, zeros), (2.0, zeros)], form),
        _average(f"{name}, one has a gradient", [(1.0, zeros), (2.0, first)], form),
        _average(
            f"{name} answered in FLOAT32", [(7.0, first), (9.0, second)], form, answer="FLOAT32"
        ),
    ]


def _payload(form: StripForm, seed: int) -> bytes:
    draw = random.Random(f"{form.name} {seed}")
    return form.encode(
        [FLOAT32.of(draw.gauss(0, 1) * 2.0 ** draw.randint(-3, 3)) for _ in range(form.strip + 3)]
    )


def _average(
    name: str, ranks: list[tuple[float, bytes]], form: StripForm, answer: str = ""
) -> Case:
    count = form.strip + 3
    given = [Contribution(weight, form.decode(payload, count)) for weight, payload in ranks]
    assert first_fault(given, FLOAT32, FLOAT32) is None, name
    bits = mean(given, FLOAT32, FLOAT32)
    narrow = ranks[0][1] if len(ranks) == 1 and not answer else _formed(answer or form.name, bits)
    return {
        "name": name,
        "operation": "WEIGHTED_MEAN",
        "encoding": form.name,
        "answer_encoding": answer or form.name,
        "element_count": count,
        "ranks": [{"weight": weight, "payload": payload.hex()} for weight, payload in ranks],
        "answer": {
            "contributors": len(ranks),
            "total_weight": sum(weight for weight, _ in ranks),
            "payload": narrow.hex(),
        },
    }


def _formed(name: str, bits: list[int]) -> bytes:
    if name == "FLOAT32":
        return FLOAT32.pack(bits)
    return next(form for form in STRIP_FORMS if form.name == name).encode(bits)


def strip_faults() -> list[Case]:
    """Cases of `faults.json`."""
    return [case for form in STRIP_FORMS for case in _faults(form)]


def _faults(form: StripForm) -> list[Case]:
    good, one = [FLOAT32.of(each) for each in (1.0, -2.0, 0.5, 3.0)], FLOAT32.of(1.0)
    nan, great = [*good[:2], _NAN, good[3]], FLOAT32.of(2.0**121)
    inf = [good[0], FLOAT32.infinity, *good[2:]]
    whole = form.encode(good)
    non_finite = "NON_FINITE"
    negative = form.of([FLOAT32.sign | one], [1, 2, 3, 1])
    # The greatest scale is finite, and so is its product with a code of 2 bits.
    infinite = (
        []
        if form.bits == 2
        else [
            _fault(
                form,
                "a scale so great that a code is infinite",
                [whole, form.of([FLOAT32.infinity - 1], [0, 1, 2, -3])],
                non_finite,
                2,
                "inf",
                1,
            ),
        ]
    )
    return [
        _fault(form, "a NaN", [whole, form.encode(nan)], non_finite, 2, "nan", 1),
        _fault(form, "an infinity is NaN once it is encoded", [form.encode(inf)],
               non_finite, 1, "nan", 0),
        _fault(form, "the smallest element, and there the smallest rank",
               [form.encode(nan), form.encode(inf), form.encode(inf)], non_finite, 1, "nan", 1),
        _fault(form, "a negative scale", [whole, negative], non_finite, 1, "nan", 1),
        *infinite,
        _fault(form, "a finite mean above 2^120", [form.of([great], [0, 1, 1, 0])] * 2,
               "ENCODING_OVERFLOW", 1, repr(2.0**121), None),
    ]  # fmt: skip


def _fault(
    form: StripForm,
    what: str,
    payloads: list[bytes],
    kind: str,
    element: int,
    value: str,
    rank: int | None,
) -> Case:
    who = {} if rank is None else {"rank": rank}
    return {
        "name": f"{form.name}, {what}",
        "encoding": form.name,
        "answer_encoding": "INT8_BLOCK" if form.bits == 2 else form.name,
        "block": _BLOCK,
        "element_offset": _OFFSET,
        "element_count": 4,
        "ranks": [{"weight": 1.0, "payload": payload.hex()} for payload in payloads],
        "answer": {
            "kind": kind, **who, "block": _BLOCK, "element": _OFFSET + element, "value": value,
        },
    }  # fmt: skip
