"""What do encodings of few bits cost in loss, after the same number of samples as float32?

Two workers train the demo's GPT, smaller, on its text: the same samples in the same order for every
encoding, with the same batches and the same learning rate. The loss is that of samples that nobody
has trained on. Rows without feedback are an ablation: no worker does that.

    python benchmarks/narrow.py --json benchmarks/results/narrow.json
    python benchmarks/narrow.py --rows float32,int8 --seeds 1 --batches 50
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from convergence import Run, Trainers, WorkerSpec
from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.sparse import KEPT

WORKERS = 2
_LOCAL = ("--schedule", "local", "--local-steps", "8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a line encodes."""

    flags: tuple[str, ...]
    """Of `andon serve`."""
    base: str = "float32"
    """The row that it is compared with."""
    feedback: bool = True
    kept: int = KEPT
    """Of topk: the elements of each 256 that are sent."""


def _encoded(encoding: str, answers: str = "", kept: int | None = None) -> tuple[str, ...]:
    answer = ("--answer-encoding", answers) if answers else ()
    return ("--encoding", encoding, *answer, *(("--topk-kept", str(kept)) if kept else ()))


VARIANTS = {
    "float32": Variant(flags=_encoded("float32")),
    "bfloat16": Variant(flags=_encoded("bfloat16")),
    "int8": Variant(flags=_encoded("int8")),
    "int8-without-feedback": Variant(flags=_encoded("int8"), feedback=False),
    "int4": Variant(flags=_encoded("int4")),
    "int4-answers-int8": Variant(flags=_encoded("int4", "int8")),
    "int4-without-feedback": Variant(flags=_encoded("int4"), feedback=False),
    "int2": Variant(flags=_encoded("int2")),
    "int2-answers-int8": Variant(flags=_encoded("int2", "int8")),
    "int2-without-feedback": Variant(flags=_encoded("int2"), feedback=False),
    "topk": Variant(flags=_encoded("topk")),
    "topk-16": Variant(flags=_encoded("topk", kept=16), kept=16),
    "topk-without-feedback": Variant(flags=_encoded("topk"), feedback=False),
    "local-8-float32": Variant(flags=_LOCAL, base="local-8-float32"),
    "local-8-int4": Variant(flags=(*_LOCAL, *_encoded("int4")), base="local-8-float32"),
    "local-8-int2": Variant(flags=(*_LOCAL, *_encoded("int2")), base="local-8-float32"),
    "local-8-topk": Variant(flags=(*_LOCAL, *_encoded("topk")), base="local-8-float32"),
    "local-8-topk-16": Variant(
        flags=(*_LOCAL, *_encoded("topk", kept=16)), base="local-8-float32", kept=16
    ),
}
"""What is compared. Averages travel as gradients do, and as int4 with int2, unless the name says
otherwise; topk has 4 elements of 256, or as many as the name says."""


def main() -> None:
    """Trains, and prints a row for each encoding."""
    options = _arguments()
    machine, began = describe_machine(), time.perf_counter()
    runs: dict[str, list[Run]] = {name: [] for name in options.rows}
    with Trainers(WORKERS) as trainers:
        for seed in range(1, options.seeds + 1):
            spec = WorkerSpec(
                task="letters-64",
                seed=seed,
                samples=options.batches * options.batch,
                batch=options.batch,
            )
            for name in options.rows:
                runs[name].append(_line(trainers, spec, VARIANTS[name]))
    rows = [_row(name, seen, runs.get(VARIANTS[name].base)) for name, seen in runs.items()]
    for row in rows:
        print(_told(row), flush=True)
    if options.json:
        minutes = round((time.perf_counter() - began) / 60, 1)
        write_rows(options.json, {**machine, **_circumstances(options, minutes)}, rows)


def _line(trainers: Trainers, spec: WorkerSpec, variant: Variant) -> Run:
    with TemporaryDirectory() as folder, serving(Path(folder), WORKERS, variant.flags) as served:
        mine = replace(
            spec,
            feedback=variant.feedback,
            address=served.address,
            run_id=served.run_id,
        )
        return trainers.train([mine] * WORKERS)


def _row(name: str, seen: list[Run], base: list[Run] | None) -> dict[str, Any]:
    """One encoding: the final losses of all seeds, and how far they are from the base's."""
    ends = [run.curve[-1][1] for run in seen]
    up, down = _parts_of_float32(VARIANTS[name])
    row = {
        "encoding": name,
        "bytes_up": round(up, 4),
        "bytes_down": round(down, 4),
        "samples": seen[0].curve[-1][0],
        "commits": seen[0].steps,
        "loss": round(statistics.mean(ends), 4),
        "losses": [round(end, 4) for end in ends],
    }
    if base is not None:
        expected = [run.curve[-1][1] for run in base]
        away = [100 * (end / other - 1) for end, other in zip(ends, expected, strict=True)]
        row["base"] = VARIANTS[name].base
        row["percent"] = round(statistics.mean(away), 3)
        row["percent_spread"] = [round(min(away), 3), round(max(away), 3)]
    row["curves"] = [[(samples, round(loss, 4)) for samples, loss in run.curve] for run in seen]
    return row


def _parts_of_float32(variant: Variant) -> tuple[float, float]:
    """How many bytes contributions and averages are, as a part of float32's."""
    flags = dict(zip(variant.flags[:-1], variant.flags[1:], strict=True))
    encoding = Encoding.of(flags.get("--encoding", "float32"))
    # What int2 is answered in if nothing is said.
    same = Encoding.INT4_BLOCK if encoding is Encoding.INT2_BLOCK else encoding
    answer = Encoding.of(flags["--answer-encoding"]) if "--answer-encoding" in flags else same
    vectors = np.random.default_rng(0).standard_normal((WORKERS, 2**20)).astype(np.float32)
    sent = [encode(each, encoding, kept=variant.kept) for each in vectors]
    mean = np.mean([decode(each, encoding, 2**20) for each in sent], axis=0)
    return sent[0].nbytes / 2**22, encode(mean, answer).nbytes / 2**22


def _told(row: dict[str, Any]) -> str:
    text = f"{row['encoding']:24}loss {row['loss']:.4f}"
    if "percent" not in row:
        return text
    low, high = row["percent_spread"]
    return f"{text}  from {row['base']} {row['percent']:+.2f} % ({low:+.2f} to {high:+.2f})"


def _circumstances(options: argparse.Namespace, minutes: float) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "seeds": options.seeds,
        "batch": options.batch,
        "batches": options.batches,
        "minutes": minutes,
        "flags": {name: VARIANTS[name].flags for name in options.rows},
        "notes": [
            f"{WORKERS} workers, one thread each",
            "AdamW with rate 3e-3, gradients clipped to a norm of 1",
            "the GPT of examples/shakespeare.py with 2 layers of width 64",
            "bytes_up, bytes_down: of contributions and averages, float32's being 1; averages of "
            "topk are those of independent gradients, which have no element in common",
            "percent: the loss above that of the base, mean over the seeds; then the extremes",
            "curves: a list for each seed, of samples and the loss on unseen samples; rank 0's",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples in a batch of the line")
    parser.add_argument("--batches", type=int, default=300, help="the samples, in batches")
    parser.add_argument(
        "--rows",
        type=chosen_from(VARIANTS),
        default=list(VARIANTS),
        help=f"of: {','.join(VARIANTS)} (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.seeds, options.batch, options.batches) < 1:
        parser.error("--seeds, --batch and --batches must be at least 1")
    return options


if __name__ == "__main__":
    main()
