"""What every system of the storm trains: a small GPT, English text, and a ledger of each worker.

It imports PyTorch and nothing of any system, since peers run in an environment of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import pydoc_data.topics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, LETTERS
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "POSITIONS",
    "Ledger",
    "Settings",
    "Text",
    "build",
    "digest_of",
    "held_out_loss",
    "loss_of",
    "pretend",
    "step_to_stop_at",
    "write_snapshot",
]

CONTEXT, LAYERS, WIDTH = 32, 1, 64
POSITIONS = 1 << 20
"""Samples of the only epoch: more than any run gets through, so that each position comes once."""
_HELD_OUT = 256
_SCATTER = 2_654_435_761
"""Odd and large: neighbouring positions lie far apart in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the harness tells each worker, as JSON in its first argument."""

    folder: str
    """Where ledgers and snapshots go, and where the order to stop comes from."""
    replicas: int
    batch: int
    """Samples of one step of all replicas together."""
    pace_s: float
    """Time that a sample pretends to take on a device, in addition to its real computation."""
    checkpoint_s: float
    """Seconds between two checkpoints, where the script writes them itself."""

    @property
    def share(self) -> int:
        """Samples of one replica's part of a batch, where parts are fixed."""
        return self.batch // self.replicas

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class Text(Dataset[tuple[Tensor, Tensor, int]]):
    """The reference of the Python language, which every Python has: pieces of CONTEXT letters."""

    def __init__(self) -> None:
        """Keeps the last twentieth of the text for evaluation."""
        letters = _letters()
        self._train = letters[: len(letters) * 19 // 20]

    def __len__(self) -> int:
        """The number of positions."""
        return POSITIONS

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor, int]:
        """The letters of a position, the letter after each, and the position."""
        start = position * _SCATTER % (len(self._train) - CONTEXT)
        piece = self._train[start : start + CONTEXT + 1].long()
        return piece[:-1], piece[1:], position


@cache
def _letters() -> Tensor:
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with the same weights in every process, and its optimizer."""
    torch.set_num_threads(1)
    model = GPT(layers=LAYERS, width=WIDTH, context=CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the next letters, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def pretend(settings: Settings, samples: int) -> None:
    """Takes the time that the samples would take on a device; the processor is free meanwhile."""
    time.sleep(settings.pace_s * samples)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """The loss on text that nobody trains on."""
    letters = _letters()
    rest = letters[len(letters) * 19 // 20 :]
    starts = range(0, len(rest) - CONTEXT, (len(rest) - CONTEXT) // _HELD_OUT)
    pieces = torch.stack([rest[start : start + CONTEXT + 1].long() for start in starts])
    return loss_of(model, pieces[:, :-1], pieces[:, 1:]).item()


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def write_snapshot(settings: Settings, model: nn.Module, samples: int) -> None:
    """Keeps the weights after so many committed samples, for the held-out loss."""
    _write(Path(settings.folder) / f"snapshot-{samples:08}.pt", model.state_dict())


def _write(path: Path, state: object) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(state, unfinished)
    unfinished.replace(path)


def step_to_stop_at(settings: Settings) -> int | None:
    """The step after which the harness wants the run to end; None: not known yet."""
    try:
        return int((Path(settings.folder) / "stop").read_text())
    except FileNotFoundError:
        return None


class Ledger:
    """A worker's own record of what it computed and what its model kept: a JSON object a line.

    Each line is one system call, so that a SIGKILL loses none that was written.
    """

    def __init__(self, settings: Settings, slot: int) -> None:
        """Appends to the slot's ledger, and says which process has it now."""
        path = Path(settings.folder) / f"ledger-{slot}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._say("start", pid=os.getpid())

    def computes(self, positions: Iterable[int], commit: str = "") -> None:
        """It is about to send the gradient of these samples, for a commit of this name."""
        self._say("computes", positions=list(positions), commit=commit)

    def kept(self, step: int, commit: str = "", parent: str = "") -> None:
        """The optimizer moved the model; `parent` names the commit that the model had before."""
        self._say("kept", step=step, commit=commit, parent=parent)

    def end(self, model: nn.Module, step: int, commit: str = "") -> None:
        """The last line."""
        self._say("end", step=step, commit=commit, digest=digest_of(model))

    def _say(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "at": time.time(), **fields})
        os.write(self._file, line.encode() + b"\n")


assert LETTERS == 256, "a letter is a byte"
