"""Loading processes and gRPC: the processes start first, and never inherit a channel."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch.utils.data import DataLoader, Dataset, TensorDataset

from andon.protocol.order import Order
from andon.protocol.records import Cursor
from andon.protocol.shards import cursor_after, next_batch, shard_of
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.exchange.channels import close_in_children, open_channel

pytestmark = pytest.mark.integration

SIZE, SEED = 50, 3


SERVER = """
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc

server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
input()
server.stop(0).wait()
"""


@pytest.fixture
def address() -> Iterator[str]:
    """A server in a separate process, like a coordinator; the test's process must fork first."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.communicate("stop\n")


def shares(world_size: int, start: Cursor) -> Iterator[Share]:
    cursor = start
    while True:
        batch = next_batch(cursor, 8, SIZE)
        yield Share(cursor.epoch, (shard_of(batch, 0, world_size),))
        cursor = cursor_after(cursor, batch, SIZE)


def following(world_size: int, start: Cursor) -> Iterator[Share]:
    return islice(shares(world_size, start), 1, None)


def sockets(process: int | str) -> set[str]:
    """The inode numbers of a process's sockets."""
    held = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            held.add(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed meanwhile
    return {name for name in held if name.startswith("socket:")}


def check(ask: Callable[..., health_pb2.HealthCheckResponse]) -> None:
    answer = ask(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("persistent", [True, False])
def test_c_shard_001_loading_processes_outlive_roster_changes_and_inherit_no_channel(
    address: str, persistent: bool
) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(SIZE)),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        persistent_workers=persistent,
    )
    feeder = LoaderFeeder(loader, SEED, 2)
    feeder.open()
    loading = {child.pid for child in multiprocessing.active_children()}
    before = sockets("self")
    cursor = Cursor(0, 0)

    with open_channel(address) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        check(ask)
        opened = sockets("self") - before
        for step in range(50):
            world_size = 1 + step // 5 % 3
            share = next(shares(world_size, cursor))
            seen: list[int] = []
            for each in feeder.batches(share, partial(following, world_size, cursor)):
                (batch,) = each.batch
                seen += batch.tolist()
                check(ask)
            order = Order(SEED, share.epoch, SIZE)
            assert seen == [order[p] for p in range(share.ranges[0].start, share.ranges[0].stop)]
            cursor = cursor_after(cursor, next_batch(cursor, 8, SIZE), SIZE)
        now = {child.pid for child in multiprocessing.active_children()}
        inherited = [opened & sockets(pid) for pid in now if pid is not None]
        check(ask)
    feeder.close()

    assert opened
    assert inherited == [set(), set()]
    assert now == loading
    assert multiprocessing.active_children() == []


class Sockets(Dataset[set[str]]):
    """A dataset whose samples are the sockets of the loading process."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> set[str]:
        return sockets("self")


def test_processes_of_the_scripts_other_loaders_hold_no_connection_of_the_line() -> None:
    # Plain sockets, because it depends on gRPC's version whether its own are inherited.
    before = sockets("self")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as there, server.accept()[0] as here:
            opened = sockets("self") - before
            held = list(DataLoader(Sockets(), batch_size=None, num_workers=1))
            close_in_children(f"127.0.0.1:{port}")
            closed = list(DataLoader(Sockets(), batch_size=None, num_workers=1))
            there.sendall(b"still here")
            heard = here.recv(10)

    assert len(opened) == 3
    assert all(opened <= each for each in held)
    assert all(opened.isdisjoint(each) for each in closed)
    assert heard == b"still here"
