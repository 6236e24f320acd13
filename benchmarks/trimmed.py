"""What does a trimmed mean cost a reducer's thread, beside the weighted mean of the same chunk?

One thread makes both means of a chunk of float32 by turns, in memory of its own, with the module in
C and without it.

    python benchmarks/trimmed.py --json benchmarks/results/trimmed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from machine import describe_machine

from andon.protocol.encoding import Encoding, fused
from andon.protocol.limits import CHUNK_ELEMENTS
from andon.protocol.messages import BlockGradient
from andon.protocol.records import Key
from andon_reducer.core.mean import trimmed_mean, weighted_mean

_MODULES = ("andon_reducer.core.mean.fused", "andon_reducer.core.trimmed.fused")


def main() -> None:
    """Measures each number of contributions, and prints a row for it."""
    options = _arguments()
    rows = []
    print(f"{'contributions':>13}{'arithmetic':>12}{'weighted':>12}{'trimmed':>12}{'ratio':>8}")
    for count in options.contributions:
        for arithmetic in ("C", "NumPy") if fused is not None else ("NumPy",):
            row = measure(count, arithmetic, options.repeats)
            rows.append(row)
            print(
                f"{count:13}{arithmetic:>12}{row['weighted_s'] * 1e3:9.2f} ms"
                f"{row['trimmed_s'] * 1e3:9.2f} ms{row['ratio']:8.1f}",
                flush=True,
            )
    if options.json:
        figures = {
            "machine": {**describe_machine(), "notes": options.note},
            "chunk_elements": CHUNK_ELEMENTS,
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(count: int, arithmetic: str, repeats: int) -> dict[str, Any]:
    """Medians of both means of a chunk with so many contributions, in processor time."""
    draw = np.random.default_rng(0)
    parts = [
        BlockGradient(
            key=Key(1, 1),
            rank=rank,
            world_size=count,
            block=0,
            offset=0,
            count=CHUNK_ELEMENTS,
            weight=8.0,
            payload=draw.standard_normal(CHUNK_ELEMENTS, dtype=np.float32).data.cast("B"),
        )
        for rank in range(count)
    ]
    seconds: dict[Callable[..., object], list[float]] = {weighted_mean: [], trimmed_mean: []}
    with ExitStack() as stack:
        for name in _MODULES if arithmetic == "NumPy" else ():
            stack.enter_context(mock.patch(name, None))
        for _ in range(repeats):
            for make, times in seconds.items():
                began = time.thread_time()
                make(parts, Encoding.FLOAT32, Encoding.FLOAT32)
                times.append(time.thread_time() - began)
    weighted_s, trimmed_s = (statistics.median(times) for times in seconds.values())
    return {
        "contributions": count,
        "arithmetic": arithmetic,
        "weighted_s": weighted_s,
        "trimmed_s": trimmed_s,
        "ratio": trimmed_s / weighted_s,
        "trimmed_ns_per_element": trimmed_s / CHUNK_ELEMENTS * 1e9,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--contributions", type=int, nargs="+", default=[5, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--note", action="append", default=[], help="about the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
