"""Storms among process groups. ANDON_STORMS is the number of seeds; a test's id has its seed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from andon.host.shared_dir import DEFAULT_SHARED_DIR
from chaos.peer_plan import FAULTS, plan_storm
from chaos.peer_rank import RankSpec
from integration.harness import Service, clean_environment
from integration.nursery import Child, nursery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "ANDON_STORMS" in os.environ
SEEDS = range(1, 1 + int(os.environ.get("ANDON_STORMS", "1")))
IN_SHORT = ("none", "kill")
WINDOWS = 40 if LONG else 8
SCRIPT = Path(__file__).with_name("peer_rank.py")
LEASE_S, LONG_LEASE_S = 4, 15
"""A busy machine may keep a rank from its reports for seconds; only a frozen one waits for it."""
PATIENCE_S = 60
"""Far beyond what any end may take: a rank that has not ended by then hangs."""
MEMORIES = ("shared", "lanes", "two hosts")


@contextmanager
def started(
    folder: Path, seed: int, ranks: int, fault: str, memory: str, backend: str = "andon"
) -> Iterator[list[Child]]:
    """A service and the ranks of a storm; what still runs at the end is killed."""
    lease_s = LEASE_S if fault == "freeze" else LONG_LEASE_S
    with (
        TemporaryDirectory(dir=DEFAULT_SHARED_DIR, prefix="andon-storm-") as shared,
        Service(folder / "run", ranks, "--liveness", str(lease_s)) as service,
    ):
        children = []
        for rank in range(ranks):
            spec = RankSpec(
                seed=seed,
                ranks=ranks,
                windows=WINDOWS,
                fault=fault,
                rank=rank,
                backend=backend,
                store=str(folder / "store"),
                service=service.process.pid,
                log=str(folder / f"{rank}.windows"),
            )
            written = folder / f"{rank}.json"
            written.write_text(json.dumps(asdict(spec)))
            host = Path(shared) / (str(rank % 2) if memory == "two hosts" else "0")
            host.mkdir(exist_ok=True)
            environment = clean_environment(
                ANDON_ADDRESS=service.address,
                ANDON_SHARED_DIR="off" if memory == "lanes" else str(host),
                GLOO_SOCKET_IFNAME="lo",
            )
            output = folder / f"{rank}.log"
            children.append(
                nursery("trainer").start([str(SCRIPT), str(written)], environment, output)
            )
        try:
            yield children
        finally:
            for child in children:
                child.kill()
                child.wait()
        left = [str(each) for each in Path(shared).rglob("*") if not each.is_dir()]
        assert left == []


def await_frozen(child: Child) -> None:
    """Waits until a rank has stopped itself."""
    deadline = time.monotonic() + PATIENCE_S
    while "T (stopped)" not in Path(f"/proc/{child.pid}/status").read_text():
        assert time.monotonic() < deadline, "the rank never came to its fault"
        time.sleep(0.01)


@pytest.mark.parametrize("fault", FAULTS if LONG else IN_SHORT)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_of_calls_has_no_wrong_result_and_ends_everywhere(
    tmp_path: Path, seed: int, fault: str
) -> None:
    number = seed + FAULTS.index(fault)
    ranks, memory = 3 + number % 3, MEMORIES[number % len(MEMORIES)]
    culprit = plan_storm(seed, ranks, WINDOWS, fault).fault.rank

    with started(tmp_path, seed, ranks, fault, memory) as children:
        survivors = [
            rank for rank in range(ranks) if rank != culprit or fault == "kill the service"
        ]
        if fault == "freeze":
            await_frozen(children[culprit])
        codes = [children[rank].wait(PATIENCE_S) for rank in survivors]
        said = [children[rank].output.read_text() for rank in survivors]
        if fault == "freeze":
            children[culprit].send_signal(signal.SIGCONT)
        of_culprit = children[culprit].wait(PATIENCE_S)

    if fault == "none":
        assert [*codes, of_culprit] == [0] * (ranks), said
        return
    assert codes == [5] * len(survivors), said
    names = "coordinator" if fault == "kill the service" else rf"rank {culprit}\b"
    for text in said:
        assert re.search(names, text), text
