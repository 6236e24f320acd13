r"""Does `--verify` find a worker that computes wrong finite numbers, and is anybody wronged?

Lines of two, three and four workers train a small model with `--verify 1.0`. In every second step
one bit of one number is flipped in one worker, as a defective processor might: in an activation, in
the gradient of one, in a sum along the tree, in what is sent, in the averages that came, or in a
weight after the optimizer's step; at last also in the reducer's mean. When the line halts, the
evidence is noted, and the step is tried again without the fault. So all faults are independent of
each other. A script that runs alone, and is right, says which faults changed nothing: rounding
swallows some, and those are no wrong arithmetic.

With `--reducers 2` the mean is made by two reducers in processes of their own, in turn by a wrong
one: each must be named by its address. A long run may be cut into slices of other seeds, whose rows
`--append` adds to the same file.

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
_SMALL_CHUNKS = ("--chunk-elements", "32")
"""The model has 163 elements, and each reducer is to have some."""
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Reducer:
    """One that makes a mean wrong once `file` is there."""

    file: Path
    address: str = ""
    """Empty: the service's own one."""

    @property
    def name(self) -> str:
        """What a halt calls it."""
        return f"the reducer at {self.address}" if self.address else "the service's own reducer"


@dataclass(frozen=True)
class Spoiled:
    """A mean that was made wrong."""

    name: str
    """Whose it was."""
    halts: int
    """How many there had been before."""


@dataclass
class Watch:
    """What a line's status has shown, halt by halt; each halt was answered with RETRY."""

    halts: list[HaltEvidence] = field(default_factory=list)
    reducer: list[Spoiled] = field(default_factory=list)
    grains: int = 0
    """Grains that two workers computed alike."""


def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one line, and counts what became of its faults."""
    count = options.faults
    faults = plan_of(count, workers, options.seed)
    steps = CLEAN + 2 * count + CLEAN + options.clean_steps
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        plan = folder / "plan.json"
        write_plan(faults, plan)
        spec = {"plan": str(plan), "steps": steps}
        endless = {**spec, "steps": None}
        alone = _finish([stack.enter_context(_worker(folder, {**spec, "slot": None}))])[0]
        os.environ["ANDON_WRONG_FILE"] = str(folder / "wrong")
        program = (
            sys.executable,
            str(_HERE / "wrong_service.py"),
        )
        flags = (*_FLAGS, *_with_reducers(folder, options.reducers))
        line = stack.enter_context(serving(folder, workers, flags, program=program))
        reducers = [
            stack.enter_context(_reducer(folder, number, line))
            for number in range(options.reducers)
        ] or [Reducer(folder / "wrong")]
        started = [
            stack.enter_context(_worker(folder, {**endless, "slot": slot}, line, workers))
            for slot in range(workers)
        ]
        watch = _follow(line, steps, options.reducer_faults, reducers)
        seen = _finish(started)
    row = _counted(workers, faults, watch, alone, seen)
    return {**row, "reducers": options.reducers, "seed": options.seed}


def _with_reducers(folder: Path, count: int) -> tuple[str, ...]:
    """The flags of a service that reduces nothing itself, as others do; none without them."""
    if not count:
        return ()
    secret = folder / "secret"
    secret.write_text("a secret of more than sixteen bytes")
    secret.chmod(0o600)
    flags = "--role", "coordinator", "--reducers", str(count), "--secret-file", str(secret)
    return *flags, *_SMALL_CHUNKS


@contextmanager
def _reducer(folder: Path, number: int, line: Service) -> Iterator[Reducer]:
    """A reducer in a process of its own, which errs when it is told to."""
    file = folder / f"wrong-{number}"
    command = [sys.executable, str(_HERE / "wrong_service.py"), "serve", "--role", "reducer"]
    command += ["--coordinator", line.address, "--secret-file", str(folder / "secret")]
    command += ["--port", "0", "--metrics-port", "0", "--announce", *_SMALL_CHUNKS]
    with (folder / f"reducer-{number}.err").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "ANDON_WRONG_FILE": str(file)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        yield Reducer(file, json.loads(process.stdout.readline())["address"])
    finally:
        process.kill()
        process.wait()


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


def _follow(line: Service, steps: int, reducer_faults: int, reducers: Sequence[Reducer]) -> Watch:
    """Answers all halts; after `steps` steps reducers are told to err, and the run is ended."""
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
                chosen = reducers[left % len(reducers)]
                watch.reducer.append(Spoiled(chosen.name, len(watch.halts)))
                _spoil_a_mean(stub, chosen.file)
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


def _spoil_a_mean(stub: CoordinatorStub, file: Path) -> None:
    """Has a reducer make a mean wrong, and waits until that shows, or never will."""
    before = _status(stub).step
    file.touch()
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        status = _status(stub)
        if not file.exists() and (
            status.state == pb.LINE_STATE_HALTED or status.step > before + CLEAN
        ):
            return
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
    element: int = 0
    """The halt named the first element that differs."""

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
    ends = [*(each.halts for each in watch.reducer[1:]), len(watch.halts)]
    for each, end in zip(watch.reducer, ends, strict=False):
        tally = tallies[REDUCER]
        tally.injected += 1
        found = watch.halts[each.halts : end]
        explained.update(halt.step for halt in found)
        tally.before += bool(found)
        said = [halt.message for halt in found]
        right = any(message.startswith(f"{each.name} added wrong") for message in said)
        other = any("added wrong" in message for message in said) and not right
        tally.right += right
        tally.element += any(halt.element for halt in found)
        tally.nobody += bool(found) and not right and not other
        tally.wrong += other or any(halt.HasField("worker") for halt in found)
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
    tally.element += bool(halt.element)
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
    parser.add_argument("--reducers", type=int, default=0, help="in processes of their own")
    parser.add_argument("--clean-steps", type=int, default=0, help="more steps without a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    options = parser.parse_args()
    machine, rows = describe_machine(), []
    if options.append and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    for workers in options.workers:
        began = time.perf_counter()
        row = measure(workers, options)
        row["took_s"] = round(time.perf_counter() - began, 1)
        row["load"] = round(os.getloadavg()[0], 1)
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
