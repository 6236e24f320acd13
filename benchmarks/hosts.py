"""How long does an exchange between hosts with slow links take, compared with Gloo's ring?

It makes four hosts on this machine: network namespaces, each with a link of 1 Gbit/s each way to a
switch (`tc tbf`). Each host has one worker. Either each host has a reducer and they share the
model, or one reducer on the first host averages all of it. Workers alternate between an Andon
exchange and `all_reduce` of the same numbers over Gloo (float32, its ring algorithm), in the same
namespaces: ours, theirs, ours, theirs. Ours is a whole step: assignment, value gate, averages,
durable record, commit. Bytes on the wire are the interfaces' own counters, headers included, for
each link and direction.

It needs root and iproute2.

    sudo python benchmarks/hosts.py --json benchmarks/results/hosts.json
    sudo python benchmarks/hosts.py --mbit 100      # if a few cores can't keep up with 1 Gbit/s
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts_network import LINK, Network, NoNetwork, network
from machine import describe_machine

from andon.host.shared_dir import DEFAULT_SHARED_DIR

__all__ = ["WARM_UP", "WorkerSpec"]

HOSTS = 4
WARM_UP = 2
"""Pairs before the first one that counts."""
_PATIENCE_S = 1800
_LINE_PORT, _REDUCER_PORT, _STORE_PORT = 7070, 7071, 7072


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    reducers: int
    """One for each host; or 1, for a star."""
    encoding: str
    mib: int
    mbit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Case):
    """The parameters of one worker process."""

    pairs: int
    address: str
    run_id: str
    rank: int
    hosts: int
    store: str
    """The rendezvous address of the Gloo group, as host:port."""
    shared_dir: str
    """The folder for shared memory; no other host has it."""


def main() -> int:
    """Measures each requested case, and prints a row for it."""
    options = _arguments()
    rows: list[dict[str, Any]] = []
    machine = {**describe_machine(), **_circumstances(options)}
    print(
        f"{'reducers':>8}  {'encoding':10}{'MiB':>5}{'Mbit/s':>8}{'ours':>11}{'Gloo':>11}", end=""
    )
    print(f"{'ratio':>7}  of single pairs   sent a link (of D)   cores busy", flush=True)
    try:
        with network(HOSTS, options.mbit) as hosts:
            for name in options.cases:
                reducers, encoding = CASES[name]
                case = Case(
                    reducers=reducers, encoding=encoding, mib=options.mib, mbit=options.mbit
                )
                rows.append(measure(hosts, case, options.pairs))
                print(_line(rows[-1]), flush=True)
    except NoNetwork as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


CASES = {
    "reducers-float32": (HOSTS, "float32"),
    "reducers-bfloat16": (HOSTS, "bfloat16"),
    "star-float32": (1, "float32"),
}


def measure(hosts: Network, case: Case, pairs: int) -> dict[str, Any]:
    """Runs the services and workers of one case; returns its row.

    `ratio` is Gloo's median over ours: above 1, ours is faster. `spread` is the smallest and the
    largest ratio of a pair. `sent` and `received` are the median numbers of bytes over each host's
    link in one exchange, as multiples of the model's size in float32.
    """
    with (
        TemporaryDirectory() as folder,
        TemporaryDirectory(dir=DEFAULT_SHARED_DIR) as shared,
        ExitStack() as stack,
    ):
        shared_dirs = [Path(shared) / f"host-{number}" for number in range(hosts.count)]
        for each in shared_dirs:
            each.mkdir()
        run_id = stack.enter_context(_serving(hosts, case, Path(folder), shared_dirs))
        specs = [
            WorkerSpec(
                **asdict(case),
                pairs=pairs,
                address=f"{hosts.address(0)}:{_LINE_PORT}",
                run_id=run_id,
                rank=rank,
                hosts=hosts.count,
                store=f"{hosts.address(0)}:{_STORE_PORT}",
                shared_dir=str(shared_dirs[rank]),
            )
            for rank in range(hosts.count)
        ]
        processes = [stack.enter_context(_worker(hosts, spec)) for spec in specs]
        seen = [_output(process) for process in processes]
    sides = {side: [each[side] for each in seen] for side in ("ours", "gloo")}
    took = {side: _slowest(runs) for side, runs in sides.items()}
    ratios = [theirs / mine for mine, theirs in zip(took["ours"], took["gloo"], strict=True)]
    ours_s, gloo_s = (statistics.median(took[side]) for side in ("ours", "gloo"))
    model_bytes = case.mib * 2**20
    row: dict[str, Any] = {
        **asdict(case),
        "ours_s": round(ours_s, 4),
        "gloo_s": round(gloo_s, 4),
        "ratio": round(gloo_s / ours_s, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    for side, runs in sides.items():
        row[f"{side}_sent"] = _links(runs, "sent", model_bytes)
        row[f"{side}_received"] = _links(runs, "received", model_bytes)
        busy = [exchange["busy"] for exchange in runs[0]]
        row[f"{side}_cores_busy"] = round(statistics.median(busy), 3)
    return row


Runs = list[dict[str, float]]
"""One worker's exchanges: seconds, bytes sent and received, and the busy fraction of the cores."""


def _slowest(workers: Sequence[Runs]) -> list[float]:
    return [max(run["seconds"] for run in runs) for runs in zip(*workers, strict=True)]


def _links(workers: Sequence[Runs], what: str, model_bytes: int) -> list[float]:
    return [
        round(statistics.median(run[what] for run in runs) / model_bytes, 4) for runs in workers
    ]


@contextmanager
def _serving(
    hosts: Network, case: Case, folder: Path, shared_dirs: Sequence[Path]
) -> Iterator[str]:
    """Serves a line on the first host, and reducers on the others; returns the run's id."""
    secret = folder / "secret"
    secret.write_text("a secret of the benchmark only, on links that nobody else has")
    shared = ["--bind", "0.0.0.0", "--insecure", "--metrics-port", "0", "--announce"]
    shared += ["--secret-file", str(secret)]
    line = ["--workers", str(hosts.count), "--reducers", str(case.reducers)]
    line += ["--encoding", case.encoding, "--run-dir", str(folder / "run")]
    line += ["--port", str(_LINE_PORT)]
    with ExitStack() as stack:
        errors = [folder / f"service-{number}.err" for number in range(hosts.count)]

        def start(number: int, flags: list[str]) -> dict[str, Any]:
            shared_dir = shared_dirs[number]
            return stack.enter_context(
                _service(hosts, number, [*shared, *flags], errors[number], shared_dir)
            )

        told = start(0, line)
        for number in range(1, case.reducers):
            own = ["--role", "reducer", "--port", str(_REDUCER_PORT)]
            own += ["--coordinator", f"{hosts.address(0)}:{_LINE_PORT}"]
            start(number, own)
        yield str(told["run_id"])


@contextmanager
def _service(
    hosts: Network, number: int, flags: list[str], errors: Path, shared_dir: Path
) -> Iterator[dict[str, Any]]:
    """Runs `andon serve` on a host; returns what it announced."""
    environment = {**os.environ, "ANDON_SHARED_DIR": str(shared_dir)}
    command = [*hosts.inside(number), sys.executable, "-m", "andon_cli", "serve", *flags]
    with (
        errors.open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a service did not start: {errors.read_text()}")
            yield json.loads(line)
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def _worker(hosts: Network, spec: WorkerSpec) -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("hosts_worker.py"))
    process = subprocess.Popen(
        [*hosts.inside(spec.rank), sys.executable, script, json.dumps(asdict(spec))],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warnings that addresses have no names
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _output(process: subprocess.Popen[str]) -> dict[str, Runs]:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"a worker exited with code {process.returncode}: see its output")
    seen: dict[str, Runs] = json.loads(output)
    return seen


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    cores = len(os.sched_getaffinity(0))
    return {
        "pairs": options.pairs,
        "warm_up_pairs": WARM_UP,
        "notes": [
            f"{HOSTS} network namespaces of one machine, {options.mbit:g} Mbit/s each way (tc tbf)",
            "ours is a whole step with control messages, value gate and durable record",
            "Gloo exchanges float32 in every row",
            "a worker shares memory with the reducer of its host, if there is one a host and the "
            "encoding is float32; no folder is shared between hosts",
            f"all hosts share {cores} cores: {HOSTS} workers with Gloo, and as many processes more "
            "with a reducer a host; where the cores are busy they are the limit, not the links",
        ],
    }


def _line(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    ours, gloo = max(row["ours_sent"]), max(row["gloo_sent"])
    return (
        f"{row['reducers']:8}  {row['encoding']:10}{row['mib']:5}{row['mbit']:8g}"
        f"{row['ours_s'] * 1e3:8.0f} ms{row['gloo_s'] * 1e3:8.0f} ms{row['ratio']:7.2f}"
        f"  {low:.2f} to {high:.2f}      {ours:.2f}, Gloo {gloo:.2f}"
        f"      {row['ours_cores_busy']:.0%}, Gloo {row['gloo_cores_busy']:.0%}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=1000, help="of each link (default: 1000)")
    parser.add_argument("--mib", type=int, default=64, help="the model in float32 (default: 64)")
    parser.add_argument("--pairs", type=int, default=7, help="exchanges of each side that count")
    parser.add_argument(
        "--cases", type=_cases, default=list(CASES), help=f"of: {','.join(CASES)} (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pairs < 1 or options.mib < 1 or options.mbit <= 0:
        parser.error("--pairs and --mib must be at least 1, and --mbit above 0")
    return options


def _cases(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
