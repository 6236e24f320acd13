"""What ranks do in tests. Each runs in a process of its own, with a default group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CULPRIT = 1
NAN = float("nan")


def model() -> nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))


def losses(kind: str, spoil_at: int | None = None, hook: bool = False) -> dict[str, Any]:
    """Five steps: this rank's losses, and its weights in the end, to the bit.

    Args:
        kind: `ddp`, or `fsdp` for FSDP2.
        spoil_at: the step in which the culprit's gradient has a NaN.
        hook: whether DistributedDataParallel has `andon_torch.watch_hook`.
    """
    plain = model()
    wrapped: nn.Module = plain
    if kind == "ddp":
        wrapped = DistributedDataParallel(plain)
        if hook:
            import andon_torch

            wrapped.register_comm_hook(None, andon_torch.watch_hook)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in (plain[0], plain[2]):
            fully_shard(layer)
        fully_shard(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    found, moved = [], []
    for step in range(5):
        if step == spoil_at and dist.get_rank() == CULPRIT:
            plain[2].register_full_backward_hook(_spoil)
        inputs, targets = (torch.randn(8, size, generator=data) for size in (20, 3))
        loss = F.mse_loss(wrapped(inputs), targets)
        optimizer.zero_grad()
        before = _weights(plain)
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # it has none
        except RuntimeError as error:
            return {"step": step, "error": str(error), "moved": before != _weights(plain)}
        optimizer.step()
        found.append(float(loss.item()).hex())
        moved.append(_weights(plain))
    return {"losses": found, "weights": moved[-1]}


def scaled() -> dict[str, Any]:
    """Three steps whose gradients overflow under a gradient scaler."""
    from andon_torch.session import living

    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = _weights(wrapped.module)
    for _ in range(3):
        loss = 100 * wrapped(torch.ones(4, 20)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    (session,) = living()
    report = session.report()
    return {
        "halved": scaler.get_scale() == 2.0**124,
        "moved": before != _weights(wrapped.module),
        "overflows": report.overflows,
        "steps": report.steps,
    }


def functional() -> dict[str, Any]:
    """Collectives that C++ calls: those of torch.compile and of distributed tensors."""
    from torch.distributed import _functional_collectives as functions

    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    found = {
        "all_reduce": functions.all_reduce(torch.ones(2) * (rank + 1), "sum", world),
        "all_gather": functions.all_gather_tensor(torch.ones(1) * rank, 0, world),
        "reduce_scatter": functions.reduce_scatter_tensor(torch.arange(2.0), "sum", 0, world),
        "all_to_all": functions.all_to_all_single(torch.arange(2.0) + 10 * rank, None, None, world),
        "broadcast": functions.broadcast(torch.ones(1) * rank, 1, world),
    }
    found["compiled"] = torch.compile(_doubled, backend="eager")(torch.ones(2) * rank)
    return {name: value.tolist() for name, value in found.items()}


def chained() -> dict[str, Any]:
    """A callback of a future waits for another call, in which a value is bad."""
    good, bad = torch.ones(4), torch.ones(4)
    bad[2] = NAN if dist.get_rank() == CULPRIT else 0.0

    def go_on(done: object) -> None:
        dist.all_reduce(bad)

    work = dist.all_reduce(good, async_op=True)
    assert work is not None
    try:
        work.get_future().then(go_on).wait()
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def _doubled(value: Tensor) -> Tensor:
    """A function that torch.compile traces, with a collective in it."""
    doubled = value * 2
    dist.all_reduce(doubled)
    return doubled + 1


def _spoil(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Any:
    """Spoils what flows on to the first layer, of which one row then has a bad gradient."""
    (gradient,) = inputs
    spoiled = gradient.clone()
    spoiled[:, 7] = NAN
    return (spoiled,)


def _weights(plain: nn.Module) -> list[str]:
    """The weights that this rank holds, to the bit."""
    return [
        float(getattr(each, "_local_tensor", each).detach().double().sum().item()).hex()
        for each in plain.parameters()
    ]


def trouble(act: str, place: str) -> dict[str, Any]:
    """The culprit acts in its third round; the others say what they got, and when.

    When it acted is in the file `acted`: a rank that is killed tells nobody.
    """
    exchange = _PLACES[place]()
    for number in count():
        if number == 3 and dist.get_rank() == CULPRIT:
            # For the others, whose next call is open by then.
            time.sleep(0.2)
            Path("acted").write_text(repr(time.monotonic()))
            _ACTS[act]()
            return {}
        try:
            exchange()
        except RuntimeError as error:
            return {"error": str(error), "type": type(error).__name__, "at": time.monotonic()}
    raise AssertionError("unreachable")


def _collective(place: str) -> Callable[[], object]:
    """A collective of 100,000 elements a rank; rank 0 is the root."""
    size, is_root = dist.get_world_size(), dist.get_rank() == 0
    mine, everybodys = torch.ones(100_000), torch.ones(size * 100_000)
    parts = list(everybodys.chunk(size)) if is_root else None
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(mine),
        "reduce": lambda: dist.reduce(mine, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, everybodys),
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(everybodys, mine),
        "gather": lambda: dist.gather(mine, parts, 0),
        "scatter": lambda: dist.scatter(mine, parts, 0),
        "all_to_all": lambda: dist.all_to_all_single(everybodys, torch.ones_like(everybodys)),
        "barrier": dist.barrier,
    }
    return calls[place]


def _send() -> Callable[[], object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    given, taken = torch.ones(1000), torch.ones(1000)

    def around() -> None:
        sent = dist.isend(given, (rank + 1) % size)
        dist.recv(taken, (rank - 1) % size)
        assert sent is not None
        sent.wait()

    return around


def _backward() -> Callable[[], object]:
    wrapped = DistributedDataParallel(model())
    return lambda: wrapped(torch.ones(2, 20)).sum().backward()


def _halt() -> None:
    command = [sys.executable, "-m", "andon_cli", "halt", "--reason", "enough"]
    command += ["--address", os.environ["ANDON_ADDRESS"]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _raise() -> None:
    raise KeyError("a mistake in the script")


COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
_PLACES: dict[str, Callable[[], Callable[[], object]]] = {
    **{place: partial(_collective, place) for place in COLLECTIVES},
    "send": _send,
    "backward": _backward,
}
_ACTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill the service": lambda: os.kill(int(os.environ["SERVICE_PID"]), signal.SIGKILL),
    "raise": _raise,
    "end": lambda: None,
    "halt": _halt,
}
