"""The mean of docs/protocol-data.md, section 5, element by element, and its defects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from vectors.floats import FLOAT32, FLOAT64, Format, Number

__all__ = ["Contribution", "Fault", "first_fault", "mean", "trimmed_mean"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank gives: its weight, and its numbers as bits. Weight 0: it abstains."""

    weight: float
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no mean: a name of BlockFaultKind, where, and what was found."""

    kind: str
    element: int
    value: str
    rank: int | None = None


def mean(
    ranks: Sequence[Contribution], encoding: Format, answer: Format, *, fused: bool = False
) -> list[int]:
    """The mean's bits, in rank order; `fused`: what a fused multiply-add would make of it."""
    given = [each for each in ranks if each.weight]
    total = 0.0
    for each in given:
        total += each.weight
    shares = [_number(each.weight / total) for each in given]
    count = len(given[0].numbers)
    if len(given) == 1 and answer is encoding:
        return given[0].numbers
    means = []
    for element in range(count):
        acc: Number | None = None
        for share, each in zip(shares, given, strict=True):
            product = share.times(encoding.read(each.numbers[element]))
            if acc is None:
                acc = FLOAT32.rounded(product)
                continue
            acc = FLOAT32.rounded(acc.plus(product if fused else FLOAT32.rounded(product)))
        assert acc is not None
        means.append(answer.round(acc))
    return means


def trimmed_mean(ranks: Sequence[Contribution], encoding: Format, answer: Format) -> list[int]:
    """The trimmed mean's bits, of five contributions or more."""
    given = [each for each in ranks if each.weight]
    total = 0.0
    for each in given:
        total += each.weight
    cut = len(given) // 5
    means = []
    for element in range(len(given[0].numbers)):
        numbers = [encoding.read(each.numbers[element]) for each in given]
        # Python sorts equal values by rank, and takes zeros of both signs for equal.
        order = sorted(range(len(given)), key=lambda rank: (numbers[rank].value, rank))
        acc, weight = Number(True, Fraction(0)), Fraction(0)
        for rank in sorted(order[cut : len(given) - cut]):
            share = Number(False, Fraction(given[rank].weight / total))
            product = FLOAT64.rounded(share.times(numbers[rank]))
            acc = FLOAT64.rounded(acc.plus(product))
            weight = Fraction(float(weight) + given[rank].weight / total)
        assert acc.size is not None
        quotient = FLOAT64.rounded(Number(acc.negative, acc.size / weight))
        means.append(answer.round(FLOAT32.rounded(quotient)))
    return means


def first_fault(ranks: Sequence[Contribution], encoding: Format, answer: Format) -> Fault | None:
    """What a reducer must answer in place of the mean: the smallest element, there the rank."""
    for element in range(len(next(each for each in ranks if each.weight).numbers)):
        for rank, each in enumerate(ranks):
            if each.weight and not encoding.is_finite(each.numbers[element]):
                value = encoding.text(each.numbers[element])
                return Fault("NON_FINITE", element, value, rank)
    sums, answers = mean(ranks, encoding, FLOAT32), mean(ranks, encoding, answer)
    for element, bits in enumerate(sums):
        if not FLOAT32.is_finite(bits):
            return Fault("NON_FINITE_AVERAGE", element, FLOAT32.text(bits))
    for element, bits in enumerate(answers):
        if not answer.is_finite(bits):
            return Fault("ENCODING_OVERFLOW", element, FLOAT32.read(sums[element]).text)
    return None


def _number(share: float) -> Number:
    """float32 of a quotient that was taken in float64."""
    return FLOAT32.rounded(Number(False, Fraction(share)))
