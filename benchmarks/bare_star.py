"""What does gRPC itself cost? A star with nothing of Andon's in it, beside Gloo's all-reduce.

An asyncio gRPC server receives chunks of 2 MiB from its workers, averages the chunks with the same
number, and sends the mean to all workers. It has no protocol, no checks and no journal. This is the
least that a reducer in Python can do over gRPC, so it is the baseline for Andon's wire path. Gloo
averages the same amount of data in the same processes; the two alternate: star, Gloo, star, Gloo.

    python benchmarks/bare_star.py --json benchmarks/results/bare-star.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from machine import describe_machine
from processor import processor_s
from sides import mean_by_gloo

CHUNK_ELEMENTS = 2**19
WARM_UP = 2
"""Pairs before the first that counts."""
_HEAD_BYTES = 8
METHOD = "/star.Star/Exchange"
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_PATIENCE_S = 600

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    rank: int
    workers: int
    mib: int
    pairs: int
    port: int
    server_pid: int
    rendezvous: str
    """The rendezvous file of the Gloo group."""


def main() -> None:
    """Measures each requested number of workers, and prints a row for it."""
    measure_all(parser_of(__doc__).parse_args(), measure)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command line of a bare star."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=256, help="of float32")
    parser.add_argument("--pairs", type=int, default=7, help="exchanges of each side that count")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def measure_all(
    options: argparse.Namespace, measure: Callable[[int, int, int], dict[str, Any]]
) -> None:
    """Prints, and perhaps writes, a row for each number of workers.

    `measure` makes it of the workers, the MiB and the pairs.
    """
    machine, rows = describe_machine(), []
    for workers in options.workers:
        rows.append(measure(workers, options.mib, options.pairs))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        figures = {"machine": {**machine, "pairs": options.pairs}, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(workers: int, mib: int, pairs: int) -> dict[str, Any]:
    """One row: medians, their ratio (above 1: the star is faster), and CPU time."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(workers, there), daemon=True)
    server.start()
    port = here.recv()
    with TemporaryDirectory() as folder, spawn.Pool(workers) as pool:
        specs = [
            WorkerSpec(
                rank=rank,
                workers=workers,
                mib=mib,
                pairs=pairs,
                port=port,
                server_pid=server.pid or 0,
                rendezvous=str(Path(folder) / "gloo"),
            )
            for rank in range(workers)
        ]
        seen = pool.map_async(_work, specs, chunksize=1).get(_PATIENCE_S)
    server.kill()
    server.join()
    star, gloo = (
        [max(times) for times in zip(*(each[side] for each in seen), strict=True)]
        for side in ("star_s", "gloo_s")
    )
    ratios = [theirs / ours for ours, theirs in zip(star, gloo, strict=True)]
    return {
        "workers": workers,
        "mib": mib,
        "star_s": round(statistics.median(star), 4),
        "gloo_s": round(statistics.median(gloo), 4),
        "ratio": round(statistics.median(gloo) / statistics.median(star), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "server_cpu_s": round(statistics.mean(seen[0]["server_cpu_s"]), 4),
        "workers_cpu_s": round(sum(statistics.mean(each["star_cpu_s"]) for each in seen), 4),
    }


def serve(workers: int, told: Connection) -> None:
    """Runs the server of the star; `told` gets its port."""
    asyncio.run(_star(workers, told))


async def _star(workers: int, told: Connection) -> None:
    """Averages arriving chunks and sends the mean to all workers, until the process is killed."""
    queues: list[asyncio.Queue[bytes]] = []
    chunks: defaultdict[bytes, list[Floats]] = defaultdict(list)
    share = np.float32(1 / workers)

    async def take(requests: AsyncIterator[bytes]) -> None:
        async for message in requests:
            head = message[:_HEAD_BYTES]
            chunks[head].append(np.frombuffer(message, np.float32, offset=_HEAD_BYTES))
            if len(chunks[head]) < workers:
                continue
            first, *others = chunks.pop(head)
            mean = share * first
            for other in others:
                mean += share * other
            answer = b"".join((head, mean.data))
            for each in queues:
                each.put_nowait(answer)

    async def exchange(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        queues.append(answers)
        taking = asyncio.create_task(take(requests))
        try:
            while True:
                await context.write(await answers.get())
        finally:
            taking.cancel()

    server = grpc.aio.server(options=OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(exchange)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("star.Star", {"Exchange": handler}),)
    )
    told.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def _work(spec: WorkerSpec) -> dict[str, list[float]]:
    return asyncio.run(_exchange(spec))


async def _exchange(spec: WorkerSpec) -> dict[str, list[float]]:
    """One worker's exchanges: star and Gloo alternate."""
    torch.set_num_threads(1)
    rendezvous = f"file://{spec.rendezvous}"
    dist.init_process_group("gloo", rendezvous, rank=spec.rank, world_size=spec.workers)
    random = np.random.default_rng(spec.rank)
    gradient = random.standard_normal(spec.mib * 2**18, dtype=np.float32)
    means, tensor = np.empty_like(gradient), torch.empty(gradient.size)
    seen: dict[str, list[float]] = defaultdict(list)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{spec.port}", options=OPTIONS) as channel:
        call: Any = channel.stream_stream(METHOD)()
        for _ in range(WARM_UP + spec.pairs):
            dist.barrier()
            before = processor_s(spec.server_pid) or 0.0
            cpu, began = time.process_time(), time.perf_counter()
            await by_star(call, gradient, means)
            seen["star_s"].append(time.perf_counter() - began)
            seen["star_cpu_s"].append(time.process_time() - cpu)
            dist.barrier()
            seen["server_cpu_s"].append((processor_s(spec.server_pid) or 0.0) - before)
            tensor.copy_(torch.from_numpy(gradient))
            dist.barrier()
            began = time.perf_counter()
            mean_by_gloo(tensor)
            seen["gloo_s"].append(time.perf_counter() - began)
        np.testing.assert_allclose(means, tensor.numpy(), rtol=1e-4, atol=1e-6)
        dist.barrier()
        call.cancel()
    dist.destroy_process_group()
    return {side: times[WARM_UP:] for side, times in seen.items()}


async def by_star(call: Any, gradient: Floats, means: Floats) -> None:
    """Sends a worker's gradient over the call, and receives the means."""
    starts = range(0, gradient.size, CHUNK_ELEMENTS)

    async def send() -> None:
        for start in starts:
            part = gradient[start : start + CHUNK_ELEMENTS]
            await call.write(b"".join((start.to_bytes(_HEAD_BYTES, "little"), part.data)))

    sending = asyncio.create_task(send())
    for _ in starts:
        message = await call.read()
        start = int.from_bytes(message[:_HEAD_BYTES], "little")
        mean = np.frombuffer(message, np.float32, offset=_HEAD_BYTES)
        means[start : start + mean.size] = mean
    await sending


if __name__ == "__main__":
    main()
