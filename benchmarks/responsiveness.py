"""Does bulk delay control? Heartbeats and halts while gradients are being reduced.

Starts a service and protocol workers that exchange `--mib` MiB a round, over and over. Each worker
sends a heartbeat every 20 ms beside it and times the answer; the cord is pulled in the midst of
rounds, and each worker notes when it is told. Times are of one machine's monotonic clock.

    python benchmarks/responsiveness.py --json benchmarks/results/responsiveness.json
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from machine import describe_machine

from andon import wire
from andon.layout import Block, BlockKind, Component, Layout
from andon.messages import OpenRound
from andon.records import Key
from andon.terms import Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.control import open_channel
from andon_trainer.exchange.events import (
    Assigned,
    AveragesComplete,
    Committed,
    Dismissed,
    Halted,
    TransferAsked,
    Voided,
)
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.translation import event_from

BLOCK_ELEMENTS = 2**20
HEARTBEAT_EVERY_S = 0.02


class ProtocolWorker:
    """A worker without a model: it exchanges made-up gradients until it is told to stop."""

    def __init__(self, address: str, run_id: str, slot: int, mib: int) -> None:
        """Is worker `slot` of run `run_id`, with a model of `mib` MiB."""
        count = mib * 2**20 // 4 // BLOCK_ELEMENTS
        blocks = [
            Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (BLOCK_ELEMENTS,)),))
            for i in range(count)
        ]
        self.layout = Layout(tuple(blocks))
        self.address, self.run_id, self.slot = address, run_id, slot
        self.outgoing: queue.SimpleQueue[pb.TrainRequest | None] = queue.SimpleQueue()
        self.inbox = Inbox()
        self.sent_at: dict[int, float] = {}
        self.round_trips: list[float] = []
        self.halts: dict[int, float] = {}
        self.rounds = 0
        self.head: Key | None = None
        self.exchanging = False

    def run(self) -> dict[str, Any]:
        """Works until the run is shut down; what it timed."""
        join = pb.Join(
            run_id=self.run_id,
            launch_slot=self.slot,
            incarnation=self.slot + 1,
            protocol_version=1,
            layout=wire.layout_to_proto(self.layout),
            plan=wire.plan_to_proto(RunPlan(global_batch=8, dataset_size=2**40)),
        )
        self.outgoing.put(pb.TrainRequest(join=join))
        with open_channel(self.address) as channel:
            self.responses = CoordinatorStub(channel).Train(self._requests())
            accepted = next(self.responses).join_accepted
            threading.Thread(target=self._read, daemon=True).start()
            threading.Thread(target=self._beat, daemon=True).start()
            self._work(accepted)
        return {
            "round_trips_s": self.round_trips,
            "halts": self.halts,
            "rounds": self.rounds,
        }

    def _requests(self) -> Iterator[pb.TrainRequest]:
        while (message := self.outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for response in self.responses:
                now = time.monotonic()
                kind = response.WhichOneof("message")
                if kind == "heartbeat_answer":
                    sent = self.sent_at.pop(response.heartbeat_answer.sequence)
                    if self.exchanging:
                        self.round_trips.append(now - sent)
                elif kind == "halt":
                    self.halts[response.halt.evidence.id] = now
                event = event_from(response)
                if event is not None:
                    self.inbox.put(event)
        except grpc.RpcError:
            pass  # the service ended: that is how this benchmark ends
        self.inbox.put(Dismissed("the service ended"))
        self.outgoing.put(None)

    def _beat(self) -> None:
        for sequence in range(1, 2**31):
            self.sent_at[sequence] = time.monotonic()
            self.outgoing.put(pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=sequence)))
            time.sleep(HEARTBEAT_EVERY_S)

    def _work(self, accepted: pb.JoinAccepted) -> None:
        exchange = WireExchange(self.layout, Policy(), self.inbox)
        gradient = np.ones(BLOCK_ELEMENTS, dtype=np.float32)
        opening = OpenRound(self.run_id, accepted.worker, accepted.session_token)
        while True:
            match self.inbox.take():
                case TransferAsked() as asked:
                    self._move(asked)
                case Committed() as commit:
                    self.exchanging = False
                    self.head = commit.record.key
                    self.rounds += commit.record.step > 0
                    self._ask()
                case Assigned() as assigned:
                    if not exchange.is_open:
                        exchange.open(self.address, opening)
                    self.exchanging = True
                    exchange.begin(assigned, 4.0)
                    for block in range(len(self.layout.blocks)):
                        exchange.submit(block, gradient)
                case AveragesComplete() as complete:
                    self._ready(complete)
                case Halted() | Voided():
                    self.exchanging = False
                    exchange.end()
                case Dismissed():
                    exchange.close()
                    return

    def _move(self, asked: TransferAsked) -> None:
        """There are no weights: the head is all that moves."""
        if not asked.sends:
            self.head = asked.head
        report = pb.StateReport(transfer_id=asked.transfer_id, head=wire.key_to_proto(self.head))
        self.outgoing.put(pb.TrainRequest(state_report=report))
        self._ask()

    def _ask(self) -> None:
        work = pb.RequestWork(head=wire.key_to_proto(self.head))
        self.outgoing.put(pb.TrainRequest(request_work=work))

    def _ready(self, event: AveragesComplete) -> None:
        ready = pb.StepReady(
            key=wire.key_to_proto(event.key),
            loss_sum=4.0,
            weight=4.0,
            samples=4,
            total_weight=event.total_weight,
            world_size=event.world_size,
        )
        self.outgoing.put(pb.TrainRequest(step_ready=ready))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the service and its workers; the figures."""
    serve = [sys.executable, "-m", "andon_cli", "serve", "--bind", "127.0.0.1", "--port", "0"]
    serve += ["--metrics-port", "0", "--workers", str(options.workers), "--announce"]
    serve += ["--run-dir", str(folder / "run")]
    with (folder / "service.err").open("w") as errors:
        service = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert service.stdout is not None
    announced = json.loads(service.stdout.readline())
    address, run_id = announced["address"], announced["run_id"]
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--mib", str(options.mib)),
                *("--worker", address, run_id, str(slot)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for slot in range(options.workers)
    ]
    pulled: dict[int, float] = {}
    try:
        with grpc.insecure_channel(address) as channel:
            stub = CoordinatorStub(channel)
            step = _await_step(stub, 1)  # one round to warm up
            for _ in range(options.halts):
                # A new round is assigned at once after a step; its bulk is on its way then.
                step = _await_step(stub, step + 1)
                time.sleep(0.1)
                before = time.monotonic()
                halt = stub.PullCord(pb.PullCordRequest(reason="benchmark")).halt
                pulled[halt.id] = before
                stub.ClearHalt(pb.ClearHaltRequest(halt_id=halt.id, answer=pb.HALT_ANSWER_RETRY))
    finally:
        service.terminate()
        outputs = [worker.communicate(timeout=60)[0] for worker in workers]
        service.wait(60)
    seen = [json.loads(output) for output in outputs]
    halts = [told - pulled[int(halt)] for each in seen for halt, told in each["halts"].items()]
    return {
        "workers": options.workers,
        "mib": options.mib,
        "rounds": seen[0]["rounds"],
        "heartbeat_round_trip_ms": _summary([t for each in seen for t in each["round_trips_s"]]),
        "halt_delivery_ms": _summary(halts),
    }


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
    """Measures, or is one of the workers that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="float32 gradients a round, MiB")
    parser.add_argument("--halts", type=int, default=10, help="how often the cord is pulled")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", nargs=3, metavar=("ADDRESS", "RUN", "SLOT"))
    options = parser.parse_args()
    if options.worker:
        address, run_id, slot = options.worker
        print(json.dumps(ProtocolWorker(address, run_id, int(slot), options.mib).run()))
        return
    with TemporaryDirectory() as folder:
        figures = {"machine": describe_machine(), **measure(options, Path(folder))}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
