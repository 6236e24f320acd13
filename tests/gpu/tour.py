"""A worker that joins one line after another, each of which shows one thing that GPUs do.

Usage: tour.py SPEC.json OUT.json. The spec has this worker's slot and device, and its stops: each
has a name, an address, a run and a folder for shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from andon_trainer import Line, LineHalted
from andon_trainer.state.weights import weights_digest
from integration.scripts.train import Model, Sentences, described, loss_of, make_optimizer

SPEC: dict[str, Any] = {"samples": 45, "batch": 8, "steps": 12, "lr": 0.05}
POISONED = {"parameter": "blocks.1.up.weight", "element": [3, 5], "step": 4}
OVERFLOWS_AT, KILLED_AT = 3, 5
_A_WHILE = 5_000_000
"""Cycles of a GPU: some milliseconds."""


def visit(stop: dict[str, Any], slot: int, device: str, out: Path) -> dict[str, Any]:
    """Trains on one line; returns what it saw."""
    seen: dict[str, Any] = {"losses": []}
    torch.manual_seed(1 + slot)  # Rank 0's weights go to the others.
    model = Model()
    if stop["name"] == "compiled":
        model.compile(backend="inductor" if device.startswith("cuda") else "aot_eager")
    optimizer = make_optimizer(model, SPEC)
    scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=1024.0)
    scaled = [scaler] if stop["name"] == "scaler" else []
    loader: Any = DataLoader(
        Sentences(SPEC["samples"]), SPEC["batch"], shuffle=True, pin_memory=device != "cpu"
    )
    try:
        with Line(
            address=stop["address"], run_id=stop["run_id"], device=device,
            total_steps=SPEC["steps"], shared_dir=stop["shared_dir"] or "off",
        ) as line:  # fmt: skip
            prepared = line.prepare(model, optimizer, loader, *scaled)
            plant(stop["name"], line, model, slot)
            train(stop["name"], line, prepared, seen)
            seen["pinned"] = pinned_arena(line)
            seen["step"], seen["digest"] = line.step, weights_digest([model]).hex()
    except LineHalted as halt:
        seen["halt"] = described(halt)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    save_file(weights, out.with_name(f"{out.stem}-{stop['name']}.safetensors"))
    return seen


def train(name: str, line: Line, prepared: Any, seen: dict[str, Any]) -> None:
    """The script's loop."""
    model, optimizer, loader, *scalers = prepared
    for _epoch in line.epochs(10**6):
        for x, y, _indices in loader:
            with own_stream(line.device, name == "streams"):
                optimizer.zero_grad()
                line.backward(loss_of(model, x, y))
                for scaler in scalers:
                    scaler.step(optimizer)
                    scaler.update()
                if not scalers:
                    optimizer.step()
            if line.committed:
                seen["losses"].append(line.loss)


@contextmanager
def own_stream(device: torch.device, wanted: bool) -> Iterator[None]:
    """Runs a loop body on a stream of its own, which is late; does nothing on a CPU."""
    if not wanted or device.type != "cuda":
        yield
        return
    main, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    own.wait_stream(main)
    with torch.cuda.stream(own):
        torch.cuda._sleep(_A_WHILE)  # type: ignore[no-untyped-call]  # torch's own
        yield
    main.wait_stream(own)


def plant(name: str, line: Line, model: nn.Module, slot: int) -> None:
    """Puts into worker 1's backward what the stop is about."""
    if slot != 1 and name != "streams":
        return

    def late(gradient: torch.Tensor) -> torch.Tensor:
        # The stream that makes this gradient is far behind the host when the hook returns.
        if gradient.is_cuda:
            torch.cuda._sleep(_A_WHILE)  # type: ignore[no-untyped-call]  # torch's own
        return gradient * 1.0

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        if line.step + 1 == POISONED["step"]:
            gradient = gradient.clone()
            gradient[tuple(POISONED["element"])] = float("nan")  # type: ignore[arg-type]  # a list
        return gradient

    def overflowing(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if line.step + 1 == OVERFLOWS_AT else gradient

    def gone(gradient: torch.Tensor) -> torch.Tensor:
        if line.step + 1 == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    hooks = {"streams": late, "halted": poisoned, "scaler": overflowing, "killed": gone}
    if name in hooks:
        parameter = dict(model.named_parameters())[str(POISONED["parameter"])]
        parameter.register_hook(hooks[name])  # type: ignore[no-untyped-call]  # torch's own signature


def pinned_arena(line: Line) -> bool | None:
    """Whether the memory that gradients lie in is shared and registered with the driver.

    None on a CPU, and if the exchange has not lent any.
    """
    staging = line._session.loop_steps._averager._tap._staging  # type: ignore[attr-defined]  # Of a LineAverager.
    pin = getattr(staging, "_pin", None)
    if pin is None:
        return None
    return pin._memory is not None and bool(staging._pinned[0].is_pinned())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for stop in spec["stops"]:
        seen[stop["name"]] = visit(stop, spec["slot"], spec["device"], out)
        out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
