"""How long does a step of DistributedDataParallel take over Andon, over Gloo, and with neither?

Each process holds three copies of one GPT and trains them in turns: with DistributedDataParallel in
a process group of Andon, in one of Gloo, and alone. The script is the same; only the backend's name
differs. Andon's gate is on, as it is by default: it looks for values that are not finite before any
leaves the rank. Ours and theirs get the same samples, and with two ranks their weights must be
equal to the bit. All ranks start a step at a barrier, and its time is that of the slowest rank.

    python benchmarks/ddp_step.py --json benchmarks/results/ddp-step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beside_gloo import outputs_of
from machine import describe_machine
from service import serving

__all__ = ["SIDES", "WARM_UP", "StepSpec", "measure"]

SIDES = ("ours_s", "gloo_s", "solo_s")
WARM_UP = 3
"""Steps of each side that don't count: they open connections and make the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What is trained, by how many, and how often."""

    ranks: int
    steps: int
    layers: int
    width: int
    context: int
    samples: int
    """A rank's share of a step."""
    backend: str = "andon"
    rank: int = 0
    rendezvous: str = ""
    """The rendezvous file of the groups."""


def main() -> None:
    """Measures, and prints the figures."""
    options = _arguments()
    spec = StepSpec(
        ranks=options.ranks,
        steps=options.steps,
        layers=options.layers,
        width=options.width,
        context=options.context,
        samples=options.samples,
        backend=options.backend,
    )
    machine = {**describe_machine(), **_circumstances(spec)}
    row = measure(spec)
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": [row]}, indent=2) + "\n")


def measure(spec: StepSpec) -> dict[str, Any]:
    """Runs a service and the ranks; returns times in seconds, and figures derived from them.

    `ratio` is Gloo's median over ours: above 1, ours is faster. `spread` is the smallest and the
    largest ratio of a pair. `overhead` is what ours takes more than a step alone, relative to it.
    """
    with TemporaryDirectory() as folder, serving(Path(folder), spec.ranks) as service:
        rendezvous = str(Path(folder) / "gloo")
        each = [
            {**asdict(spec), "rank": rank, "rendezvous": rendezvous} for rank in range(spec.ranks)
        ]
        seen = outputs_of("ddp_step_worker.py", each, ANDON_ADDRESS=service.address)
    times = {side: [max(of) for of in zip(*(one[side] for one in seen), strict=True)]
             for side in SIDES}  # fmt: skip
    medians = {side: statistics.median(of) for side, of in times.items()}
    ratios = [theirs / mine for mine, theirs in zip(times["ours_s"], times["gloo_s"], strict=True)]
    return {
        **{name: value for name, value in asdict(spec).items() if name not in _OF_A_RANK},
        "parameters": seen[0]["parameters"],
        **{side: round(median, 6) for side, median in medians.items()},
        "ratio": round(medians["gloo_s"] / medians["ours_s"], 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "overhead": round(medians["ours_s"] / medians["solo_s"] - 1.0, 4),
        "gloo_overhead": round(medians["gloo_s"] / medians["solo_s"] - 1.0, 4),
        "weights_equal": all(one["weights_equal"] for one in seen),
    }


_OF_A_RANK = ("rank", "rendezvous")


def _circumstances(spec: StepSpec) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "warm_up_steps": WARM_UP,
        "notes": [
            "all ranks on one host, one computing thread each, AdamW",
            f"{spec.ranks} ranks computing leave no core idle for an exchange that hides behind "
            "backward: what it hides it takes from the computing",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of each side that count")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64, help="letters of a sample")
    parser.add_argument("--samples", type=int, default=8, help="a rank's share of a step")
    parser.add_argument(
        "--backend", default="andon", help="ours; gloo shows how far two equal sides differ"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("ranks", "steps", "layers", "width", "context", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
