"""What does a checkpoint cost the steps beside which it is written?

Two workers on this host train one model through shared memory, and one of them writes a checkpoint
every few steps. A step counts as one beside a checkpoint if a draft lay in the run's folder when it
began or ended, or a checkpoint appeared meanwhile. From one checkpoint to the next both kinds of
steps have a median, and these a ratio. The figure is the median of the ratios, so that a machine
whose speed drifts shows in the spread.

    python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from service import serving

__all__ = ["Trial", "measure"]

WORKERS = 2
_WARM = 3
"""Steps at the beginning that do not count: allocator, caches, optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What each worker is told."""

    width: int = 1768
    """Of each of the eight layers: the weights and both moments of AdamW have 300 MB."""
    batch: int = 256
    """Of all workers together."""
    every: int = 30
    """Steps between two checkpoints."""
    steps: int = 300


def main() -> None:
    """Measures, and prints the figures."""
    options = _arguments()
    machine = describe_machine()
    trial = Trial(
        width=options.width, batch=options.batch, every=options.every, steps=options.steps
    )
    figures = {**asdict(trial), **measure(trial)}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")


def measure(trial: Trial) -> dict[str, Any]:
    """Trains; returns of each worker the steps' medians and the worst, and their ratio.

    `lost_s` is what a checkpoint makes all its steps longer, taken together; the median of all.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, WORKERS) as service:
            workers = [_start(trial, folder, service.address, slot) for slot in range(WORKERS)]
            told = [json.loads(worker.communicate()[0] or "null") for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError("a worker failed: see its output")
    return {
        "checkpoint_bytes": told[0]["bytes"],
        "checkpoints": told[0]["checkpoints"],
        "workers": [_figures(trial, each["steps"]) for each in told],
    }


def _figures(trial: Trial, steps: list[tuple[float, bool]]) -> dict[str, Any]:
    """Of one worker's steps."""
    # From one checkpoint to the next: both kinds of steps of an interval were made at about the
    # same time. The first checkpoint is not in it: memory is got for it, and used again.
    intervals = [
        steps[at : at + trial.every]
        for at in range(2 * trial.every, len(steps) - trial.every + 1, trial.every)
    ]
    kinds = [
        [[seconds for seconds, beside in interval if beside is kind] for kind in (False, True)]
        for interval in intervals
    ]
    alone, beside = ([each for kind in kinds for each in kind[place]] for place in (0, 1))
    pairs = [
        [statistics.median(kind) for kind in kind_pair] for kind_pair in kinds if all(kind_pair)
    ]
    lost = [
        sum(of_beside) - len(of_beside) * statistics.median(of_alone)
        for of_alone, of_beside in kinds
        if of_alone
    ]
    return {
        "steps_alone": len(alone),
        "steps_beside": len(beside),
        "alone_s": round(statistics.median(alone), 4),
        "beside_s": round(statistics.median(beside), 4),
        "ratio": round(statistics.median(with_it / without for without, with_it in pairs), 3),
        "ratios": [round(with_it / without, 3) for without, with_it in pairs],
        "alone_worst_s": round(max(alone), 4),
        "beside_worst_s": round(max(beside), 4),
        "lost_s": round(statistics.median(lost), 4),
        "first_worst_s": round(max(seconds for seconds, _ in steps[_WARM : 2 * trial.every]), 4),
    }


def _start(trial: Trial, folder: Path, address: str, slot: int) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("checkpoints_worker.py"))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ANDON_")}
    return subprocess.Popen(
        [sys.executable, script, json.dumps(asdict(trial)), str(folder / "run")],
        env={**kept, "ANDON_ADDRESS": address, "RANK": str(slot)},
        stdout=subprocess.PIPE,
        text=True,
    )


def _arguments() -> argparse.Namespace:
    usual = Trial()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=usual.width, help="of each layer")
    parser.add_argument("--batch", type=int, default=usual.batch, help="of all workers together")
    parser.add_argument("--every", type=int, default=usual.every, help="steps to a checkpoint")
    parser.add_argument("--steps", type=int, default=usual.steps, help="steps in all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.steps < 4 * options.every or options.every <= _WARM:
        parser.error("--steps must be at least 4 times --every, and that more than 3")
    return options


if __name__ == "__main__":
    main()
