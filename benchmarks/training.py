"""How long does a training step take on a line, with DistributedDataParallel, and with neither?

Each worker process holds three copies of one GPT and trains them alternately: on the line, in a
`torch.distributed` group with DistributedDataParallel over Gloo, and alone: plain PyTorch without
an exchange. Workers with a GPU each hold a fourth, with DistributedDataParallel over NCCL. Ours and
theirs get the same samples, so their losses must agree. A step ends with the updated weights, and
ours begins with the loader's next batch. All workers start it at a barrier, and its time is that of
its slowest worker.

    python benchmarks/training.py --json benchmarks/results/training.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beside_gloo import outputs_of
from machine import describe_machine
from service import serving

__all__ = ["WARM_UP", "Shape", "WorkerSpec", "measure"]

WARM_UP = 3
"""Steps before the first one that counts: they set up connections, buffers and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model's size, and the work of each worker."""

    layers: int
    width: int
    context: int
    samples: int
    """A worker's share of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Shape):
    """The parameters of one worker process."""

    workers: int
    steps: int
    address: str
    run_id: str
    rank: int
    rendezvous: str
    """The rendezvous file of the Gloo group."""
    device: str = "cpu"
    nccl: bool = False
    """Whether to measure NCCL, too; it wants a GPU for each worker."""


def main() -> None:
    """Measures, and prints the figures."""
    options = _arguments()
    shape = Shape(
        layers=options.layers,
        width=options.width,
        context=options.context,
        samples=options.samples,
    )
    machine = {**describe_machine(), **_circumstances(options.workers)}
    row = measure(shape, options.workers, options.steps)
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "row": row}, indent=2) + "\n")


def measure(
    shape: Shape, workers: int, steps: int, devices: Sequence[str] = ("cpu",)
) -> dict[str, Any]:
    """Runs a service and its workers; returns times in seconds, and figures derived from them.

    `ratio` is DistributedDataParallel's median over ours: above 1, ours is faster. `overhead` is
    what ours takes more than the same step alone, as a part of that step. `hidden` is the median
    part of the exchange that took place during backward. `loss_difference` is the greatest between
    the losses of ours and theirs at one step. `nccl_s` and `nccl_ratio` are there if each worker
    has a GPU of its own.

    Args:
        shape: what is trained.
        workers: how many processes.
        steps: of each side that count.
        devices: the workers' devices, in turn.
    """
    apart = len({*devices}) >= workers and devices[0] != "cpu"
    with TemporaryDirectory() as folder, serving(Path(folder), workers) as service:
        specs = [
            WorkerSpec(
                **asdict(shape),
                workers=workers,
                steps=steps,
                address=service.address,
                run_id=service.run_id,
                rank=rank,
                rendezvous=str(Path(folder) / "gloo"),
                device=devices[rank % len(devices)],
                nccl=apart,
            )
            for rank in range(workers)
        ]
        seen = outputs_of("training_worker.py", [asdict(spec) for spec in specs])
    times = {
        side: [max(each) for each in zip(*(one[side] for one in seen), strict=True)]
        for side in ("ours_s", "ddp_s", "solo_s", *(["nccl_s"] if apart else []))
    }
    medians = {side: statistics.median(each) for side, each in times.items()}
    ratios = [theirs / mine for mine, theirs in zip(times["ours_s"], times["ddp_s"], strict=True)]
    losses = zip(seen[0]["ours_loss"], seen[0]["ddp_loss"], strict=True)
    return {
        **asdict(shape),
        "parameters": seen[0]["parameters"],
        "workers": workers,
        "steps": steps,
        **{side: round(median, 6) for side, median in medians.items()},
        "ratio": round(medians["ddp_s"] / medians["ours_s"], 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "overhead": round(medians["ours_s"] / medians["solo_s"] - 1.0, 4),
        "ddp_overhead": round(medians["ddp_s"] / medians["solo_s"] - 1.0, 4),
        "hidden": round(statistics.median(seen[0]["hidden"]), 4),
        "loss_difference": max(abs(mine - theirs) for mine, theirs in losses),
        **({"nccl_ratio": round(medians["nccl_s"] / medians["ours_s"], 4)} if apart else {}),
    }


def _circumstances(workers: int) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "warm_up_steps": WARM_UP,
        "notes": [
            "all workers on one host, one computing thread each, AdamW",
            "the service is one more process on the same cores; Gloo has none",
            f"{workers} workers computing leave no core idle for an exchange that hides behind "
            "backward: what it hides it takes from the computing",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of each side that count")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64, help="letters of a sample")
    parser.add_argument("--samples", type=int, default=8, help="a worker's share of a step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("workers", "steps", "layers", "width", "context", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
