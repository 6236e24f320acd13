"""A worker for tests: a tiny GAN that uses manual steps, configured by its spec.

Usage: gan.py SPEC.json OUT.json. One step trains both models: the discriminator on unequal shares,
weighted by their sizes, the generator on equal ones. `plain` does the same with PyTorch only.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from andon_trainer import Line, LineHalted
from andon_trainer.state.weights import weights_digest

REAL, FAKE, NOISE, FEATURES = 10, 12, 3, 5


class Discriminator(nn.Module):
    """Scores samples; its buffers differ between workers until they are synced."""

    seen: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16), persistent=False)

    def note(self, x: torch.Tensor) -> None:
        self.seen += 2**40 + len(x)
        self.mean += x.double().mean(0)
        self.scale.fill_(float("nan") if len(x) > REAL // 2 else 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # untyped call


class Gan:
    """Both models with their optimizers; computes one worker's gradients for its share."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.generator = nn.Sequential(nn.Linear(NOISE, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.discriminator = Discriminator()
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        self.of_discriminator = torch.optim.SGD(
            self.discriminator.parameters(), lr=0.1, momentum=0.9
        )

    def backward(self, step: int, rank: int, world_size: int) -> int:
        """Computes the gradients of this rank's share; returns the share's real samples."""
        draw = torch.Generator().manual_seed(step)
        real = torch.randn(REAL, FEATURES, generator=draw).exp()
        noise = torch.randn(FAKE, NOISE, generator=draw)
        cut = [0, *(REAL - n for n in range(world_size - 1, 0, -1)), REAL]
        real = real[cut[rank] : cut[rank + 1]]
        self.of_generator.zero_grad()
        fake = self.generator(noise[rank::world_size])
        _backward(_score(self.discriminator(fake), 1.0))
        self.of_discriminator.zero_grad()
        _backward(_score(self.discriminator(real), 1.0))
        self.discriminator.note(real)
        return len(real)

    def move(self) -> None:
        self.of_generator.step()
        self.of_discriminator.step()


def _score(scores: torch.Tensor, wanted: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature


def train_plainly(spec: dict[str, Any], gan: Gan, seen: dict[str, Any]) -> None:
    for step in range(1, spec["steps"] + 1):
        gan.backward(step, 0, 1)
        gan.move()
    seen["step"] = spec["steps"]


def poison(spec: dict[str, Any], gan: Gan, step: int) -> None:
    """Puts a NaN into the discriminator's gradient once, at one step on one worker."""
    if spec.get("poison") == {"slot": spec["slot"], "step": step}:
        del spec["poison"]
        weight = gan.discriminator.get_parameter("layers.0.weight")
        assert weight.grad is not None
        weight.grad[2, 1] = float("nan")


def one_step(line: Line, spec: dict[str, Any], gan: Gan, seen: dict[str, Any]) -> None:
    step, rank, world_size = line.step + 1, line.rank, line.world_size
    if rank and spec.get("drift"):
        gan.generator.get_parameter("0.bias").data += rank
    line.sync_params(gan.generator)
    real = gan.backward(step, rank, world_size)
    poison(spec, gan, step)
    line.all_reduce_gradients(gan.generator)
    if spec.get("linger") == [spec["slot"], step]:
        Path(spec["lingers"]).touch()
        time.sleep(600)  # the test kills this process here
    line.all_reduce_gradients(gan.discriminator, weight=real)
    line.sync_buffers(gan.discriminator)
    told = torch.tensor([rank, step])
    if spec.get("mispair") == [spec["slot"], step]:
        line.barrier()
    else:
        line.broadcast(told)
    if line.should_commit():
        gan.move()
        seen["committed"].append([step, rank, world_size])
        seen["told"].append(told.tolist())
        seen["digests"].append(digest_of(gan))
    else:
        seen["again"].append([step, line.step + 1, line.world_size])
    if step == spec.get("stop_at", [None, None])[1] and spec["slot"] == spec["stop_at"][0]:
        line.stop("enough")


def train_on_the_line(spec: dict[str, Any], gan: Gan, seen: dict[str, Any]) -> None:
    line = Line(total_steps=spec["steps"])
    line.register("generator's optimizer", gan.of_generator)
    line.register("discriminator's optimizer", gan.of_discriminator)
    line.join(gan.generator, gan.discriminator)
    seen["joined_at"] = line.step
    while spec.get("stubborn") or not line.complete:
        try:
            one_step(line, spec, gan, seen)
        except LineHalted as halt:
            seen["halts"].append([halt.reason, halt.worker, halt.step, halt.parameter, str(halt)])
            if not spec.get("survive"):
                finish(gan, {**seen, "step": line.step})
                raise
    seen["step"], seen["stopped"] = line.step, line.stopped
    if spec.get("upload"):
        with line.busy("upload"):
            wait_for(Path(spec["upload"]))
        seen["mean"] = line.mean(line.rank + 1, weight=line.rank + 1)
        seen["split"] = [int(x) for batch in line.split(evaluation()) for x in batch]
    line.close()


def evaluation() -> Any:
    return torch.utils.data.DataLoader(range(7), batch_size=2)  # type: ignore[arg-type]  # any sequence does


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def digest_of(gan: Gan) -> str:
    return weights_digest([gan.generator, gan.discriminator]).hex()


def finish(gan: Gan, seen: dict[str, Any]) -> None:
    out, both = Path(sys.argv[2]), nn.ModuleList((gan.generator, gan.discriminator))
    save_file(dict(both.state_dict()), out.with_suffix(".safetensors"))
    buffers = {name: b.double().tolist() for name, b in gan.discriminator.named_buffers()}
    out.write_text(json.dumps({**seen, "digest": digest_of(gan), "buffers": str(buffers)}))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"step": 0}
    seen |= {name: [] for name in ("committed", "again", "halts", "told", "digests")}
    gan = Gan(spec.get("model_seed", 1) + 7 * spec["slot"])  # rank 0's weights count
    if spec.get("plain"):
        train_plainly(spec, gan, seen)
    else:
        train_on_the_line(spec, gan, seen)
    finish(gan, seen)


if __name__ == "__main__":
    main()
