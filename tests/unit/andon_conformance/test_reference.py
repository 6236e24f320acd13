"""The reference of the conformance suite: the vectors hold, and it agrees with what is shipped."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon.protocol import encoding
from andon.protocol.encoding import Encoding
from andon_conformance.runner import reference

NARROW = ["INT8_BLOCK", "INT4_BLOCK", "INT2_BLOCK", "TOPK"]
_VECTORS = Path(__file__).resolve().parents[3] / "conformance/mean.json"


@pytest.mark.parametrize(
    "vector", json.loads(_VECTORS.read_text("utf-8"))["means"], ids=lambda vector: vector["name"]
)
def test_means_are_the_conformance_vectors(vector: dict[str, Any]) -> None:
    parts = [
        (weight, reference.decode(bytes.fromhex(numbers), Encoding.FLOAT32, len(numbers) // 8))
        for weight, numbers in zip(vector["weights"], vector["contributions"], strict=True)
        if weight
    ]
    if not parts:
        return

    total, mean = reference.mean(parts)

    assert total == vector["total_weight"]
    assert reference.encode(mean, Encoding.FLOAT32).hex() == vector["mean"]


@pytest.mark.parametrize("name", ["FLOAT32", "FLOAT16", "BFLOAT16", *NARROW])
def test_encodings_are_those_that_andon_ships(name: str) -> None:
    draw = random.Random(1)
    numbers = [reference.f32(draw.gauss(0, 1) * 2.0 ** draw.randint(-30, 10)) for _ in range(500)]
    numbers += [0.0, -0.0, 2.0**-24, 1.5 * 2.0**-24, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65504.0]

    sent = reference.encode(numbers, Encoding[name])

    assert sent == bytes(encoding.encode(np.array(numbers, np.float32), Encoding[name]))
    decoded = np.array(reference.decode(sent, Encoding[name], len(numbers)), np.float32)
    assert decoded.tobytes() == encoding.decode(sent, Encoding[name], len(numbers)).tobytes()


@pytest.mark.parametrize(
    ("name", "number"), [("FLOAT16", 65520.0), ("BFLOAT16", 3.4028235e38), ("INT8_BLOCK", 1.4e36)]
)
def test_a_finite_number_beyond_its_encoding_is_told(name: str, number: float) -> None:
    with pytest.raises(reference.EncodingTooSmall):
        reference.encode([number], Encoding[name])


def test_a_mean_beyond_float32_is_an_infinity() -> None:
    largest = reference.f32(3.4028234663852886e38)

    _, mean = reference.mean([(weight, [largest]) for weight in (807918.0, 882003.0, 84902.0)])

    assert math.isinf(mean[0])


def test_numbers_repeat_from_any_element_on() -> None:
    whole = [float(at % 7 - 3) / 3 for at in range(2_000)]

    for form in (Encoding.FLOAT32, Encoding.FLOAT16, *(Encoding[name] for name in NARROW)):

        def made(start: int, count: int, form: Encoding = form) -> bytes:
            return reference.encode(whole[start : start + count], form)

        for size in (0, 5, 128, 133, 1000, 2000):
            assert reference.repeated(made, form, 7, size) == reference.encode(whole[:size], form)
            longer = reference.repeated(made, form, 7, size, 128)
            assert longer == reference.encode(whole[:size], form)
