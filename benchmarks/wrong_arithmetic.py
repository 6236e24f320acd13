r"""Does `--verify` find a worker that computes wrong finite numbers, and is anybody wronged?

Lines of two, three and four workers train a small model with `--verify 1.0`. In every second step
one bit of one number is flipped in one worker, as a defective processor might: in an activation, in
the gradient of one, in a sum along the tree, in what is sent, in the averages that came, or in a
weight after the optimizer's step; at last also in the reducer's mean. When the line halts, the
evidence is noted, and the step is tried again without the fault. So all faults are independent of
each other. A script that runs alone, and is right, says which faults changed nothing: rounding
swallows some, and those are no wrong arithmetic.

    python benchmarks/wrong_arithmetic.py --json benchmarks/results/wrong-arithmetic.json
    python benchmarks/wrong_arithmetic.py --workers 3 --faults 0 --reducer-faults 0 \
        --clean-steps 12500 --json benchmarks/results/wrong-arithmetic-clean.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from service import Service, serving
from wrong_plan import CLEAN, PLACES, REDUCER, Fault, plan_of, write_plan

from andon.host.tls import open_channel
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.halt_pb2 import HaltEvidence, HaltReason

__all__ = ["measure"]

_HERE = Path(__file__).parent
_FLAGS = ("--same-bits", "--verify", "1.0", "--arithmetic", "tell", "--liveness", "20")
_PATIENCE_S = 600.0


@dataclass
class Watch:
    """What a line's status has shown, halt by halt; each halt was answered with RETRY."""

    halts: list[HaltEvidence] = field(default_factory=list)
    reducer: list[tuple[int, int]] = field(default_factory=list)
    """The line's step before and after each mean that a reducer made wrong."""
    grains: int = 0
    """Grains that two workers computed alike."""


def measure(
    workers: int, count: int, reducer_faults: int, seed: int, clean: int = 0
) -> dict[str, Any]:
    """Runs one line, and counts what became of its faults.

    Args:
        workers: how many.
        count: faults of workers.
        reducer_faults: those of the reducer.
        seed: of the faults.
        clean: steps without a fault, beside those between the faults.
    """
    faults = plan_of(count, workers, seed)
    steps = CLEAN + 2 * count + CLEAN + clean
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        plan, wrong_file = folder / "plan.json", folder / "wrong"
        write_plan(faults, plan)
        spec = {"plan": str(plan), "steps": steps}
        endless = {**spec, "steps": None}
        alone = _finish([stack.enter_context(_worker(folder, {**spec, "slot": None}))])[0]
        os.environ["ANDON_WRONG_FILE"] = str(wrong_file)
        program = (str(_HERE / "wrong_service.py"),)
        line = stack.enter_context(serving(folder, workers, _FLAGS, program=program))
        started = [
            stack.enter_context(_worker(folder, {**endless, "slot": slot}, line, workers))
            for slot in range(workers)
        ]
        watch = _follow(line, steps, reducer_faults, wrong_file)
        seen = _finish(started)
    return _counted(workers, faults, watch, alone, seen)


@contextmanager
def _worker(
    folder: Path, spec: dict[str, Any], line: Service | None = None, workers: int = 1
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    slot = spec["slot"]
    file, out = folder / f"spec-{slot}.json", folder / f"out-{slot}.json"
    file.write_text(json.dumps(spec))
    here = {"OMP_NUM_THREADS": "1", "ANDON_SHARED_DIR": "off"}
    if line is not None:
        here |= {"ANDON_ADDRESS": line.address, "ANDON_RUN_ID": line.run_id}
        here |= {"RANK": str(slot), "WORLD_SIZE": str(workers)}
    command = [sys.executable, str(_HERE / "wrong_worker.py"), str(file), str(out)]
    with (folder / f"log-{slot}").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **here}, stdout=log, stderr=log)
    try:
        yield process, out
    finally:
        process.kill()
        process.wait()


def _finish(workers: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> list[dict[str, Any]]:
    for process, out in workers:
        if process.wait(_PATIENCE_S):
            log = out.with_name(out.stem.replace("out", "log")).read_text()
            raise RuntimeError(f"a worker ended with code {process.returncode}: {log[-3000:]}")
    return [json.loads(out.read_text()) for _, out in workers]


def _follow(line: Service, steps: int, reducer_faults: int, file: Path) -> Watch:
    """Answers all halts; after `steps` steps the reducer is told to err, and the run is ended."""
    watch, left = Watch(), reducer_faults
    with open_channel(line.address, (), None) as channel:
        stub = CoordinatorStub(channel)
        while True:
            # Not a stream, which may be behind: what follows must be about the line as it is now.
            status = _status(stub)
            watch.grains = max(watch.grains, status.verification.grains)
            if status.state == pb.LINE_STATE_HALTED:
                _answer(stub, status.halt, watch)
            elif status.state == pb.LINE_STATE_COMPLETE:
                return watch
            elif left and status.step > steps:
                left -= 1
                watch.reducer.append(_spoil_a_mean(stub, file))
            elif status.step > steps:
                stub.Drain(pb.DrainRequest(operator=Path(__file__).name))
            time.sleep(0.01)


def _answer(stub: CoordinatorStub, halt: HaltEvidence, watch: Watch) -> None:
    if watch.halts and watch.halts[-1].id == halt.id:
        return
    watch.halts.append(halt)
    answer = pb.ClearHaltRequest(
        halt_id=halt.id, answer=pb.HALT_ANSWER_RETRY, operator=Path(__file__).name
    )
    stub.ClearHalt(answer)


def _spoil_a_mean(stub: CoordinatorStub, file: Path) -> tuple[int, int]:
    """Has the reducer make a mean wrong; returns the line's step before, and when that showed."""
    before = _status(stub).step
    file.touch()
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        status = _status(stub)
        if not file.exists() and (
            status.state == pb.LINE_STATE_HALTED or status.step > before + CLEAN
        ):
            return before, status.step
        time.sleep(0.01)
    raise RuntimeError("the reducer made no mean")


def _status(stub: CoordinatorStub) -> pb.LineStatus:
    return stub.GetStatus(pb.GetStatusRequest()).status


# -------------------------------------------------------------------------- what became of them


@dataclass
class _Tally:
    """What became of the faults of one place."""

    injected: int = 0
    masked: int = 0
    """They changed no bit of any result that is used."""
    before: int = 0
    """The line halted in their step, before its commit."""
    after: int = 0
    """It halted in the step after: what an optimizer makes wrong is seen when it is used."""
    missed: int = 0
    right: int = 0
    """Convicted: who was wrong."""
    wrong: int = 0
    """Convicted: somebody else."""
    nobody: int = 0
    """The line halted, and convicted nobody."""

    @property
    def row(self) -> dict[str, int]:
        """The counts, for JSON."""
        return dict(vars(self))


def _counted(
    workers: int,
    faults: Sequence[Fault],
    watch: Watch,
    alone: dict[str, Any],
    seen: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    tallies = {place: _Tally() for place in (*PLACES, REDUCER)}
    halts = {each.step: each for each in reversed(watch.halts)}
    explained: set[int] = set()
    apart = False
    for fault in faults:
        mine = seen[fault.slot]
        if not mine["did"].get(str(fault.step)):
            continue  # It had no chance, such as an addition that the share does not have.
        tally = tallies[fault.place]
        tally.injected += 1
        late = fault.place == "optimizer"
        halt = halts.get(fault.step + late)
        if halt is None:
            apart = apart or _apart(fault.step + 1, alone, seen)
            tally.missed += apart
            tally.masked += not apart
            continue
        explained.add(fault.step + late)
        tally.before += not late
        tally.after += late
        _judge(tally, halt, mine["worker"])
    for before, after in watch.reducer:
        tally = tallies[REDUCER]
        tally.injected += 1
        found = [step for step in range(before, after + 3) if step in halts]
        explained.update(found)
        tally.before += bool(found)
        named = any("reducer added wrong" in halts[step].message for step in found)
        tally.right += named
        tally.nobody += bool(found) and not named
        tally.wrong += any(halts[step].HasField("worker") for step in found)
        tally.missed += not found
    alarms = [each for each in watch.halts if each.step not in explained]
    return {
        "workers": workers,
        "places": {place: tally.row for place, tally in tallies.items()},
        "halts": Counter(HaltReason.Name(each.reason) for each in watch.halts),
        "false_alarms": [f"step {each.step}: {each.message}" for each in alarms],
        "verified_grains": watch.grains,
        "right_after_all": not _apart(int(max(alone["weights"], key=int)), alone, seen),
    }


def _apart(step: int, alone: dict[str, Any], seen: Sequence[dict[str, Any]]) -> bool:
    """Whether the weights after a step are not those of the script that is right."""
    return any(each["weights"].get(str(step)) != alone["weights"].get(str(step)) for each in seen)


def _judge(tally: _Tally, halt: HaltEvidence, guilty: int) -> None:
    if not halt.HasField("worker"):
        tally.nobody += 1
    elif halt.worker == guilty:
        tally.right += 1
    else:
        tally.wrong += 1


def main() -> None:
    """Measures each number of workers, and prints a row for each place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3, 4], metavar="N")
    parser.add_argument("--faults", type=int, default=340, help="of each number of workers")
    parser.add_argument("--reducer-faults", type=int, default=10)
    parser.add_argument("--clean-steps", type=int, default=0, help="more steps without a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine, rows = describe_machine(), []
    for workers in options.workers:
        began = time.perf_counter()
        row = measure(
            workers, options.faults, options.reducer_faults, options.seed, options.clean_steps
        )
        row["took_s"] = round(time.perf_counter() - began, 1)
        rows.append(row)
        print(f"{workers} workers, {row['took_s']} s; {dict(row['halts'])}")
        for place, counts in row["places"].items():
            print(f"  {place:11}", *(f"{name} {number}" for name, number in counts.items()))
        print(f"  false alarms: {len(row['false_alarms'])} {row['false_alarms'][:3]}", flush=True)
        if options.json:  # After each, so that nothing is lost.
            figures = {"machine": machine, "rows": rows}
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
