"""What processor time does a state take on its way, as bytes and through a file?

A reducer, a sender and a receiver are a process each, as on a line on one host. The state goes from
one to the other as bytes and through a file in turns. What counts is each process's processor time:
on a line, it is taken from those that train. The wall time depends on what else the machine does.
The service's is the part that no priority makes polite: it averages with the same threads.

    python benchmarks/giving.py --mb 100 --pairs 7 --json benchmarks/results/giving.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import grpc
import numpy as np
from machine import describe_machine
from prometheus_client import CollectorRegistry

from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon.protocol import tokens
from andon.protocol.records import Key
from andon_reducer.app import build_reducer
from andon_reducer.config import ReducerConfig
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import PartialState, Ticket, receive_state, send_state

_RUN, _SECRET = "7f3a", b"a secret of this benchmark alone"
_WAYS = ("bytes", "file")
_ENDS = ("sender", "receiver")


def _nothing(_so_far: int, _whole: int) -> None:
    """Shows nobody."""


def _nobody(_act: Callable[[], object] | None) -> None:
    """Watches calls without ending any of them."""


def _end(role: str, address: str, folder: str, megabytes: float, turns: int) -> None:
    """One end: moves the state once a turn, and prints what that took."""
    state = np.random.default_rng(1).bytes(int(megabytes * 1e6))
    for turn in range(turns):
        ticket = Ticket(
            address=address,
            run_id=_RUN,
            worker=_ENDS.index(role),
            session_token=tokens.session_token(_SECRET, _RUN, _ENDS.index(role)),
            transfer_id=turn + 1,
            head=Key(1, 1),
            shared_dir=Path(folder) if turn % 2 else None,
        )
        sys.stdin.readline()
        began = time.process_time()
        if role == "sender":
            send_state(ticket, PackedState([state]), _nothing, _nobody)
        else:
            assert receive_state(ticket, PartialState(), _nothing, _nobody) == state
        print(time.process_time() - began, flush=True)


async def _measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each turn, bytes and file alternately."""
    app = build_reducer(ReducerConfig(), CollectorRegistry(), _SECRET)
    server = grpc.aio.server()
    app.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    turns = 2 * (options.pairs + 1)
    rows = []
    with TemporaryDirectory(dir=DEFAULT_SHARED_DIR) as folder:
        given = ["--at", f"127.0.0.1:{port}", "--folder", folder, "--mb", str(options.mb)]
        ends = {role: _started(role, *given, "--turns", str(turns)) for role in _ENDS}
        for _ in range(turns):
            began, processor_began = time.perf_counter(), time.process_time()
            took = await asyncio.gather(*[asyncio.to_thread(_turn, each) for each in ends.values()])
            row = dict(zip(_ENDS, took, strict=True))
            row["service"] = time.process_time() - processor_began
            rows.append({**row, "all": sum(row.values()), "wall": time.perf_counter() - began})
        for each in ends.values():
            each.communicate()
    await app.close()
    await server.stop(5)
    return rows[2:]  # The first pair opens connections and gets memory.


def _started(role: str, *given: str) -> subprocess.Popen[str]:
    """A process that is one end."""
    command = [sys.executable, __file__, "--end", role, *given]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _turn(end: subprocess.Popen[str]) -> float:
    """Lets an end move the state; returns its processor time."""
    pipes: tuple[IO[str] | None, IO[str] | None] = end.stdin, end.stdout
    assert pipes[0] is not None
    assert pipes[1] is not None
    pipes[0].write("go\n")
    pipes[0].flush()
    return float(pipes[1].readline())


def main() -> None:
    """Measures, and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=100.0, help="of state (default: 100)")
    parser.add_argument("--pairs", type=int, default=7, help="(default: 7)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    for hidden in ("--end", "--at", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.end is not None:
        _end(options.end, options.at, options.folder, options.mb, options.turns)
        return
    figures: dict[str, Any] = {"machine": describe_machine(), "mb": options.mb}
    rows = asyncio.run(_measure(options))
    for number, way in enumerate(_WAYS):
        own = rows[number::2]
        figures[way] = [{name: round(value, 4) for name, value in row.items()} for row in own]
        for name in own[0]:
            values = [row[name] for row in own]
            print(f"{way:5} {name:8} {statistics.median(values):.3f} s, {min(values):.3f} at least")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
