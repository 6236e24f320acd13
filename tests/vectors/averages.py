"""Averages: payloads and the bits of their average, and payloads that can't be averaged."""

from __future__ import annotations

import random
from typing import Any

from vectors.book import rows
from vectors.floats import BFLOAT16, FLOAT16, FLOAT32, Format
from vectors.mean import Contribution, Fault, first_fault, mean, trimmed_mean
from vectors.strips import strip_averages, strip_faults
from vectors.topk import topk_averages, topk_faults

__all__ = ["averages_file", "faults_of_values"]

Case = dict[str, Any]

_FORMATS = (FLOAT32, FLOAT16, BFLOAT16)
_BLOCK, _OFFSET = 3, 8
"""Where in a model the chunks of faults lie."""
_OTHERS = {"FLOAT64": 8, "INT32": 4, "INT64": 8, "UINT8": 1}
"""Encodings that are broadcast but not averaged, with their sizes."""


def averages_file() -> bytes:
    """`averages.json`."""
    cases = [case for form in _FORMATS for case in _means(form)]
    cases += [
        _average(f"{form.name} answered in {answer.name}", _mixed(form), form, answer)
        for form in _FORMATS
        for answer in _FORMATS
        if form is not answer
    ]
    cases += strip_averages()
    cases += topk_averages()
    cases += [case for form in _FORMATS for case in _trimmed_means(form)]
    cases.append(_all_abstain())
    cases += [_broadcast(form.name, form.size_bytes) for form in _FORMATS]
    cases += [_broadcast(name, size) for name, size in _OTHERS.items()]
    about = (
        "What a reducer answers, bit for bit; docs/protocol-data.md, The mean. Ranks are in rank "
        "order; payloads are hexadecimal, as they travel. with_fma and reversed, where they are "
        "there, are payloads that a fused multiply-add, or the opposite order, would give: "
        "wrong ones."
    )
    return rows("averages", about, cases)


def _means(form: Format) -> list[Case]:
    """The means of one encoding, answered in it."""
    name = form.name
    first, second, third, fourth = (_ordinary(form, seed) for seed in range(4))
    tiny = [1, 2, 3, form.sign | 1, (1 << form.fraction_bits) - 1, 1 << form.fraction_bits, 0, 7]
    top = form.infinity - 1
    large = [top, form.sign | top, top - 1, top, form.sign | top, top, top - 7, 1]
    zeros = [0, form.sign] * 4
    return [
        _average(f"{name}, one worker", [(17.0, first)], form),
        _average(f"{name}, two equal weights", [(32.0, first), (32.0, second)], form),
        _average(f"{name}, two unequal weights", [(3.0, first), (29.0, second)], form),
        _average(f"{name}, thirds", [(1.0, first), (1.0, second), (1.0, third)], form),
        _average(
            f"{name}, four uneven weights",
            [(13.0, first), (12.5, second), (0.75, third), (1e6, fourth)],
            form,
        ),
        _average(
            f"{name}, ranks 0 and 2 abstain",
            [(0.0, []), (16.0, first), (0.0, []), (15.0, second)],
            form,
        ),
        _average(f"{name}, all but rank 1 abstain", [(0.0, []), (5.0, third), (0.0, [])], form),
        _average(f"{name}, subnormals", [(1.0, tiny), (2.0, tiny[::-1]), (4.0, tiny)], form),
        _average(f"{name}, near overflow", [(3.0, large), (5.0, large)], form),
        _average(
            f"{name}, zeros have signs",
            [(1.0, [0, form.sign, 0, form.sign]), (1.0, [0, form.sign, form.sign, 0])],
            form,
        ),
        _average(
            f"{name}, opposites cancel to +0",
            [(2.0, first + zeros), (2.0, [bits ^ form.sign for bits in first] + zeros)],
            form,
        ),
        _cancelling(form),
        _average(
            f"{name}, weights of any size",
            [(1e300, first), (3e299, second), (1e-300, third)],
            form,
        ),
    ]


def _average(
    name: str, ranks: list[tuple[float, list[int]]], form: Format, answer: Format | None = None
) -> Case:
    answer = answer or form
    contributions = [Contribution(weight, numbers) for weight, numbers in ranks]
    assert first_fault(contributions, form, answer) is None, name
    bits = mean(contributions, form, answer)
    total = 0.0
    for each in contributions:
        total += each.weight
    case: Case = {
        "name": name,
        "operation": "WEIGHTED_MEAN",
        "encoding": form.name,
        "answer_encoding": answer.name,
        "element_count": len(bits),
        "ranks": [_rank(each, form) for each in contributions],
        "answer": {
            "contributors": sum(each.weight > 0 for each in contributions),
            "total_weight": total,
            "payload": answer.pack(bits).hex(),
        },
    }
    wrong = {
        "with_fma": mean(contributions, form, answer, fused=True),
        "reversed": mean(contributions[::-1], form, answer),
    }
    case.update({what: answer.pack(other).hex() for what, other in wrong.items() if other != bits})
    return case


def _trimmed_means(form: Format) -> list[Case]:
    """Trimmed means of one encoding, and of too few contributions to trim anything."""
    rows = [_ordinary(form, seed) for seed in range(30, 41)]
    one, minus, zero = form.of(1.0), form.of(1.0) | form.sign, form.sign
    ties = [
        [one, zero, 0, minus, zero, 0],
        [one, 0, zero, one, zero, 0],
        [one, zero, 0, one, zero, zero],
        [minus, 0, zero, zero, one, 0],
        [one, zero, minus, minus, zero, one],
    ]
    top = form.infinity - 1
    large = [[top, 1], [top, 2], [top, zero], [top, form.sign | 1], [form.sign | top, 3]]
    uneven = [3.0, 0.7, 11.0, 1e-3, 29.0]

    def trimmed(what: str, weights: list[float], numbers: list[list[int]]) -> Case:
        given = list(zip(weights, numbers, strict=True))
        return _trimmed(f"{form.name}, trimmed: {what}", given, form)

    return [
        trimmed("five equal weights", [8.0] * 5, rows[:5]),
        trimmed("five uneven weights", uneven, rows[:5]),
        trimmed(
            "one of six abstains", [*uneven[:2], 0.0, *uneven[2:]], [*rows[:2], [], *rows[2:5]]
        ),
        trimmed("eleven, of which two are left out at each end", [1.0, 2.5, *[7.0] * 9], rows),
        trimmed("ties are in rank order, and zeros of both signs tie", uneven, ties),
        trimmed("the largest and the smallest numbers", [3.0, 5.0, 1.0, 2.0, 4.0], large),
        trimmed("weights of any size", [1e300, 3e299, 1e200, 1e250, 1e280], rows[5:10]),
        _average(
            f"{form.name}, trimmed: four are too few, and have the weighted mean",
            list(zip(uneven[:4], rows[:4], strict=True)),
            form,
        )
        | {"operation": "TRIMMED_MEAN"},
    ]


def _trimmed(name: str, ranks: list[tuple[float, list[int]]], form: Format) -> Case:
    contributions = [Contribution(weight, numbers) for weight, numbers in ranks]
    total = 0.0
    for each in contributions:
        total += each.weight
    bits = trimmed_mean(contributions, form, form)
    return {
        "name": name,
        "operation": "TRIMMED_MEAN",
        "encoding": form.name,
        "answer_encoding": form.name,
        "element_count": len(bits),
        "ranks": [_rank(each, form) for each in contributions],
        "answer": {
            "contributors": sum(each.weight > 0 for each in contributions),
            "total_weight": total,
            "payload": form.pack(bits).hex(),
        },
    }


def _cancelling(form: Format) -> Case:
    """A great number, small ones, and its opposite: the sum depends on the order of addition."""
    great, small = form.of(2.0**15 if form is FLOAT16 else 2.0**24), form.of(1.0 / 3)
    minus = great ^ form.sign
    ranks = [
        (1.0, [great, small, great, form.of(1.0)]),
        (1.0, [small, great, form.of(2.0**-9), minus]),
        (1.0, [minus, minus, minus, great]),
        (1.0, [form.of(2.0**-6), form.of(0.1), small, form.of(2.0**-8)]),
    ]
    case = _average(f"{form.name}, cancellation: the order of the ranks shows", ranks, form)
    assert "reversed" in case, "the vector must tell orders apart"
    return case


def _rank(each: Contribution, form: Format) -> Case:
    if not each.weight:
        return {"abstains": True}
    return {"weight": each.weight, "payload": form.pack(each.numbers).hex()}


def _all_abstain() -> Case:
    return {
        "name": "all abstain: zeros everywhere, of whatever blocks were to be exchanged",
        "operation": "WEIGHTED_MEAN",
        "encoding": "FLOAT32",
        "answer_encoding": "FLOAT32",
        "element_count": 0,
        "ranks": [{"abstains": True}, {"abstains": True}],
        "answer": {"contributors": 0, "total_weight": 0.0, "payload": ""},
    }


def _broadcast(name: str, size: int) -> Case:
    """Rank 0's bytes, which are not looked at: they begin with bits of a NaN or of anything."""
    payload = (b"\xff" * size + bytes(range(1, 3 * size + 1))).hex()
    return {
        "name": f"{name}, broadcast: rank 0's bytes, unchanged",
        "operation": "BROADCAST",
        "encoding": name,
        "answer_encoding": name,
        "element_count": 4,
        "ranks": [{"weight": 1.0, "payload": payload}, {"abstains": True}, {"abstains": True}],
        "answer": {"contributors": 1, "total_weight": 1.0, "payload": payload},
    }


def _ordinary(form: Format, seed: int) -> list[int]:
    """Eight numbers between 2^-6 and 2^6, of both signs, with all bits of their fractions."""
    draw = random.Random(f"{form.name} {seed}")
    bias = (1 << (form.exponent_bits - 1)) - 1
    return [
        draw.getrandbits(1) * form.sign
        | (bias - 6 + draw.randrange(12)) << form.fraction_bits
        | draw.getrandbits(form.fraction_bits)
        for _ in range(8)
    ]


def _mixed(form: Format) -> list[tuple[float, list[int]]]:
    return [(7.0, _ordinary(form, 10)), (9.0, _ordinary(form, 11)), (0.5, _ordinary(form, 12))]


def faults_of_values() -> list[Case]:
    """Contributions that have no mean, each with the BlockFault that answers them."""
    cases = [case for form in _FORMATS for case in _not_finite(form)]
    cases += strip_faults()
    cases += topk_faults()
    nan, good = FLOAT32.infinity | 1, _ordinary(FLOAT32, 21)
    cases.append(
        _fault(
            "FLOAT32, trimmed: a NaN that would be left out",
            [
                (1.0, good[:3]),
                (1.0, [good[3], nan, nan]),
                *[(1.0, good[rank:][:3]) for rank in range(3)],
            ],
            FLOAT32,
        )
        | {"operation": "TRIMMED_MEAN"}
    )
    top = FLOAT32.infinity - 1
    cases.append(
        _fault(
            "FLOAT32, rounding carries a mean of finite numbers beyond the range",
            [(1.0, [0, top]), (8.0, [0, top]), (1.0, [0, top])],
            FLOAT32,
        )
    )
    beyond = [FLOAT32.of(1.0), FLOAT32.of(65520.0), FLOAT32.of(-1e6)]
    cases.append(
        _fault("FLOAT32 answered in FLOAT16, too large", [(1.0, beyond)], FLOAT32, FLOAT16)
    )
    least = FLOAT32.of(3.3961775292304957e38)  # 0x7f7f8000: it rounds to an infinity
    cases.append(
        _fault(
            "FLOAT32 answered in BFLOAT16, too large",
            [(1.0, [FLOAT32.of(2.0), least]), (1.0, [FLOAT32.of(2.0), least])],
            FLOAT32,
            BFLOAT16,
        )
    )
    return cases


def _not_finite(form: Format) -> list[Case]:
    """NaN in all its forms, and infinities: quiet, signalling, signed, with bits of their own."""
    quiet = 1 << (form.fraction_bits - 1)
    bad = {
        "a quiet NaN": form.infinity | quiet,
        "a signalling NaN": form.infinity | 1,
        "a negative NaN with bits of its own": form.sign | form.infinity | quiet | 5,
        "a NaN of all ones": form.sign | (form.sign - 1),
        "an infinity": form.infinity,
        "a negative infinity": form.sign | form.infinity,
    }
    good = _ordinary(form, 20)[:4]
    cases = [
        _fault(f"{form.name}, {what}", [(8.0, good), (8.0, [*good[:2], bits, good[3]])], form)
        for what, bits in bad.items()
    ]
    inf, nan = form.infinity, form.infinity | quiet
    return [
        *cases,
        _fault(f"{form.name}, a NaN of the only rank", [(8.0, [good[0], nan])], form),
        _fault(
            f"{form.name}, the smallest element is reported, and there the smallest rank",
            [(1.0, [*good[:3], nan]), (1.0, [good[0], inf, nan, nan]), (1.0, [good[0], nan, 0, 0])],
            form,
        ),
        _fault(
            f"{form.name}, opposite infinities: the first is reported, not their NaN",
            [(1.0, [good[0], inf]), (1.0, [good[0], form.sign | inf])],
            form,
        ),
        _fault(
            f"{form.name}, a weight so small that it is rounded to 0 hides no NaN",
            [(1e60, good[:2]), (1.0, [good[0], nan])],
            form,
        ),
    ]


def _fault(
    name: str, ranks: list[tuple[float, list[int]]], form: Format, answer: Format | None = None
) -> Case:
    answer = answer or form
    contributions = [Contribution(weight, numbers) for weight, numbers in ranks]
    fault = first_fault(contributions, form, answer)
    assert fault is not None, name
    return {
        "name": name,
        "encoding": form.name,
        "answer_encoding": answer.name,
        "block": _BLOCK,
        "element_offset": _OFFSET,
        "element_count": len(ranks[0][1]),
        "ranks": [_rank(each, form) for each in contributions],
        "answer": _told(fault),
    }


def _told(fault: Fault) -> Case:
    who = {} if fault.rank is None else {"rank": fault.rank}
    element = _OFFSET + fault.element
    return {"kind": fault.kind, **who, "block": _BLOCK, "element": element, "value": fault.value}
