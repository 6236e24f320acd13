"""Floating-point arithmetic on exact fractions, rounded to a format once for each operation.

It is slow, and independent of the code that it checks: no NumPy, no C, no flags of a processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT64", "Format", "Number"]


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, or an infinity. Zeros have a sign."""

    negative: bool
    size: Fraction | None
    """None: infinite."""

    def times(self, other: Number) -> Number:
        """The exact product of two finite numbers."""
        assert self.size is not None
        assert other.size is not None
        return Number(self.negative != other.negative, self.size * other.size)

    def plus(self, other: Number) -> Number:
        """The exact sum, of which one may be infinite; a sum of opposites is +0."""
        if self.size is None or other.size is None:
            assert self.size is not None or other.size is not None, "an infinity and a finite"
            return self if self.size is None else other
        if self.negative == other.negative:
            return Number(self.negative, self.size + other.size)
        if self.size == other.size:
            return Number(False, Fraction(0))
        greater = self if self.size > other.size else other
        return Number(greater.negative, abs(self.size - other.size))

    @property
    def value(self) -> Fraction:
        """A finite number, without the sign of a zero."""
        assert self.size is not None
        return -self.size if self.negative else self.size

    @property
    def text(self) -> str:
        """As evidence shows it."""
        if self.size is None:
            return "-inf" if self.negative else "inf"
        return repr(float(-self.size if self.negative else self.size))


@dataclass(frozen=True, slots=True)
class Format:
    """A binary interchange format of IEEE 754, or bfloat16."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one number."""
        return (1 + self.exponent_bits + self.fraction_bits) // 8

    @property
    def infinity(self) -> int:
        """The bits of the positive infinity; a NaN's are above, without their sign."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.exponent_bits + self.fraction_bits)

    @property
    def _bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    def is_finite(self, bits: int) -> bool:
        """Whether bits are neither of an infinity nor of a NaN."""
        return bits & ~self.sign < self.infinity

    def text(self, bits: int) -> str:
        """What evidence shows of bits that are not finite."""
        if bits & ~self.sign != self.infinity:
            return "nan"
        return "-inf" if bits & self.sign else "inf"

    def read(self, bits: int) -> Number:
        """The number that finite bits stand for, exactly."""
        assert self.is_finite(bits)
        exponent = (bits & ~self.sign) >> self.fraction_bits
        fraction = bits & ((1 << self.fraction_bits) - 1)
        if exponent:
            fraction += 1 << self.fraction_bits
        power = max(exponent, 1) - self._bias - self.fraction_bits
        return Number(bool(bits & self.sign), fraction * Fraction(2) ** power)

    def round(self, number: Number) -> int:
        """The bits of the nearest number of this format, ties to even; an infinity beyond."""
        sign = self.sign if number.negative else 0
        size = number.size
        if size is None:
            return sign | self.infinity
        if not size:
            return sign
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if Fraction(2) ** exponent > size:
            exponent -= 1
        exponent = max(exponent, 1 - self._bias)
        # Fraction's round is to the nearest integer, ties to even.
        units = round(size / Fraction(2) ** (exponent - self.fraction_bits))
        hidden = 1 << self.fraction_bits
        if units < hidden:
            return sign | units  # subnormal
        # What rounds up to the next power of two carries into the exponent.
        bits = ((exponent + self._bias) << self.fraction_bits) + (units - hidden)
        return sign | min(bits, self.infinity)

    def rounded(self, number: Number) -> Number:
        """The number after it was rounded to this format."""
        bits = self.round(number)
        if not self.is_finite(bits):
            return Number(number.negative, None)
        return self.read(bits)

    def of(self, value: float) -> int:
        """The bits of a Python float, rounded."""
        negative = str(value).startswith("-")
        return self.round(Number(negative, abs(Fraction(value))))

    def pack(self, numbers: list[int]) -> bytes:
        """Bits as they travel."""
        return b"".join(bits.to_bytes(self.size_bytes, "little") for bits in numbers)


FLOAT32 = Format("FLOAT32", 8, 23)
FLOAT16 = Format("FLOAT16", 5, 10)
BFLOAT16 = Format("BFLOAT16", 8, 7)
FLOAT64 = Format("FLOAT64", 11, 52)
