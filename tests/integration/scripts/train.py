"""A worker for tests: trains a tiny GPT-like model, configured by its spec, and writes what it saw.

Usage: train.py SPEC.json OUT.json. The environment decides how it runs: alone or on a line.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from andon.protocol.capabilities import LEARNING
from andon.protocol.order import Order
from andon_trainer import JoinRefused, Line, LineHalted
from andon_trainer.line import joining
from andon_trainer.state.weights import weights_digest

VOCABULARY, WIDTH, CONTEXT = 17, 8, 6


class Layer(nn.Module):
    """One residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(x).cumsum(1)
        return x + self.down(F.gelu(self.up(mixed)))  # type: ignore[no-any-return]  # untyped call


class Synced(nn.Module):
    """Waits for the other processes of the host in forward and backward, as SyncBatchNorm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def meet(*_gradient: torch.Tensor) -> None:
            dist.all_reduce(torch.zeros(1))

        # SyncBatchNorm itself takes nothing but tensors on a GPU.
        meet()
        met = x.clone()
        if met.requires_grad:
            met.register_hook(meet)  # type: ignore[no-untyped-call]  # torch's own signature
        return met


class Model(nn.Module):
    """Embedding, two layers, norm and head; one parameter is never used, and one is frozen."""

    def __init__(
        self, vocabulary: int = VOCABULARY, *, batchnorm: bool = False, synced: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.batchnorm = nn.BatchNorm1d(CONTEXT) if batchnorm else nn.Identity()
        self.synced = Synced() if synced else nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.batchnorm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.synced(x)))  # type: ignore[no-any-return]  # untyped call


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Made-up sentences; each sample contains its own index."""

    def __init__(self, size: int, *, alike: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(0, VOCABULARY, (size, CONTEXT + 1), generator=generator)
        if alike:
            self._tokens[:] = self._tokens[0].clone()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._tokens[index, :-1], self._tokens[index, 1:], index


def make_optimizer(model: nn.Module, spec: dict[str, Any]) -> torch.optim.Optimizer:
    if spec.get("optimizer", "sgd") == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=spec.get("lr", 1e-2))
    return torch.optim.SGD(model.parameters(), lr=spec.get("lr", 0.1), momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def unions(spec: dict[str, Any]) -> Iterator[list[int]]:
    """The samples of each step, of all workers together, if no step is larger than the batch."""
    size = spec["samples"]
    for epoch in count():
        order = Order(spec.get("seed", 0), epoch, size)
        for start in range(0, size, spec["batch"]):
            stop = min(start + spec["batch"], size)
            yield [int(order[position]) for position in range(start, stop)]


def train_plainly(model: nn.Module, spec: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process, with PyTorch only, on the union batches."""
    optimizer = make_optimizer(model, spec)
    data = Sentences(spec["samples"])
    losses: list[float] = []
    for indices in islice(spec.get("unions") or unions(spec), spec["steps"]):
        x, y, _ = zip(*[data[index] for index in indices], strict=True)
        optimizer.zero_grad()
        loss = loss_of(model, torch.stack(x), torch.stack(y))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        if "clip" in spec:
            nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        if "unions" in spec:  # of a cadence, whose rate follows the size of a step
            optimizer.param_groups[0]["lr"] = spec["lr"] * len(indices) / spec["batch"]
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "step": len(losses)}


def poison(line: Line, model: nn.Module, spec: dict[str, Any]) -> None:
    """Puts a value into one element of one gradient, at one step on one worker."""
    wanted = spec.get("poison")
    if not wanted or wanted["slot"] != spec["slot"]:
        return
    parameter = dict(model.named_parameters())[wanted["parameter"]]

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        if line.step + 1 == wanted["step"] and not wanted.get("done"):
            wanted["done"] = True
            gradient = gradient.clone()
            gradient[tuple(wanted["element"])] = float(wanted["value"])
        return gradient

    parameter.register_hook(plant)  # type: ignore[no-untyped-call]  # torch's own signature


def digest_of_gradients(model: nn.Module) -> str:
    """SHA-256 of all gradients; empty while a step is incomplete."""
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return hashlib.sha256(torch.cat(gradients).numpy().data).hexdigest() if gradients else ""


def pause(line: Line, spec: dict[str, Any], seen: dict[str, Any]) -> None:
    """If the spec asks for it here, reports that it is waiting, and waits for a file.

    `batch`: at this micro-batch of the step, counted from 1; without it at the first one.
    `later`: if the step has fewer micro-batches here, at the first later step that has as many.
    `slow`: from this step on every step takes a while, until there is a file.
    """
    slow = spec.get("slow")
    if slow and line.step >= slow["step"] and not Path(slow["until"]).exists():
        time.sleep(0.4)
    batches = sum(step == line.step + 1 for step, _rank, _indices in seen["indices"])
    for wanted in spec.get("pauses", []):
        steps_late = line.step + 1 - wanted["step"]
        in_time = steps_late == 0 or (steps_late > 0 and wanted.get("later", False))
        if wanted["slot"] == spec["slot"] and in_time and batches >= wanted.get("batch", 1):
            Path(wanted["until"]).with_suffix(".here").touch()
            while not Path(wanted["until"]).exists():
                time.sleep(0.01)


def misbehaving(line: Line, loss: torch.Tensor, spec: dict[str, Any]) -> torch.Tensor:
    """The loss, or once what the spec puts in its place at this step on this worker."""
    if spec.get("raise_at") == [spec["slot"], line.step + 1]:
        raise ValueError("a poison sample")
    if spec.get("exit_at") == [spec["slot"], line.step + 1]:
        try:
            raise ValueError("a poison sample")
        except ValueError:
            sys.exit(1)  # as Hydra does
    if spec.get("loud_at") == line.step + 1:
        if spec.get("loud_once"):  # A bad batch: the next one at this step is not loud.
            del spec["loud_at"]
        loss = loss * 1e4
    bad_loss = spec.get("bad_loss")
    if bad_loss == {"slot": spec["slot"], "step": line.step + 1}:
        del spec["bad_loss"]
        return loss * float("nan")
    return loss


def step(optimizer: torch.optim.Optimizer, bodies: int, spec: dict[str, Any]) -> None:
    """Makes a step; from loop body `ruin_at` on the first one that counts is far too large.

    Then the weights are bad on every worker, and no other batch helps.
    """
    if bodies < spec.get("ruin_at", math.inf):
        optimizer.step()
        return
    (group,) = optimizer.param_groups
    before, rate = group["params"][-1].detach().clone(), group["lr"]
    group["lr"] = 1e6 * rate
    optimizer.step()
    group["lr"] = rate
    if not torch.equal(before, group["params"][-1]):
        del spec["ruin_at"]


class Gate:
    """A registered thing; on a worker that has trained, a state is loaded once there is a file."""

    def __init__(self, line: Line, until: str) -> None:
        self._line, self._until = line, Path(until)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        if self._line.step:
            self._until.with_suffix(".here").touch()
            while not self._until.exists():
                time.sleep(0.01)


def hold_states(line: Line, spec: dict[str, Any]) -> None:
    """Holds a worker where it loads a state, if the spec asks for it."""
    if "gate" in spec:
        line.register("gate", Gate(line, spec["gate"] + str(spec["slot"])))


def log(line: Line, spec: dict[str, Any], seen: dict[str, Any]) -> None:
    """Logs a number of this step and worker, if the spec asks for it."""
    if spec.get("logs"):
        value = line.step + spec["slot"] / 10
        line.log({"val": torch.tensor(value, dtype=torch.float64)})
        seen.setdefault("logged", []).append([line.step, value])


def in_its_host(model: nn.Module, spec: dict[str, Any]) -> nn.Module:
    """The model, wrapped if the spec says that its host has several processes."""
    if not spec.get("ddp"):
        return model
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model)


def choose_capabilities(spec: dict[str, Any]) -> None:
    """Makes this a worker that can't learn, if the spec says so: the others wait for its state."""
    if not spec.get("transfers"):
        return
    able = tuple(each for each in joining._CAPABILITIES if each != LEARNING)
    vars(joining)["_CAPABILITIES"] = able


def train_on_the_line(model: nn.Module, spec: dict[str, Any]) -> dict[str, Any]:
    line = Line(seed=spec.get("seed", 0), total_steps=spec["steps"])
    model = in_its_host(model, spec)
    optimizer = make_optimizer(model, spec)
    data: Dataset[Any] = Sentences(spec["samples"], alike=spec.get("alike", False))
    if "own_split" in spec:  # as an unseeded random_split makes one on every worker
        generator = torch.Generator().manual_seed(spec["slot"])
        data, _ = random_split(data, [spec["own_split"], 1 - spec["own_split"]], generator)
    processes = spec.get("loader_processes", 0)
    loader: Any = DataLoader(data, spec["batch"], shuffle=True, num_workers=processes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = line.prepare(
        model, optimizer, loader, scheduler, micro_batch_size=spec.get("micro")
    )
    hold_states(line, spec)
    poison(line, model, spec)
    seen: dict[str, Any] = {"losses": [], "indices": [], "halts": [], "gradients": []}

    def loop() -> None:
        for _epoch in line.epochs(10**6):
            for x, y, indices in loader:
                seen["indices"].append([line.step + 1, line.rank, indices.tolist()])
                optimizer.zero_grad()
                pause(line, spec, seen)
                loss = misbehaving(line, loss_of(model, x, y), spec)
                line.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), spec.get("clip", math.inf))
                seen["gradients"].append(digest_of_gradients(model))
                step(optimizer, len(seen["gradients"]), spec)
                scheduler.step()
                if line.committed:
                    seen["losses"].append(line.loss)
                    log(line, spec, seen)

    while not line.complete:
        try:
            loop()
        except LineHalted as halt:
            seen["halts"].append(described(halt))
            finish(model, seen, line.step, spec)
            if not spec.get("survive"):
                raise
    if spec.get("mean"):
        seen["mean"] = line.mean(float(line.rank + 1), weight=line.rank + 1)
        numbers = torch.arange(900) + 2**60 + 1000 * line.rank  # more than one piece
        seen["gathered"] = line.gather(numbers[: 300 * (line.rank + 1)]).tolist()
        seen["means"] = line.mean({"rank": line.rank}, weight=line.rank + 1)
    return {**seen, "step": line.step}


def described(halt: LineHalted) -> dict[str, Any]:
    return {
        "reason": halt.reason,
        "worker": halt.worker,
        "step": halt.step,
        "block": halt.block,
        "parameter": halt.parameter,
        "element": list(halt.element),
        "value": halt.value,
        "text": str(halt),
    }


def finish(model: nn.Module, seen: dict[str, Any], step: int, spec: dict[str, Any]) -> None:
    out = Path(sys.argv[2])
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    save_file(dict(model.state_dict()), out.with_suffix(".safetensors"))
    seen["step"], seen["digest"] = step, weights_digest([model]).hex()
    out.write_text(json.dumps(seen))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(spec.get("model_seed", 1))
    model = Model(
        spec.get("vocabulary", VOCABULARY),
        batchnorm=spec.get("batchnorm", False),
        synced=spec.get("synced", False),
    )
    choose_capabilities(spec)
    train = train_plainly if spec.get("plain") else train_on_the_line
    try:
        seen = train(model, spec)
    except JoinRefused as refused:
        fields = {
            name: getattr(refused, name) for name in ("reason", "component", "mine", "theirs")
        }
        Path(sys.argv[2]).write_text(json.dumps(fields))
        raise
    finish(model, seen, seen["step"], spec)


if __name__ == "__main__":
    main()
