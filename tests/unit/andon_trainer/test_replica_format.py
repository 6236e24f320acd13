"""The state that a worker transfers is the one of the protocol: readable without PyTorch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from andon_trainer.errors import StateCorrupt
from andon_trainer.state.replica import Replica
from andon_trainer.state.trees import pack_tensors
from unit.project.documents import protocol

FOLDER = Path(__file__).resolve().parents[3] / "conformance"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "state.json").read_text("utf-8"))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("größe", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))


class Model(nn.Module):
    """Of the golden state's names, types and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3))
        self.head = Head()
        self.register_buffer("count", torch.tensor(0))


@dataclass
class Plateau:
    """What was registered as `scheduler`."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def replica() -> tuple[Replica, Model, Plateau]:
    model, plateau = Model(), Plateau()
    optimizer = torch.optim.SGD([model.w], lr=1.0, momentum=0.9)
    return Replica([model], [optimizer], {"scheduler": plateau}), model, plateau


@dataclass
class Read:
    """A state, as whoever has the text alone reads it."""

    skeleton: Any
    header: dict[str, Any]
    first: int
    """Where the tensors' bytes begin."""

    @classmethod
    def of(cls, data: bytes | bytearray) -> Read:
        tensors = 8 + int.from_bytes(data[:8], "little")
        first = tensors + 8 + int.from_bytes(data[tensors : tensors + 8], "little")
        header = json.loads(data[tensors + 8 : first])
        header.pop("__metadata__", None)
        return cls(json.loads(data[8:tensors]), header, first)

    def place(self, name: str) -> slice:
        start, stop = self.header[name]["data_offsets"]
        return slice(self.first + start, self.first + stop)


def test_the_golden_state_is_installed_whole() -> None:
    data = (FOLDER / GOLDEN["file"]).read_bytes()
    mine, model, plateau = replica()

    mine.install(data)

    assert hashlib.sha256(data).hexdigest() == GOLDEN["sha256"]
    assert model.w.tolist()[0] == [0.5, -1.25, 3.0]
    assert model.get_buffer("count").item() == 7
    assert plateau.state == {"best": float("inf"), "lrs": (0.25, 0.125)}
    (optimizer,) = mine.optimizers
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.state[model.w]["momentum_buffer"][0, 2] == 0.75
    assert mine.digest().hex() == GOLDEN["weights_sha256"]


def test_what_a_worker_packs_reads_as_the_golden_state_does() -> None:
    mine, _, _ = replica()
    mine.install((FOLDER / GOLDEN["file"]).read_bytes())

    packed = bytes(mine.packed())

    read = Read.of(packed)
    assert read.header.keys() == {each["name"] for each in GOLDEN["tensors"]}
    for tensor in GOLDEN["tensors"]:
        entry = read.header[tensor["name"]]
        assert (entry["dtype"], entry["shape"]) == (tensor["dtype"], tensor["shape"])
        assert packed[read.place(tensor["name"])].hex() == tensor["bytes"]
    parts = dict(read.skeleton["dict"])
    golden = dict(json.loads(GOLDEN["tree"])["dict"])
    assert list(parts) == ["model", "optimizers", "registered"]
    assert parts["model"] == golden["model"]
    assert parts["registered"] == golden["registered"]


def text_of(text: str) -> bytes:
    """A state of this text, without a tensor."""
    return len(text).to_bytes(8, "little") + text.encode() + pack_tensors({})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(3000),
        b"\xff" * 3000,
        (FOLDER / GOLDEN["file"]).read_bytes()[:-1],
        text_of("no JSON"),
        text_of("[" * 10**5),
        text_of("[]"),
        text_of('{"dict": [["model", {"tensor": "w"}]]}'),
        text_of('{"dict": [["model", {"dict": []}]]}'),
        text_of('{"dict": [[[], 1]]}'),
    ],
)
def test_bytes_that_are_no_state_are_a_failed_transfer_and_no_crash(data: bytes) -> None:
    mine, _, _ = replica()
    before = mine.digest()

    with pytest.raises(StateCorrupt, match="its sender gave"):
        mine.install(data)

    assert mine.digest() == before


def test_weights_that_are_overwritten_in_place_are_installed() -> None:
    mine, _, _ = replica()
    data = bytearray(bytes(mine.packed()))
    read = Read.of(data)

    data[read.place("model.w")] = bytes.fromhex("0000803f") * 6
    theirs, model, _ = replica()
    theirs.install(bytes(data))

    assert model.w.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def test_the_text_has_the_skeleton_of_a_state_without_optimizers() -> None:
    (skeleton,) = re.findall(r"```json\n(.*)\n```", protocol())
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(1))

    packed = bytes(Replica([model], [], {}).packed())

    assert Read.of(packed).skeleton == json.loads(skeleton)


def test_a_state_that_is_installed_takes_no_memory_any_more() -> None:
    mine, _, _ = replica()
    theirs, _, _ = replica()
    data = bytearray(bytes(mine.packed()))

    theirs.install(data)

    assert not data
    assert theirs.digest() == mine.digest()
