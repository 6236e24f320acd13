"""What do plain sockets cost? The star of `bare_star.py` over TCP, beside gRPC's and Gloo's.

The server has two threads for each worker, each with a connection of its own: one receives chunks
of 2 MiB into buffers that it uses again and again, the other sends the means. Whichever thread
brings the last chunk of a number averages it, with the compiled mean. Each worker sends from its
gradients and receives to where the means belong, so nothing is copied in user space. This is the
least that a reducer in Python can do over TCP, as `bare_star.py` is the least over gRPC.

The three sides alternate in the same processes: lane, gRPC, Gloo. `cpu_s` of a side is the
processor time of all its processes, a mean; `halved` says whether the lane takes at most half of
what gRPC takes.

    python benchmarks/bare_lane.py --json benchmarks/results/bare-lane.json
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import socket
import statistics
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bare_star
import grpc
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from bare_star import CHUNK_ELEMENTS, WARM_UP
from processor import processor_s
from sides import mean_by_gloo

from andon.protocol.encoding import fused

SIDES = ("lane", "grpc", "gloo")
_HEAD = struct.Struct("<QQ")
"""A frame's head: the chunk's first element, and the payload's bytes."""
_PAST_CACHES = False
"""The mean is sent at once, so it may stay in the caches."""
_PATIENCE_S = 600

Floats = npt.NDArray[np.float32]
_Mean = tuple[int, Floats, "_Chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    rank: int
    workers: int
    mib: int
    pairs: int
    lane_port: int
    grpc_port: int
    lane_pid: int
    grpc_pid: int
    rendezvous: str
    """The rendezvous file of the Gloo group."""


def main() -> None:
    """Measures each requested number of workers, and prints a row for it."""
    parser = bare_star.parser_of(__doc__)
    options = parser.parse_args()
    if fused is None:
        parser.error("the compiled mean is missing: install with a C compiler")
    bare_star.measure_all(options, measure)


def measure(workers: int, mib: int, pairs: int) -> dict[str, Any]:
    """One row: medians of the sides, their ratios to Gloo's (above 1: faster), processor time."""
    spawn = multiprocessing.get_context("spawn")
    lane, lane_port = _started(spawn, serve_lane, workers)
    star, grpc_port = _started(spawn, bare_star.serve, workers)
    with TemporaryDirectory() as folder, spawn.Pool(workers) as pool:
        specs = [
            WorkerSpec(
                rank=rank,
                workers=workers,
                mib=mib,
                pairs=pairs,
                lane_port=lane_port,
                grpc_port=grpc_port,
                lane_pid=lane.pid or 0,
                grpc_pid=star.pid or 0,
                rendezvous=str(Path(folder) / "gloo"),
            )
            for rank in range(workers)
        ]
        seen = pool.map_async(_work, specs, chunksize=1).get(_PATIENCE_S)
    for server in (lane, star):
        server.kill()
        server.join()
    seconds = {
        side: statistics.median(map(max, zip(*(each[f"{side}_s"] for each in seen), strict=True)))
        for side in SIDES
    }
    cpu = {
        side: sum(statistics.mean(each[f"{side}_cpu_s"]) for each in seen)
        + statistics.mean(seen[0].get(f"{side}_server_s", [0.0]))
        for side in SIDES
    }
    return {
        "workers": workers,
        "mib": mib,
        **{f"{side}_s": round(seconds[side], 4) for side in SIDES},
        **{f"{side}_cpu_s": round(cpu[side], 4) for side in SIDES},
        "lane_ratio": round(seconds["gloo"] / seconds["lane"], 4),
        "grpc_ratio": round(seconds["gloo"] / seconds["grpc"], 4),
        "lane_cpu_of_grpc": round(cpu["lane"] / cpu["grpc"], 4),
        "halved": cpu["lane"] <= cpu["grpc"] / 2,
    }


def _started(spawn: Any, serve: Callable[[int, Connection], None], workers: int) -> tuple[Any, int]:
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(workers, there), daemon=True)
    server.start()
    return server, here.recv()


@dataclass(slots=True)
class _Chunk:
    """The contributions to one chunk, and how many workers still have to get its mean."""

    parts: list[Floats] = field(default_factory=list)
    unsent: int = 0


class _Star:
    """What the server's threads share."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._chunks: defaultdict[int, _Chunk] = defaultdict(_Chunk)
        self._buffers: queue.SimpleQueue[Floats] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.means: list[queue.SimpleQueue[_Mean]] = []
        """For each worker: the chunk's first element, its mean, and the chunk that it is of."""

    def receive(self, up: socket.socket) -> None:
        """Takes one worker's chunks, until it is gone."""
        head = bytearray(_HEAD.size)
        while receive_exactly(up, memoryview(head)):
            start, size = _HEAD.unpack(head)
            part = self._buffer()[: size // 4]
            receive_exactly(up, part.view(np.uint8).data)
            with self._lock:
                chunk = self._chunks[start]
                chunk.parts.append(part)
                if len(chunk.parts) < self._workers:
                    continue
                del self._chunks[start]
            mean = self._buffer()[: part.size]
            shares = (1 / self._workers,) * self._workers
            assert fused is not None
            fused.weighted_mean(mean, tuple(chunk.parts), shares, _PAST_CACHES)
            for each in chunk.parts:
                self._buffers.put(each)
            chunk.unsent = self._workers
            for means in self.means:
                means.put((start, mean, chunk))

    def send(self, down: socket.socket, means: queue.SimpleQueue[_Mean]) -> None:
        """Sends the means to one worker, until the process is killed."""
        while True:
            start, mean, chunk = means.get()
            send_all(down, start, mean)
            with self._lock:
                chunk.unsent -= 1
                if not chunk.unsent:
                    self._buffers.put(mean)

    def _buffer(self) -> Floats:
        try:
            found = self._buffers.get_nowait()
        except queue.Empty:
            return np.empty(CHUNK_ELEMENTS, np.float32)
        return found if found.size == CHUNK_ELEMENTS else np.empty(CHUNK_ELEMENTS, np.float32)


def serve_lane(workers: int, told: Connection) -> None:
    """Averages arriving chunks and sends the mean to all workers, until the process is killed."""
    listening = socket.create_server(("127.0.0.1", 0))
    told.send(listening.getsockname()[1])
    star = _Star(workers)
    star.means = [queue.SimpleQueue() for _ in range(workers)]
    for means in star.means:
        up, down = listening.accept()[0], listening.accept()[0]
        down.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=star.receive, args=(up,), daemon=True).start()
        threading.Thread(target=star.send, args=(down, means), daemon=True).start()
    threading.Event().wait()


def receive_exactly(source: socket.socket, into: memoryview) -> bool:
    """Fills a buffer from a socket; False if the other end closed it first."""
    while into.nbytes:
        received = source.recv_into(into, 0, socket.MSG_WAITALL)
        if not received:
            return False
        into = into[received:]
    return True


def send_all(to: socket.socket, start: int, numbers: Floats) -> None:
    """Sends a frame: its head and its payload, with as few calls as the kernel allows."""
    payload = numbers.view(np.uint8).data
    sent = to.sendmsg((_HEAD.pack(start, payload.nbytes), payload)) - _HEAD.size
    while sent < payload.nbytes:
        sent += to.send(payload[sent:])


def _work(spec: WorkerSpec) -> dict[str, list[float]]:
    return asyncio.run(_exchange(spec))


async def _exchange(spec: WorkerSpec) -> dict[str, list[float]]:
    """One worker's exchanges: the three sides alternate."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.workers
    )
    random = np.random.default_rng(spec.rank)
    gradient = random.standard_normal(spec.mib * 2**18, dtype=np.float32)
    means, tensor = np.zeros_like(gradient), torch.zeros(gradient.size)
    seen: dict[str, list[float]] = defaultdict(list)
    for rank in range(spec.workers):  # One after the other: the server pairs what it accepts.
        if rank == spec.rank:
            up, down = (socket.create_connection(("127.0.0.1", spec.lane_port)) for _ in range(2))
        dist.barrier()
    up.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = bare_star.OPTIONS
    async with grpc.aio.insecure_channel(f"127.0.0.1:{spec.grpc_port}", options=options) as channel:
        call: Any = channel.stream_stream(bare_star.METHOD)()
        for _ in range(WARM_UP + spec.pairs):
            with _Timed(seen, "lane", spec.lane_pid):
                _by_lane(up, down, gradient, means)
            with _Timed(seen, "grpc", spec.grpc_pid):
                await bare_star.by_star(call, gradient, means)
            tensor.copy_(torch.from_numpy(gradient))
            with _Timed(seen, "gloo", 0):
                mean_by_gloo(tensor)
        np.testing.assert_allclose(means, tensor.numpy(), rtol=1e-4, atol=1e-6)
        _by_lane(up, down, gradient, means)
        np.testing.assert_allclose(means, tensor.numpy(), rtol=1e-4, atol=1e-6)
        dist.barrier()
        call.cancel()
    dist.destroy_process_group()
    return {side: times[WARM_UP:] for side, times in seen.items()}


class _Timed:
    """Times what is done inside it, which all workers begin together."""

    def __init__(self, seen: dict[str, list[float]], side: str, server_pid: int) -> None:
        self._seen, self._side, self._pid = seen, side, server_pid

    def __enter__(self) -> None:
        dist.barrier()
        self._server = processor_s(self._pid) if self._pid else None
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seen[f"{self._side}_s"].append(time.perf_counter() - self._began)
        self._seen[f"{self._side}_cpu_s"].append(time.process_time() - self._cpu)
        dist.barrier()
        if self._server is not None:
            after = processor_s(self._pid)
            assert after is not None
            self._seen[f"{self._side}_server_s"].append(after - self._server)


def _by_lane(up: socket.socket, down: socket.socket, gradient: Floats, means: Floats) -> None:
    starts = range(0, gradient.size, CHUNK_ELEMENTS)

    def send() -> None:
        for start in starts:
            send_all(up, start, gradient[start : start + CHUNK_ELEMENTS])

    sending = threading.Thread(target=send)
    sending.start()
    head = bytearray(_HEAD.size)
    for _ in starts:
        receive_exactly(down, memoryview(head))
        start, size = _HEAD.unpack(head)
        receive_exactly(down, means[start : start + size // 4].view(np.uint8).data)
    sending.join()


if __name__ == "__main__":
    main()
