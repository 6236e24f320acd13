"""What does a worker that comes back over a network cost the others, and how quick is its state?

Three hosts on this machine: network namespaces, each with a link to a switch (`tc tbf`) and a
worker; the first has the service, too. The worker of the last one gets a real SIGKILL, and is
started again: it joins, and needs the line's state, which is as large as `--mb` says (a layer and
AdamW's moments), while the others train on.

A pause is how much longer than the median step of as many workers the others' longest wait for a
commit was, from the newcomer's Join until it has been on ten rosters in a row. `worst_before_s` is
the same of as many steps before, in which nothing happened, and `pause_of_state_s` that of the
steps in which the state was on its way. `share` is the rate at which the state moved, headers
included, of what the links on its way had left: their speed without everything else that they
carried meanwhile, which is mostly the averages.

It needs root and iproute2.

    sudo python benchmarks/joining_hosts.py --json benchmarks/results/joining-hosts.json
    sudo python benchmarks/joining_hosts.py --newcomer-mbit 1.6 --mb 17 --pace 1 --steps 2 \
        --pairs 1 --patience 900 --flags="--schedule local --local-steps 60 --overlap"

With `--reducers 3` each host has a reducer, as is best where the network is the limit. With
`--newcomer-mbit` the link of the newcomer's host is slower from the SIGKILL on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts_network import LINK, Network, NoNetwork, network
from local_run import Commits, commits_in, events_in, is_whole, median_steps, width_of
from machine import describe_machine
from service import SECRET, announced, serving

from andon_coordinator.core.run_events import RunEventKind

_SCRIPT = Path(__file__).with_name("joining_worker.py")
_HOSTS = 3
_SHARE = 4
"""Samples of a worker in a step."""
_VICTIM = 2
_ON_WIRE = 1514 / 1448
"""Bytes of full frames over those of a TCP stream in them."""
_SAMPLE_S = 0.02
_CONDITIONS = ("mbit", "newcomer_mbit", "reducers", "mb", "pace", "pairs", "flags", "transfer")
"""The flags that the figures depend on."""


@dataclass(frozen=True, slots=True)
class Links:
    """The hosts' links, and what they had carried at each moment."""

    seen: list[tuple[float, tuple[tuple[int, int], ...]]]
    """Of each sample: when, and bytes sent and received by each host."""

    def between(self, began: float, ended: float) -> list[tuple[int, int]]:
        """Bytes that each host sent and received between two moments."""
        first = max((each for each in self.seen if each[0] <= began), default=self.seen[0])
        last = next((each for each in self.seen if each[0] >= ended), self.seen[-1])
        return [
            (sent - sent_before, received - received_before)
            for (sent_before, received_before), (sent, received) in zip(
                first[1], last[1], strict=True
            )
        ]


@dataclass(slots=True)
class Hosts:
    """The line on its hosts. Its files are in `folder`."""

    hosts: Network
    folder: Path
    options: argparse.Namespace
    address: str = ""
    run_id: str = ""
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _anchors: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """A process on each host, whose view of its link is read."""

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Starts the worker of a host."""
        environment = {
            **os.environ,
            "ANDON_ADDRESS": self.address,
            "ANDON_RUN_ID": self.run_id,
            "ANDON_INSECURE": "1",
            # On one machine all hosts have one folder, through which a state would go.
            "ANDON_SHARED_DIR": "off",
            "JOINING_PACE_S": str(self.options.pace / _SHARE),
            "JOINING_BATCH": str(_SHARE * _HOSTS),
            "JOINING_WIDTH": str(width_of(self.options.mb)),
            "JOINING_TRANSFER": "1" if self.options.transfer else "",
            "JOINING_STATES": str(self.folder / "states.jsonl"),
            "JOINING_HOST": str(number),
        }
        out = (self.folder / f"worker-{number}.txt").open("ab")
        command = [*self.hosts.inside(number), sys.executable, str(_SCRIPT)]
        with out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def __enter__(self) -> Hosts:
        """Starts all workers."""
        self.workers = [self.start(number) for number in range(_HOSTS)]
        self._anchors = [
            subprocess.Popen([*self.hosts.inside(number), "sleep", "infinity"])
            for number in range(_HOSTS)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        for process in (*self.workers, *self._anchors):
            process.kill()
            process.wait()
        if self.options.verbose:
            for file in sorted(self.folder.glob("*.*")):
                if file.suffix in {".txt", ".err"}:
                    print(f"--- {file.name}\n{file.read_text('utf-8', 'replace')}")

    @property
    def newcomer_mbit(self) -> float:
        """The rate of the link of the newcomer's host."""
        rate: float = self.options.newcomer_mbit or self.options.mbit
        return rate

    def carried(self) -> tuple[tuple[int, int], ...]:
        """Bytes that each host has sent and received over its link."""
        return tuple(_link_bytes(each.pid) for each in self._anchors)

    @property
    def journal(self) -> Path:
        """Where its records are."""
        return self.folder / "run" / "journal.sqlite"

    def await_whole(self, since: float, steps: int, *, must: bool = True) -> Commits:
        """Waits until all workers were on so many rosters in a row; returns all records.

        If they `must` not be, it waits for as long, and returns what there is.
        """
        deadline = time.monotonic() + self.options.patience
        while True:
            commits = commits_in(self.journal)
            if is_whole(commits, since, steps, _HOSTS):
                return commits
            if time.monotonic() > deadline:
                if not must:
                    return commits
                raise TimeoutError("the line is not whole: see --verbose")
            time.sleep(0.1)


def _link_bytes(pid: int) -> tuple[int, int]:
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    return 0, 0


class _Sampler:
    """Reads what the links carried, a few times in each step."""

    def __init__(self, line: Hosts) -> None:
        self._line = line
        self._over = threading.Event()
        self._seen: list[tuple[float, tuple[tuple[int, int], ...]]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Links:
        self._thread.start()
        return Links(self._seen)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self._seen.append((time.time(), self._line.carried()))


def measure(line: Hosts) -> dict[str, Any]:
    """Kills the last host's worker, and starts it again; returns what that cost the others."""
    steps = line.options.steps
    victim = line.workers[_VICTIM]
    struck_at = time.time()
    with _Sampler(line) as links:
        if line.options.newcomer_mbit:
            line.hosts.limit(_VICTIM, line.options.newcomer_mbit)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        line.workers[_VICTIM] = line.start(_VICTIM)
        deadline = time.monotonic() + line.options.patience
        while not (joined := events_in(line.journal, RunEventKind.JOINED, struck_at)):
            if time.monotonic() > deadline:
                raise TimeoutError("the newcomer does not join: see --verbose")
            time.sleep(0.05)
        joined_at = joined[0].at_unix_s
        commits = line.await_whole(joined_at, steps, must=False)
    waits = [(at, at - earlier, size) for (earlier, _), (at, size) in pairwise(commits)]
    before = [wait for at, wait, _ in waits if at <= struck_at][-40:]
    usual, alike = statistics.median(before), median_steps(commits)
    paused = [(at, wait, wait - alike.get(size, usual)) for at, wait, size in waits]
    after = [pause for at, _, pause in paused if at > joined_at]
    back = next((at for at, size in commits if at > joined_at and size == _HOSTS), None)
    time.sleep(_SAMPLE_S)
    texts = (line.folder / "states.jsonl").read_text().splitlines()
    notes = [json.loads(text) for text in texts]
    donors = {each["transfer"]: each["host"] for each in notes if each["role"] == "from"}
    states = [each for each in notes if each["role"] == "to" and each["began"] > struck_at]
    moving = [(each["asked"], each["ended"]) for each in states]
    beside = [
        pause
        for at, wait, pause in paused
        if at > joined_at and any(at > began and at - wait < ended for began, ended in moving)
    ]
    return {
        "usual_step_s": round(usual, 4),
        "worst_before_s": round(max(before[-len(after) :]) - usual, 4),
        "pause_of_return_s": round(max(after), 4),
        "pause_of_state_s": round(max(beside, default=0.0), 4),
        "steps_of_return": len(after),
        "back_after_s": None if back is None else round(back - joined_at, 3),
        "states": [
            _state_moved(line, links, each, donors.get(each["transfer"], 0)) for each in states
        ],
    }


def _state_moved(line: Hosts, links: Links, state: dict[str, float], donor: int) -> dict[str, Any]:
    """How quickly a state moved, from its first piece to its last."""
    began, ended = state["began"], state["ended"]
    on_wire = state["bytes"] * _ON_WIRE
    carried = links.between(began, ended)
    # From the donor, which is on the first host or not, through the reducer on the first one.
    ways = [(carried[0][0], line.options.mbit), (carried[_VICTIM][1], line.newcomer_mbit)]
    if donor:
        ways += [(way, line.options.mbit) for way in (carried[donor][0], carried[0][1])]
    row = {
        "donor": donor,
        "mb": round(state["bytes"] / 1e6, 2),
        "seconds": round(ended - began, 3),
        "whole_s": round(ended - state["asked"], 3),
        "mbit_s": round(state["bytes"] * 8e-6 / (ended - began), 2),
    }
    if line.options.reducers > 1:
        return row  # It may have gone through any of them.
    left = min(
        mbit * 1e6 / 8 * (ended - began) - max(0.0, carried - on_wire) for carried, mbit in ways
    )
    return {**row, "share": round(on_wire / left, 3)}


def main() -> int:
    """Measures, and prints a row for each return."""
    options = _arguments()
    # So that namespaces and processes go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: dict[str, Any] = {
        "machine": describe_machine(),
        **{name: vars(options)[name] for name in _CONDITIONS},
    }
    rows = []
    try:
        with network(_HOSTS, options.mbit) as hosts, TemporaryDirectory() as folder:
            rows = _returns(hosts, Path(folder), options)
    except NoNetwork as error:
        print(f"joining_hosts.py: {error}", file=sys.stderr)
        return 1
    figures["load_after"] = round(os.getloadavg()[0], 2)
    figures["returns"] = rows
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _returns(hosts: Network, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    secret = folder / "secret"
    secret.write_text(SECRET)
    common = ["--insecure", "--shared-dir", "off", "--secret-file", str(secret)]
    flags = [*common, "--advertise", hosts.address(0), "--reducers", str(options.reducers)]
    flags += options.flags.split()
    rows = []
    with (
        serving(folder, _HOSTS, flags, inside=hosts.inside(0), bind="0.0.0.0") as served,
        ExitStack() as others,
    ):
        address = f"{hosts.address(0)}:{served.address.rpartition(':')[2]}"
        for number in range(1, options.reducers):
            command = [*hosts.inside(number), sys.executable, "-m", "andon_cli", "serve"]
            command += ["--role", "reducer", "--bind", "0.0.0.0", "--port", "0", "--announce"]
            command += ["--metrics-port", "0", "--advertise", hosts.address(number)]
            command += ["--coordinator", address, *common]
            others.enter_context(announced(command, folder / f"reducer-{number}.err"))
        with Hosts(hosts, folder, options, address, served.run_id) as line:
            line.await_whole(0.0, options.steps)
            for _ in range(options.pairs):
                rows.append(measure(line))
                print(json.dumps(rows[-1]), flush=True)
                if rows[-1]["back_after_s"] is None:
                    break  # It never got in.
                line.await_whole(time.time(), options.steps)
    return rows


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="of a link (default: 1000)")
    parser.add_argument("--newcomer-mbit", type=float, help="of the newcomer's, from the kill on")
    parser.add_argument("--reducers", type=int, default=1, help="on so many hosts (default: 1)")
    parser.add_argument("--mb", type=float, default=100.0, help="of state (default: 100)")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds in a batch (default: 1)")
    parser.add_argument("--pairs", type=int, default=5, help="returns (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="rosters in a row (default: 10)")
    parser.add_argument("--flags", default="", help="more flags of `andon serve`")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for a return")
    parser.add_argument("--transfer", action="store_true", help="workers that can't learn")
    parser.add_argument("--verbose", action="store_true", help="print the processes' output")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
