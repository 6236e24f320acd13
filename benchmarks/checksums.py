"""What do the checksums of chunks cost an exchange?

Each worker process is on two lines of one machine, one without checksums and one with. It runs
whole steps without a model on them alternately: without, with, without, with. Before that, one
thread alternately computes the CRC-32C of a chunk and copies a chunk.

    python benchmarks/checksums.py --json benchmarks/results/checksums.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from fastcrc import crc32
from machine import describe_machine
from paths import PATHS
from service import serving
from two_lines import WARM_UP, Side, compare, figures_of

CHUNK_BYTES = 2**21


def main() -> None:
    """Measures each requested path and size, and prints a row for it."""
    options = _arguments()
    chunk = measure_chunk(options.repeats)
    print(f"CRC-32C {chunk['crc32c_gb_per_s']:.1f} GB/s, a copy {chunk['copy_gb_per_s']:.1f} GB/s")
    rows = []
    print(f"{'path':14}{'size':>9}{'without':>12}{'with':>12}{'ratio':>8}{'CPU':>8}  single pairs")
    for path in options.paths:
        for mib in options.mib:
            row = measure(path, mib, options.workers, options.pairs)
            rows.append(row)
            low, high = row["spread"]
            print(
                f"{path:14}{mib:5} MiB{row['without_s'] * 1e3:9.1f} ms"
                f"{row['with_s'] * 1e3:9.1f} ms{row['ratio']:8.3f}"
                f"{row['processor_ratio']:8.3f}  {low:.2f} to {high:.2f}",
                flush=True,
            )
    if options.json:
        notes = [
            "whole steps without a model, two services and all workers on one host",
            "both lines in one run, by turns; a step took as long as its slowest worker",
            *options.note,
        ]
        machine = {**describe_machine(), "warm_up_pairs": WARM_UP, "notes": notes}
        figures = {"machine": machine, "chunk": chunk, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_chunk(repeats: int) -> dict[str, Any]:
    """How fast one thread computes the CRC-32C of a float32 chunk, and how fast it copies one."""
    chunk = np.random.default_rng(0).standard_normal(CHUNK_BYTES // 4, dtype=np.float32)
    chunk.tobytes()
    acts: dict[str, Callable[[], object]] = {
        "crc32c": lambda: crc32.iscsi(chunk.data),
        "copy": chunk.copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - began)
    return {
        "bytes": CHUNK_BYTES,
        "repeats": repeats,
        **{
            f"{name}_gb_per_s": round(CHUNK_BYTES / statistics.median(times) / 1e9, 2)
            for name, times in seconds.items()
        },
    }


def measure(path: str, mib: int, workers: int, pairs: int) -> dict[str, Any]:
    """Runs both services and the workers; `ratio` is the time with checksums over that without."""
    flags = PATHS[path].flags
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        sides = []
        for name in ("without", "with"):
            (folder / name).mkdir()
            line = stack.enter_context(serving(folder / name, workers, flags))
            sides.append(
                Side(
                    address=line.address,
                    run_id=line.run_id,
                    pid=line.pid,
                    path=path,
                    checked=name == "with",
                )
            )
        times = compare((sides[0], sides[1]), folder, mib=mib, workers=workers, pairs=pairs)
    return {
        "path": path,
        "workers": workers,
        "mib": mib,
        "pairs": pairs,
        **figures_of(*times, ("without", "with")),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--paths", nargs="+", choices=sorted(PATHS), default=["wire", "ring"], metavar="PATH"
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64], help="sizes (default: 64)")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--pairs", type=int, default=9, help="steps of each line that count")
    parser.add_argument("--repeats", type=int, default=101, help="of a single chunk")
    parser.add_argument("--note", action="append", default=[], help="about the circumstances")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(*options.mib, options.workers, options.pairs, options.repeats) < 1:
        parser.error("--mib, --workers, --pairs and --repeats must be at least 1")
    return options


if __name__ == "__main__":
    main()
