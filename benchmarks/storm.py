"""The kill table: how much of its speed does each system keep while its processes are killed?

R worker processes of this host train the same small GPT under Andon, torchft, and
DistributedDataParallel with torchrun. A fault strikes every K seconds: SIGKILL of a worker, SIGSTOP
of a worker and SIGCONT later, SIGKILL of the service. Each system has the same faults, drawn from a
seed, and runs undisturbed as well, in the same invocation. Systems run one after the other.

    python -m venv .venv-torchft         # torchft has an environment of its own
    .venv-torchft/bin/pip install torch numpy opentelemetry-sdk
    .venv-torchft/bin/pip install opentelemetry-exporter-otlp-proto-http
    .venv-torchft/bin/pip install --no-deps torchft-nightly
    python benchmarks/storm.py --systems andon,torchft,ddp --replicas 4 --every 15 --minutes 30 \\
        --json benchmarks/results/storm.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from schedules import chosen_from, write_rows
from storm_plan import Fault, ideal_share, planned
from storm_run import Outcome, loss_at, run_storm
from storm_systems import OFTEN_S, SYSTEMS, TORCHFT_PYTHON
from storm_task import Settings

SET_UP = {
    "andon": "andon run --restarts, as in docs/checkpoints.md",
    "torchft": "README (Lighthouse, Running DDP), train_ddp.py, torchft/torchx.py; "
    "TORCHFT_QUORUM_RETRIES as torchft/manager.py advises against a lighthouse that dies",
    "ddp": "the pages `torchrun (Elastic Launch)` and `Fault-tolerant Distributed Training with "
    "torchrun` of PyTorch's documentation",
}
SET_UP["andon-spare"] = f"{SET_UP['andon']}; --spares 1, as in docs/places/spares.md"
SET_UP["torchft-majority"] = f"{SET_UP['torchft']}; --min_replicas of a majority, as its page "
SET_UP["torchft-majority"] += "`Assumptions and Recommendations` advises against a split brain"
SET_UP["ddp-often"] = f"{SET_UP['ddp']}; a checkpoint every {OFTEN_S:g} s"
SERVICE = {
    "andon": "the service of `andon run`, which starts it again",
    "torchft": "the lighthouse; a supervisor starts it again at once",
    "ddp": "torchrun, whose process has the c10d store; a supervisor ends its workers and starts "
    "it again at once, as a scheduler would",
}
SERVICE["andon-spare"] = SERVICE["andon"]
SERVICE["torchft-majority"] = SERVICE["torchft"]
SERVICE["ddp-often"] = SERVICE["ddp"]


def main() -> None:
    """Measures each system, and prints a line for each."""
    options = _arguments()
    machine = {**describe_machine(), **_circumstances(options)}
    rows = []
    for name in options.systems:
        seconds = 60 * (options.minutes if name.startswith("andon") else options.peer_minutes)
        plan = planned(options.seed, options.every, seconds, options.replicas)
        ideal = ideal_share(plan, options.freeze, seconds, options.replicas)
        print(f"{name}, undisturbed", flush=True)
        calm = _run(options, name, "calm", [], options.undisturbed_minutes * 60)
        print(f"{name}, {len(plan)} faults", flush=True)
        stormy = _run(options, name, "storm", plan, seconds)
        rows.append(row_of(name, options.every, calm, stormy, ideal))
        brief = {key: value for key, value in rows[-1].items() if not isinstance(value, list)}
        print("\n".join(f"  {key:26}{value}" for key, value in brief.items()), flush=True)
        if options.json:
            write_rows(options.json, machine, rows)


def row_of(
    name: str, every_s: float, calm: Outcome, stormy: Outcome, ideal: float
) -> dict[str, Any]:
    """A row of the table; `ideal` is what would be kept without any loss but frozen workers."""
    faults = sum(stormy.struck.values())
    return {
        "system": name,
        "every_s": every_s,
        "of_undisturbed": round(stormy.samples_per_s / calm.samples_per_s, 4),
        "ideal": round(ideal, 4),
        "samples_lost": stormy.counts.lost,
        "samples_doubled": stormy.counts.doubled,
        "recomputed_per_fault": round(stormy.counts.recomputed / max(faults, 1), 1),
        "longest_pause_s": round(stormy.longest_pause_s, 2),
        "loss_over_undisturbed": loss_over(calm.curve, stormy.curve),
        "digest": "equal" if _are_equal(stormy) else _digest_words(stormy),
        "faults": stormy.struck,
        "faults_without_victim": stormy.missed,
        "service_is": SERVICE[name],
        "set_up_after": SET_UP[name],
        "storm_s": stormy.seconds,
        "undisturbed_s": calm.seconds,
        "samples_per_s": round(stormy.samples_per_s, 1),
        "undisturbed_samples_per_s": round(calm.samples_per_s, 1),
        "samples_kept": stormy.counts.kept,
        "wasted_per_fault": round(stormy.counts.wasted / max(faults, 1), 1),
        "undisturbed_counts": {
            "lost": calm.counts.lost,
            "doubled": calm.counts.doubled,
            "recomputed": calm.counts.recomputed,
            "digest": "equal" if _are_equal(calm) else _digest_words(calm),
        },
        "replicas_back_at_end": stormy.settled,
        "load": {"undisturbed": calm.load, "storm": stormy.load},
        "worker_processes": stormy.starts,
        "restarts_by_harness": stormy.restarts_by_harness,
        "steps": stormy.steps,
        "timeline": stormy.timeline,
        "fault_times": stormy.faults,
        "curve": stormy.curve,
        "undisturbed_curve": calm.curve,
    }


def loss_over(
    calm: Sequence[tuple[int, float]], stormy: Sequence[tuple[int, float]]
) -> dict[str, float] | None:
    """How much higher the loss is after the storm, at the most samples that both runs reached.

    None: the storm left no two snapshots, or none of the undisturbed run's range.
    """
    if not calm or not stormy:
        return None
    samples = min(calm[-1][0], stormy[-1][0])
    try:
        ours, theirs = loss_at(stormy, samples), loss_at(calm, samples)
    except ValueError:
        return None
    return {"relative": round(ours / theirs - 1, 4), "samples": samples}


def _are_equal(outcome: Outcome) -> bool:
    return len(outcome.digests) == outcome.replicas and len(set(outcome.digests)) == 1


def _digest_words(outcome: Outcome) -> str:
    ended, different = len(outcome.digests), len(set(outcome.digests))
    return f"{different} different, of {ended} replicas that reached the end"


def _run(
    options: argparse.Namespace, name: str, kind: str, plan: Sequence[Fault], seconds: float
) -> Outcome:
    """A run in a folder of its own; `--keep` keeps it, with ledgers and logs."""
    with TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary).absolute() / f"{name}-{kind}"
        folder.mkdir(parents=True)
        settings = Settings(
            folder=str(folder),
            replicas=options.replicas,
            batch=options.batch,
            pace_s=options.pace_ms / 1e3,
            checkpoint_s=options.checkpoint,
        )
        return run_storm(name, settings, plan, seconds, options.freeze)


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "replicas": options.replicas,
        "batch": options.batch,
        "pace_ms": options.pace_ms,
        "freeze_s": options.freeze,
        "checkpoint_s": options.checkpoint,
        "seed": options.seed,
        "nice": os.nice(0),
        "torchft": _torchft_version() if _uses_torchft(options) else None,
        "torch": version("torch"),
        "notes": [
            "all processes on one host, over loopback and, for Andon, shared memory",
            f"a sample pretends to take {options.pace_ms:g} ms on a device, in addition to its "
            "real forward and backward on the CPU",
            "every system starts at the warm-up's end; faults cease one interval before the end",
        ],
    }


def _uses_torchft(options: argparse.Namespace) -> bool:
    return any(name.startswith("torchft") for name in options.systems)


def _torchft_version() -> str:
    names = "torchft-nightly", "torch"
    code = f"from importlib.metadata import version; print(*map(version, {names}))"
    found = subprocess.run([TORCHFT_PYTHON, "-c", code], capture_output=True, text=True, check=True)
    torchft, torch = found.stdout.split()
    return f"torchft-nightly {torchft}, torch {torch}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", type=chosen_from(SYSTEMS), default=["andon", "ddp"])
    parser.add_argument("--replicas", type=int, default=4, help="workers (default: 4)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the storm")
    parser.add_argument("--peer-minutes", type=float, help="of the others' (default: --minutes)")
    parser.add_argument("--undisturbed-minutes", type=float, default=3.0)
    parser.add_argument("--freeze", type=float, default=8.0, help="seconds until SIGCONT")
    parser.add_argument("--checkpoint", type=float, default=60.0, help="seconds between two")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step of all replicas")
    parser.add_argument("--pace-ms", type=float, default=12.0, help="of a sample, on a device")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--keep", type=Path, help="keep ledgers and logs in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.peer_minutes is None:
        options.peer_minutes = options.minutes
    if options.batch % options.replicas:
        parser.error(f"--batch must be a multiple of --replicas: {options.batch}")
    if _uses_torchft(options) and not TORCHFT_PYTHON.exists():
        sys.exit(f"storm.py: torchft needs {TORCHFT_PYTHON}: --help says how to make it")
    return options


if __name__ == "__main__":
    main()
