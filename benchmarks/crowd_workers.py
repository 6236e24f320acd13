"""Many scripted workers in one process: what a worker says to a coordinator and to a reducer.

Started by crowd.py. Each worker has a connection of its own, a Train stream and a Reduce stream. It
speaks the protocol and computes nothing: its block is a few numbers, the same in every step. All
join with the head of a run whose service lost its journal, so nobody needs another one's state.

When all have joined it prints `joined`. When the first of them has applied the record of a step, it
prints that step and the time. At the end it prints its own processor time and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any

import grpc
import grpc.aio
import numpy as np

from andon.host.jitter import jittered
from andon.host.keepalive import Keepalive
from andon.protocol.capabilities import WORKER_CAPABILITIES
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from andon.protocol.messages import AveragedBlock, BlockGradient, OpenRound, RoundOpened
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon.wire.frames import frame_request, parse_response

ELEMENTS = 64
LAYOUT = Layout((Block(BlockKind.OTHER, "block", (Component("weight", (ELEMENTS,)),)),))
_TRAIN, _REDUCE = "/andon.v1.Coordinator/Train", "/andon.v1.Reducer/Reduce"
_NUMBERS = memoryview(np.ones(ELEMENTS, np.float32).tobytes())
_FIRST_WAIT_S, _GROWTH, _LONGEST_WAIT_S = 0.05, 1.5, 2.0
"""The protocol's waits between two tries to join."""


class Crowd:
    """The workers of one process."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Workers `first` to `first + count` of a line of `workers`."""
        self.options = options
        self.head = Key(options.term, 1)
        batch = 2 * options.workers
        self.plan = RunPlan(global_batch=batch, dataset_size=batch * 1_000_000)
        self.heartbeats = 0
        self.refused = 0
        """Tries to join that the service refused, since all come at the same moment."""

    async def run(self) -> None:
        """Joins all, and takes part in so many steps."""
        first, count = self.options.first, self.options.count
        workers = [ScriptedWorker(self, slot) for slot in range(first, first + count)]
        await asyncio.gather(*(each.join() for each in workers))
        print(json.dumps({"joined": count, "refused": self.refused}), flush=True)
        await asyncio.gather(*(each.train(self.options.steps) for each in workers))
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(
            json.dumps(
                {
                    "cpu_s": used.ru_utime + used.ru_stime,
                    "memory_mib": used.ru_maxrss // 1024,
                    "heartbeats": self.heartbeats,
                }
            ),
            flush=True,
        )
        # The others may still read their last commits: the parent ends all together.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class ScriptedWorker:
    """One worker."""

    def __init__(self, crowd: Crowd, slot: int) -> None:
        """In slot `slot`; it does nothing yet."""
        self.crowd, self.slot = crowd, slot
        self.head = crowd.head
        self.channel: Any = None
        self.train_call: Any = None
        self.reduce_call: Any = None
        self.beating: Any = None
        self.writing = asyncio.Lock()

    async def join(self) -> None:
        """Joins, and opens its stream to the reducer; tries again as the protocol says."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await self._try_to_join()
                return
            except grpc.aio.AioRpcError:
                self.crowd.refused += 1
                await self.channel.close()
            await asyncio.sleep(jittered(wait_s))
            wait_s = min(wait_s * _GROWTH, _LONGEST_WAIT_S)

    async def _try_to_join(self) -> None:
        self.channel = grpc.aio.insecure_channel(
            self.crowd.options.address,
            options=[
                # Without it all channels of this process would share one connection.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                *Keepalive().client_options(),
            ],
        )
        self.train_call = self.channel.stream_stream(_TRAIN)()
        await self._say(self._join_message())
        accepted = (await self._hear("join_accepted")).join_accepted
        assert accepted.join_status == pb.JOIN_STATUS_IN_SYNC, accepted.join_status
        opening = OpenRound(accepted.run_id, self.slot, accepted.session_token, WORKER_CAPABILITIES)
        self.reduce_call = self.channel.stream_stream(_REDUCE)()
        await self.reduce_call.write(frame_request(opening))
        opened = parse_response(await self.reduce_call.read())
        assert isinstance(opened, RoundOpened), opened
        self.beating = asyncio.create_task(self._beat(accepted.liveness.heartbeat_s))

    async def train(self, steps: int) -> None:
        """Takes part in so many steps."""
        work: pb.ShardAssignment | None = None
        for step in range(steps):
            if work is None:
                asks = pb.RequestWork(head=conversion.key_to_proto(self.head))
                await self._say(pb.TrainRequest(request_work=asks))
                work = (await self._hear("shard_assignment")).shard_assignment
            await self._exchange(work)
            samples = sum(each.stop - each.start for each in work.positions)
            ready = pb.StepReady(
                key=work.key,
                loss_sum=float(samples),
                weight=float(samples),
                samples=samples,
                total_weight=float(work.batch.stop - work.batch.start),
                world_size=work.world_size,
                timings=pb.Timings(busy_s=0.01, computed=samples, exchange_s=0.01, wait_s=0.01),
                # The next assignment comes with the commit, but for the last one.
                next=pb.RequestWork() if step + 1 < steps else None,
            )
            await self._say(pb.TrainRequest(step_ready=ready))
            committed = (await self._hear("step_committed")).step_committed
            self.head = conversion.key_from_proto(committed.record.key)
            work = committed.assignment if committed.HasField("assignment") else None
            if self.slot == self.crowd.options.first:
                print(json.dumps({"step": step, "at": time.monotonic()}), flush=True)

    async def _exchange(self, work: pb.ShardAssignment) -> None:
        key = conversion.key_from_proto(work.key)
        contribution = BlockGradient(
            key=key,
            rank=work.rank,
            world_size=work.world_size,
            block=0,
            offset=0,
            count=ELEMENTS,
            weight=2.0,
            payload=_NUMBERS,
        )
        await self.reduce_call.write(frame_request(contribution))
        answer = parse_response(await self.reduce_call.read())
        assert isinstance(answer, AveragedBlock), answer

    async def _beat(self, every_s: float) -> None:
        sequence = 0
        # Spread, as the starts of real workers are.
        await asyncio.sleep(every_s * (self.slot % 97) / 97)
        while True:
            sequence += 1
            beat = pb.Heartbeat(sequence=sequence, activity=pb.ACTIVITY_COMPUTING)
            await self._say(pb.TrainRequest(heartbeat=beat))
            self.crowd.heartbeats += 1
            await asyncio.sleep(every_s)

    async def _say(self, message: pb.TrainRequest) -> None:
        # gRPC allows one write at a time, and heartbeats come from their own task.
        async with self.writing:
            await self.train_call.write(message.SerializeToString())

    async def _hear(self, case: str) -> pb.TrainResponse:
        while True:
            data = await self.train_call.read()
            if data is grpc.aio.EOF:
                raise grpc.aio.AioRpcError(
                    await self.train_call.code(),
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    f"worker {self.slot}: {await self.train_call.details()}",
                )
            message = pb.TrainResponse.FromString(data)
            if message.WhichOneof("message") == case:
                return message
            if message.WhichOneof("message") not in ("heartbeat_answer",):
                raise RuntimeError(f"worker {self.slot} waits for {case}, and got {message}")

    def _join_message(self) -> pb.TrainRequest:
        options = self.crowd.options
        join = pb.Join(
            run_id=options.run,
            node_id=f"host-{self.slot // 8}",
            launch_slot=self.slot,
            incarnation=self.slot + 1,
            devices=[pb.Device(kind="cpu", name="scripted")],
            backend="cpu",
            capabilities=WORKER_CAPABILITIES,
            protocol_version=PROTOCOL_VERSION,
            layout=layouts.layout_to_proto(LAYOUT),
            plan=conversion.plan_to_proto(self.crowd.plan),
            head=conversion.key_to_proto(self.head),
            cursor=conversion.cursor_to_proto(Cursor(0, 0)),
            step=1,
            greatest_term=self.head.term,
            metrics_address=f"127.0.0.1:{20_000 + self.slot}",
        )
        return pb.TrainRequest(join=join)


def main() -> None:
    """Takes part in a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--term", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    asyncio.run(Crowd(parser.parse_args()).run())


if __name__ == "__main__":
    main()
