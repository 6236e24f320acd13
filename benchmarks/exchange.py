"""How long does an exchange of gradients take, compared with Gloo's all-reduce of the same bytes?

Each worker process is on an Andon line and in a `torch.distributed` group, and alternates between
them: ours, theirs, ours, theirs. Ours is a whole step of the protocol without a model: blocks
through the reducer with both checks for values that are not finite, averages back, StepReady, the
durable record, StepCommitted with the next assignment. Theirs is `all_reduce` of one flat
float32 tensor with the Gloo backend, divided by the number of ranks. All workers start at a
barrier; the time of an exchange is that of its slowest worker.

Theirs is always float32, whatever encoding ours has. Plain copies show the speed of the memory for
comparison.

The path `c10d` is another one: there a process group of Andon and one of Gloo make the same calls
(`c10d_calls.py`).

    python benchmarks/exchange.py --paths shared-memory,tcp,ring --json exchange.json
    python benchmarks/exchange.py --kib 4,64,1024 --mib 256 --encodings float32,bfloat16
    python benchmarks/exchange.py --paths c10d --calls all_gather,all_to_all --mib 64
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beside_gloo import outputs_of
from c10d_calls import CALLS, CallCase, line_of
from c10d_calls import measure as measure_calls
from machine import describe_machine
from paths import PATHS
from service import serving

__all__ = ["WARM_UP", "WorkerSpec"]

ENCODINGS = ("float32", "bfloat16", "float16", "int8", "int4")
WARM_UP = 2
"""Pairs that don't count: they set up connections and buffers, and bootstrap the run."""
_C10D = "c10d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: what is exchanged, and over which path."""

    path: str
    workers: int
    kib: int
    """KiB of float32, whatever the encoding."""
    encoding: str

    @property
    def mib(self) -> float:
        """The same in MiB."""
        return self.kib / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Case):
    """The parameters of one worker process."""

    pairs: int
    address: str
    run_id: str
    service_pid: int
    rank: int
    rendezvous: str
    """The rendezvous file of the Gloo group."""


def main() -> None:
    """Measures each requested case, and prints a row for it."""
    options = _arguments()
    machine = {**describe_machine(), **_circumstances(options)}
    rows: list[dict[str, Any]] = []
    print(f"{'path':14}{'workers':>8}{'size':>9}  {'encoding':10}{'ours':>12}{'Gloo':>12}", end="")
    print(
        f"{'ratio':>8}  {'of single pairs':14}{'of memory':>11}{'CPU, ours and Gloo':>26}",
        flush=True,
    )
    for path, workers, kib, encoding in itertools.product(
        [path for path in options.paths if path != _C10D],
        options.workers,
        options.sizes,
        options.encodings,
    ):
        case = Case(path=path, workers=workers, kib=kib, encoding=encoding)
        rows.append(measure(case, options.pairs))
        print(_line(rows[-1]), flush=True)
    calls = options.calls if _C10D in options.paths else []
    for call, workers, kib in itertools.product(calls, options.workers, options.sizes):
        called = CallCase(call=call, ranks=workers, kib=kib, backend=options.backend)
        rows.append(measure_calls(called, options.pairs))
        print(line_of(rows[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(case: Case, pairs: int) -> dict[str, Any]:
    """Runs a service and the workers of one case; returns its row.

    `ratio` is Gloo's median over ours: above 1, ours is faster. `spread` is the smallest and the
    largest ratio of a pair. `of_memory` is the time of plain copies that read and write as many
    bytes as the workers' numbers and one mean, over our time: 1 is the memory's speed. CPU time is
    a mean, summed over the service and all workers.
    """
    flags = [] if case.encoding == "float32" else ["--encoding", case.encoding]
    flags += PATHS[case.path].flags
    with TemporaryDirectory() as folder, serving(Path(folder), case.workers, flags) as service:
        specs = [
            WorkerSpec(
                **asdict(case),
                pairs=pairs,
                address=service.address,
                run_id=service.run_id,
                service_pid=service.pid,
                rank=rank,
                rendezvous=str(Path(folder) / "gloo"),
            )
            for rank in range(case.workers)
        ]
        seen = outputs_of("exchange_worker.py", [asdict(spec) for spec in specs])
    ours, gloo, memory = (
        [max(times) for times in zip(*(each[side] for each in seen), strict=True)]
        for side in ("ours_s", "gloo_s", "memory_s")
    )
    ratios = [theirs / mine for mine, theirs in zip(ours, gloo, strict=True)]
    ours_s, gloo_s = statistics.median(ours), statistics.median(gloo)
    service_cpu = seen[0]["service_cpu_s"]
    workers_cpu = sum(statistics.mean(each["ours_cpu_s"]) for each in seen)
    return {
        **asdict(case),
        "gloo_encoding": "float32",
        "ours_s": round(ours_s, 6),
        "gloo_s": round(gloo_s, 6),
        "ratio": round(gloo_s / ours_s, 4),
        "of_memory": round(statistics.median(memory) / ours_s, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "service_cpu_s": round(statistics.mean(service_cpu), 6) if service_cpu else None,
        "workers_cpu_s": round(workers_cpu, 6),
        "gloo_cpu_s": round(sum(statistics.mean(each["gloo_cpu_s"]) for each in seen), 6),
    }


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    cores = len(os.sched_getaffinity(0))
    notes = [
        "all workers on one host over loopback, one computing thread each",
        "ours has the service as one more process, with two reducing threads; Gloo has none",
        "ours is a whole step with control messages, value gate and durable record",
        "but of c10d a call in a process group with ANDON_GATE=all",
    ]
    if crowded := [str(count) for count in options.workers if count > cores]:
        notes.append(
            f"{' and '.join(crowded)} workers on {cores} cores are oversubscribed, "
            "for both sides alike"
        )
    return {"pairs": options.pairs, "warm_up_pairs": WARM_UP, "notes": notes}


def _line(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    size = f"{row['kib'] // 1024} MiB" if row["kib"] % 1024 == 0 else f"{row['kib']} KiB"
    cpu_s = (row["service_cpu_s"] or 0.0) + row["workers_cpu_s"]
    return (
        f"{row['path']:14}{row['workers']:8}{size:>9}  {row['encoding']:10}"
        f"{row['ours_s'] * 1e3:9.1f} ms{row['gloo_s'] * 1e3:9.1f} ms{row['ratio']:8.2f}"
        f"  {low:.2f} to {high:.2f}{row['of_memory']:11.2f}"
        f"{cpu_s * 1e3:14.1f} ms{row['gloo_cpu_s'] * 1e3:9.1f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    paths, encodings = (*PATHS, _C10D), ", ".join(ENCODINGS)
    parser.add_argument(
        "--paths", type=_names(paths), default=["wire"], help=f"of: {', '.join(paths)}"
    )
    parser.add_argument("--workers", type=_counts(2), default=[2, 4], help="default: 2,4")
    parser.add_argument("--kib", type=_counts(1), help="sizes below a MiB; default: 4,64")
    parser.add_argument("--mib", type=_counts(1), help="sizes; default: 1,16,64,256")
    parser.add_argument(
        "--encodings", type=_names(ENCODINGS), default=["float32"], help=f"of: {encodings}"
    )
    parser.add_argument(
        "--calls", type=_names(CALLS), default=["all_reduce"], help=f"of c10d: {', '.join(CALLS)}"
    )
    parser.add_argument(
        "--backend", default="andon", help="ours of c10d; gloo shows how far equals differ"
    )
    parser.add_argument("--pairs", type=int, default=7, help="exchanges of each side that count")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, not {options.pairs}")
    if options.kib is None and options.mib is None:
        options.kib, options.mib = [4, 64], [1, 16, 64, 256]
    options.sizes = [*(options.kib or ()), *(1024 * mib for mib in options.mib or ())]
    return options


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Parses comma-separated names."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(known)}")
        return names

    return read


def _counts(least: int) -> Callable[[str], list[int]]:
    """Parses comma-separated numbers."""

    def read(text: str) -> list[int]:
        try:
            counts = [int(each) for each in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of comma-separated numbers"
            ) from None
        if min(counts) < least:
            raise argparse.ArgumentTypeError(f"{min(counts)} is below {least}")
        return counts

    return read


if __name__ == "__main__":
    main()
