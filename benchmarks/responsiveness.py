"""Do gradients delay control messages? Measures heartbeats and halts during rounds.

It starts a service and protocol workers that exchange `--mib` MiB per round, again and again. Each
worker also sends a heartbeat every 20 ms and times the answer. The benchmark pulls the cord during
rounds, and each worker records when it learns of the halt. Times are from one machine's monotonic
clock.

    python benchmarks/responsiveness.py --json benchmarks/results/responsiveness.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from machine import describe_machine
from protocol_worker import ProtocolWorker, block_sizes
from service import serving

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub

SAMPLES_EACH = 4


class TimedWorker(ProtocolWorker):
    """A protocol worker that times the answers to its heartbeats, and records halts."""

    heartbeat_every_s = 0.02

    def __init__(self, address: str, run_id: str, slot: int, mib: int, global_batch: int) -> None:
        """Starts without measurements."""
        super().__init__(address, run_id, slot, mib, global_batch)
        self.round_trips: list[float] = []
        self.halts: dict[int, float] = {}
        self._sent_at: dict[int, float] = {}

    def beat(self, sequence: int) -> None:
        """Records when a heartbeat is sent."""
        self._sent_at[sequence] = time.monotonic()

    def heard(self, response: pb.TrainResponse) -> None:
        """Records the answer to a heartbeat, or a halt."""
        now = time.monotonic()
        kind = response.WhichOneof("message")
        if kind == "heartbeat_answer":
            sent = self._sent_at.pop(response.heartbeat_answer.sequence)
            if self.exchanging:
                self.round_trips.append(now - sent)
        elif kind == "halt":
            self.halts[response.halt.evidence.id] = now


def work(address: str, run_id: str, slot: int, options: argparse.Namespace) -> dict[str, Any]:
    """Works until the service ends; returns the measurements."""
    gradients = [np.ones(size, dtype=np.float32) for size in block_sizes(options.mib)]
    batch = SAMPLES_EACH * options.workers
    with TimedWorker(address, run_id, slot, options.mib, batch) as worker:
        while worker.step(gradients):
            pass
    return {
        "round_trips_s": worker.round_trips,
        "halts": worker.halts,
        "rounds": worker.steps,
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the service and its workers; returns the figures."""
    with serving(folder, options.workers) as service:
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--mib", str(options.mib)),
                    *("--workers", str(options.workers)),
                    *("--worker", service.address, service.run_id, str(slot)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for slot in range(options.workers)
        ]
        pulled = _pull_cord(service.address, options.halts)
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    seen = [json.loads(output) for output in outputs]
    halts = [told - pulled[int(halt)] for each in seen for halt, told in each["halts"].items()]
    return {
        "workers": options.workers,
        "mib": options.mib,
        "rounds": seen[0]["rounds"],
        "heartbeat_round_trip_ms": _summary([t for each in seen for t in each["round_trips_s"]]),
        "halt_delivery_ms": _summary(halts),
    }


def _pull_cord(address: str, halts: int) -> dict[int, float]:
    """Pulls the cord during rounds; returns the times by the halts' ids."""
    pulled: dict[int, float] = {}
    with grpc.insecure_channel(address) as channel:
        stub = CoordinatorStub(channel)
        step = _await_step(stub, 1)  # one round to warm up
        for _ in range(halts):
            # A new round starts directly after a step, so its gradients are in flight now.
            step = _await_step(stub, step + 1)
            time.sleep(0.1)
            before = time.monotonic()
            halt = stub.PullCord(pb.PullCordRequest(reason="benchmark")).halt
            pulled[halt.id] = before
            stub.ClearHalt(pb.ClearHaltRequest(halt_id=halt.id, answer=pb.HALT_ANSWER_RETRY))
    return pulled


def _await_step(stub: CoordinatorStub, step: int) -> int:
    while (now := int(stub.GetStatus(pb.GetStatusRequest()).status.step)) < step:
        time.sleep(0.01)
    return now


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median": round(statistics.median(seconds) * 1e3, 2),
        "worst": round(max(seconds) * 1e3, 2),
    }


def main() -> None:
    """Runs the measurement, or one of its workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="float32 gradients a round, MiB")
    parser.add_argument("--halts", type=int, default=10, help="how often the cord is pulled")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        address, run_id, slot = options.worker
        print(json.dumps(work(address, run_id, int(slot), options)))
        return
    with TemporaryDirectory() as folder:
        figures = {"machine": describe_machine(), **measure(options, Path(folder))}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
