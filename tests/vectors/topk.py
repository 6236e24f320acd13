"""TOPK: the greatest elements and their places, by docs/protocol-data.md and on exact fractions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from vectors.book import rows
from vectors.floats import BFLOAT16, FLOAT32
from vectors.mean import Contribution, first_fault, mean

__all__ = ["listed", "topk_averages", "topk_faults", "topk_file"]

Case = dict[str, Any]

_STRETCH = 256
_BLOCK, _OFFSET, _COUNT = 3, 128, 300


def listed(numbers: Sequence[int], kept: int = _STRETCH) -> bytes:
    """The payload of FLOAT32 bits, with the `kept` greatest of each stretch."""
    entries = []
    for start in range(0, len(numbers), _STRETCH):
        halves = [_half(bits) for bits in numbers[start : start + _STRETCH]]
        order = sorted(range(len(halves)), key=lambda at: (-(halves[at] & 0x7FFF), at))
        entries.append([(at, halves[at]) for at in sorted(order[:kept]) if halves[at] & 0x7FFF])
    runs, at = [], 0
    for is_minus_zero, run in groupby(numbers, lambda bits: bits == FLOAT32.sign):
        length = len(list(run))
        runs += [(at, length)] if is_minus_zero else []
        at += length
    return parts(entries, runs)


def parts(entries: Sequence[Sequence[tuple[int, int]]], runs: Sequence[tuple[int, int]]) -> bytes:
    """A payload of these places and values of each stretch, and runs."""
    every = [entry for stretch in entries for entry in stretch]
    return (
        b"".join(len(stretch).to_bytes(2, "little") for stretch in entries)
        + bytes(place for place, _ in every)
        + BFLOAT16.pack([half for _, half in every])
        + FLOAT32.pack([number for run in runs for number in run])
    )


def decoded(payload: bytes, count: int) -> list[int]:
    """The FLOAT32 bits of a sound payload's numbers."""
    stretches = -(-count // _STRETCH)
    counts = [int.from_bytes(payload[2 * at : 2 * at + 2], "little") for at in range(stretches)]
    numbers, total = [0] * count, sum(counts)
    of = [stretch for stretch, some in enumerate(counts) for _ in range(some)]
    places, values = payload[2 * stretches :], payload[2 * stretches + total :]
    for entry, stretch in enumerate(of):
        half = int.from_bytes(values[2 * entry : 2 * entry + 2], "little")
        numbers[_STRETCH * stretch + places[entry]] = half << 16
    rest = values[2 * total :]
    for at in range(0, len(rest), 8):
        first = int.from_bytes(rest[at : at + 4], "little")
        length = int.from_bytes(rest[at + 4 : at + 8], "little")
        numbers[first : first + length] = [FLOAT32.sign] * length
    return numbers


def _half(bits: int) -> int:
    if FLOAT32.is_finite(bits):
        return BFLOAT16.round(FLOAT32.read(bits))
    return bits >> 16 | (0x40 if bits & 0x7FFFFFFF > FLOAT32.infinity else 0)


def topk_file() -> bytes:
    """`topk.json`."""
    about = (
        "TOPK, bit for bit; docs/protocol-data.md, Top-k. Values and decoded are little-endian "
        "float32 in hexadecimal. kept elements of each 256 are listed. A case without values is "
        "only decoded. One with why must be refused; one with overflow can't be encoded: the "
        "element says which value does not fit."
    )
    return rows("topk", about, [*_encoded(), *_refused()])


def _encoded() -> list[Case]:
    draw, of, sign = random.Random("topk"), FLOAT32.of, FLOAT32.sign
    normal = [of(draw.gauss(0, 1) * 2.0 ** draw.randint(-9, 9)) for _ in range(_COUNT)]
    without = [*normal[:250], *[sign] * 20, *normal[270:]]
    tiny, inf = 1, FLOAT32.infinity
    cases: dict[str, tuple[list[int], int]] = {
        "no elements": ([], 4),
        "one element": ([of(-0.3)], 4),
        "two stretches, the second of 44 elements": (normal, 4),
        "a quarter of a stretch": (normal, 64),
        "all": (normal, _STRETCH),
        "of equals, in either sign, the first ones": ([of(1.0), of(-1.0), of(1.0), of(-1.0)], 2),
        "equal once they are rounded": ([of(1.0), of(1.001), of(0.999), of(-1.002)], 2),
        "zeros of both signs": ([0, sign, of(1.0), sign, sign, 0], 4),
        "-0.0 from one stretch to the next: there is no gradient": (without, 4),
        "-0.0 throughout": ([sign] * 257, 4),
        "values that are rounded to zero are +0": ([tiny, sign | tiny, of(2.0**-133)], 4),
        "NaN and infinities are the greatest": ([of(9.0), inf, inf | 1, sign | inf, of(8.0)], 3),
    }
    found = []
    for what, (numbers, kept) in cases.items():
        payload = listed(numbers, kept)
        values = {"kept": kept, "values": FLOAT32.pack(numbers).hex()}
        found.append(_case(what, payload, len(numbers), values))
    beyond = [of(1.0), 0x7F7F8000]
    return [
        *found,
        _case("a run over a listed element", parts([[(1, 0x3F80)]], [(0, 2)]), 3, {}),
        _case("a listed zero", parts([[(0, 0x8000), (2, 0)]], []), 3, {}),
        {
            "name": "a value that is infinite once it is rounded",
            "element_count": 2,
            "values": FLOAT32.pack(beyond).hex(),
            "kept": 1,
            "overflow": 1,
        },
    ]


def _refused() -> list[Case]:
    one, whole = 0x3F80, parts([[(1, 0x3F80)], [(0, 0x3F80)]], [(4, 2)])
    cases = {
        "no counts": (b"\x01\x00\x01", "the counts"),
        "fewer entries than counted": (parts([[(0, one)], []], [])[:-1], "the length"),
        "more than entries, and no whole run": (whole[:-1], "the length"),
        "half a run": (whole[:-4], "the length"),
        "a place twice": (parts([[(7, one), (7, one)], []], []), "the places"),
        "places that fall": (parts([[(7, one), (6, one)], []], []), "the places"),
        "a place beyond the last element": (parts([[], [(44, one)]], []), "the places"),
        "a run of no elements": (parts([[], []], [(5, 0)]), "the runs"),
        "a run that begins in the one before": (parts([[], []], [(5, 3), (7, 1)]), "the runs"),
        "a run beyond the last element": (parts([[], []], [(299, 2)]), "the runs"),
        "a run whose end is beyond 32 bits": (parts([[], []], [(5, 2**32 - 1)]), "the runs"),
    }
    return [
        {"name": what, "element_count": _COUNT, "payload": payload.hex(), "why": why}
        for what, (payload, why) in cases.items()
    ]


def _case(what: str, payload: bytes, count: int, values: Case) -> Case:
    return {
        "name": what,
        "element_count": count,
        **values,
        "payload": payload.hex(),
        "decoded": FLOAT32.pack(decoded(payload, count)).hex(),
    }


def topk_averages() -> list[Case]:
    """Cases of `averages.json`."""
    first, second, third = (_payload(seed) for seed in range(3))
    zeros = listed([FLOAT32.sign] * _COUNT)
    odd = parts([[(0, 0x8000), (9, 0x3F80)], []], [(40, 2), (42, 3)])
    return [
        _average("TOPK, one worker: its bytes, unchanged", [(3.0, odd)]),
        _average("TOPK, a mean lists what any rank did", [(1.0, first), (1.0, second)]),
        _average("TOPK, uneven", [(13.0, first), (0.75, second), (1e6, third)]),
        _average("TOPK, nobody has a gradient", [(1.0, zeros), (2.0, zeros)]),
        _average("TOPK, one has a gradient", [(1.0, zeros), (2.0, first)]),
        _average("TOPK answered in FLOAT32", [(7.0, first), (9.0, second)], "FLOAT32"),
    ]


def _payload(seed: int) -> bytes:
    draw = random.Random(f"topk {seed}")
    return listed([FLOAT32.of(draw.gauss(0, 1)) for _ in range(_COUNT)], 4)


def _average(name: str, ranks: list[tuple[float, bytes]], answer: str = "TOPK") -> Case:
    given = [Contribution(weight, decoded(payload, _COUNT)) for weight, payload in ranks]
    assert first_fault(given, FLOAT32, FLOAT32) is None, name
    bits = mean(given, FLOAT32, FLOAT32)
    narrow = ranks[0][1] if len(ranks) == 1 else listed(bits)
    return {
        "name": name,
        "operation": "WEIGHTED_MEAN",
        "encoding": "TOPK",
        "answer_encoding": answer,
        "element_count": _COUNT,
        "ranks": [{"weight": weight, "payload": payload.hex()} for weight, payload in ranks],
        "answer": {
            "contributors": len(ranks),
            "total_weight": sum(weight for weight, _ in ranks),
            "payload": (narrow if answer == "TOPK" else FLOAT32.pack(bits)).hex(),
        },
    }


def topk_faults() -> list[Case]:
    """Cases of `faults.json`."""
    good = _payload(3)
    nan, inf = parts([[(5, 0x3F80)], [(1, 0x7FC0)]], []), parts([[(7, 0xFF80)], []], [])
    return [
        _fault("a NaN", [good, nan], "NON_FINITE", 257, "nan", 1),
        _fault("an infinity", [good, nan, inf], "NON_FINITE", 7, "-inf", 2),
        _fault("a NaN under a run is none, and one beside it is", [
            parts([[(3, 0x7FC0), (9, 0x7FC0)], []], [(3, 1)])], "NON_FINITE", 9, "nan", 0),
    ]  # fmt: skip


def _fault(
    what: str, payloads: list[bytes], kind: str, element: int, value: str, rank: int
) -> Case:
    return {
        "name": f"TOPK, {what}",
        "encoding": "TOPK",
        "answer_encoding": "TOPK",
        "block": _BLOCK,
        "element_offset": _OFFSET,
        "element_count": _COUNT,
        "ranks": [{"weight": 1.0, "payload": payload.hex()} for payload in payloads],
        "answer": {
            "kind": kind, "rank": rank, "block": _BLOCK, "element": _OFFSET + element,
            "value": value,
        },
    }  # fmt: skip
