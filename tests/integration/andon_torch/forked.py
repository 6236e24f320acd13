"""Runs scenarios with real ranks: `python forked.py ADDRESS SPECS.json`; a line of JSON for each.

A rank is a process that is forked from this one, which has imported everything: to import PyTorch
takes seconds. It forms its group by a file, and tells by a pipe what the scenario returned or
raised. `seconds` is how long after the file `acted` that was, if a scenario wrote it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PATIENCE_S = 60


def run(spec: dict[str, Any], address: str, folder: Path) -> list[dict[str, Any]]:
    """What became of each rank."""
    context = get_context("fork")
    store = folder / f"store-{time.monotonic_ns()}"
    acted = folder / "acted"
    acted.unlink(missing_ok=True)
    ranks = []
    for rank in range(spec["ranks"]):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(spec, rank, address, store, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    found = []
    deadline = time.monotonic() + PATIENCE_S
    for process, ours in ranks:
        outcome: dict[str, Any] = {}
        # A rank that stopped itself says nothing; the others have ended when it is looked at.
        patience = 0 if process.pid in _stopped(ranks) else max(0.0, deadline - time.monotonic())
        try:
            if ours.poll(patience):
                outcome = ours.recv()
        except EOFError:
            pass
        found.append(outcome)
    for (process, _), outcome in zip(ranks, found, strict=True):
        process.join(0 if process.pid in _stopped(ranks) else 20)
        if process.is_alive():
            process.kill()
            process.join()
        outcome["exit"] = process.exitcode
        said = outcome.get("result", outcome)
        if acted.exists() and "at" in said:
            said["seconds"] = said["at"] - float(acted.read_text())
    return found


def _stopped(ranks: list[Any]) -> set[int]:
    """Processes that a signal stopped."""
    found = set()
    for process, _ in ranks:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] in "Tt":
            found.add(process.pid)
    return found


def _rank(spec: dict[str, Any], rank: int, address: str, store: Path, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {"ANDON_ADDRESS": address, **spec.get("env", {})}
    import rank_scripts  # type: ignore[import-not-found]  # beside this script
    import torch.distributed as dist

    try:
        dist.init_process_group(
            spec["backend"],
            init_method=f"file://{store}",
            rank=rank,
            world_size=spec["ranks"],
            timeout=timedelta(seconds=PATIENCE_S),
        )
        try:
            result = getattr(rank_scripts, spec["scenario"])(**spec.get("arguments", {}))
        finally:
            dist.destroy_process_group()
        pipe.send({"result": result})
    except Exception as error:
        pipe.send({"error": str(error), "type": type(error).__name__, "at": time.monotonic()})


def main() -> None:
    """Runs the specs of the file."""
    # Here, and not in every process: DistributedDataParallel imports the last one.
    import torch._dynamo

    import andon_torch.groups
    import andon_torch.hooks  # noqa: F401

    torch.set_num_threads(1)
    specs = json.loads(Path(sys.argv[2]).read_text())
    with tempfile.TemporaryDirectory(prefix="andon-plain-") as name:
        folder = Path(name)
        os.chdir(folder)
        for spec in specs:
            sys.stdout.write(json.dumps(run(spec, sys.argv[1], folder)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
