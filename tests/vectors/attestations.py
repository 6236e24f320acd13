"""Digests of nodes, as docs/protocol-same-bits.md defines them (section 37)."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import xxhash

__all__ = ["attestations_file"]

Case = dict[str, Any]


def attestations_file() -> dict[str, bytes]:
    """`attestations.json`: sums, the hashes of their components, and their digests."""
    about = (
        "Digests of sums; docs/protocol-same-bits.md, section 37. Components are float32, "
        "hexadecimal, as they travel; null is an absent one. Hashes are XXH3-128, big-endian."
    )
    cases = ",\n    ".join(map(json.dumps, _digests()))
    text = f'{{\n  "description": {json.dumps(about)},\n  "digests": [\n    {cases}\n  ]\n}}\n'
    return {"attestations.json": text.encode()}


def _digests() -> Iterator[Case]:
    draw = random.Random(37)
    yield _digest("one component", [_floats([1.0, -2.5, 3.25])])
    yield _digest("several components", [_noise(draw, n) for n in (1, 4, 60)])
    yield _digest("one bit more", [_floats([1.0 + 2.0**-23, -2.5, 3.25])])
    yield _digest("longer than XXH3's short forms", [_noise(draw, 61), _noise(draw, 300)])
    yield _digest("zeros of both signs differ", [_floats([0.0]), _floats([-0.0])])
    yield _digest("an absent component", [_floats([1.0]), None, _floats([2.0])])
    yield _digest("nothing is there: a grain of weight 0", [None, None])
    yield _digest(
        "infinity, a NaN, a subnormal number",
        [bytes.fromhex("0000807f" + "0100c07f" + "01000000")],
    )


def _floats(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _noise(draw: random.Random, count: int) -> bytes:
    return _floats([draw.gauss(0.0, 1.0) for _ in range(count)])


def _digest(name: str, components: list[bytes | None]) -> Case:
    hashes = [xxhash.xxh3_128_hexdigest(each or b"") for each in components]
    return {
        "name": name,
        "components": [None if each is None else each.hex() for each in components],
        "hashes": hashes,
        "digest": xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, hashes))),
    }
