"""Two workers on GPUs, end to end: on one device and on two, and on the CPU as their stand-in.

The stand-in runs everywhere, so that what needs a GPU works on the day that one is there.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from andon_coordinator.transport.reader import JournalReader
from gpu.tour import OVERFLOWS_AT, POISONED, SPEC
from integration.harness import Service, Worker, clean_environment
from integration.nursery import nursery
from integration.scripts.train import (
    Model,
    Sentences,
    loss_of,
    make_optimizer,
    train_plainly,
    unions,
)

pytestmark = pytest.mark.integration

STOPS = ("plain", "arena", "streams", "compiled", "scaler", "halted", "killed")
"""In this order: worker 1 does not survive the last."""


def cuda(count: int, devices: tuple[str, str], name: str) -> Any:
    """A placement that needs so many GPUs."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needs = f"needs {count} CUDA device{'s' * (count > 1)} and a CUDA build of torch: make gpu"
    return pytest.param(
        devices, id=name, marks=[pytest.mark.cuda, pytest.mark.skipif(there < count, reason=needs)]
    )


PLACEMENTS = [
    pytest.param(("cpu", "cpu"), id="stand-in"),
    cuda(1, ("cuda:0", "cuda:0"), "one device"),
    cuda(2, ("cuda:0", "cuda:1"), "two devices"),
]


@dataclass
class Tour:
    """What two workers saw on one line after another."""

    folder: Path
    on_gpu: bool

    def seen(self, stop: str, slot: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"out-{slot}.json").read_text())[stop]
        return found

    def weights(self, stop: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"out-0-{stop}.safetensors")


@pytest.fixture(scope="module", params=PLACEMENTS)
def tour(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tour:
    """One pair of processes for all stops: a GPU takes seconds to get ready."""
    devices: tuple[str, str] = request.param
    folder = tmp_path_factory.mktemp("gpu")
    with ExitStack() as running:
        stops = [open_line(running, folder, name) for name in STOPS]
        workers = [start(folder, slot, device, stops) for slot, device in enumerate(devices)]
        for worker in workers:
            running.callback(worker.kill)
        codes = [worker.wait() for worker in workers]
    assert codes == [0, -9], workers[0].output + workers[1].output
    return Tour(folder, devices[0] != "cpu")


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch, in this process and on its CPU."""
    torch.manual_seed(1)
    model = Model()
    losses = train_plainly(model, SPEC)["losses"]
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("stop", ["plain", "arena", "streams", "compiled", "killed"])
def test_f_dp_005_two_workers_match_one_process_on_the_cpu(
    tour: Tour, plain: tuple[list[float], dict[str, torch.Tensor]], stop: str
) -> None:
    losses, weights = plain
    ours = tour.weights(stop)

    # Float32 in another order of sums, over so few steps: GPUs add with atomics, too.
    assert tour.seen(stop)["losses"] == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * max(1.0, float(value.norm())), name


@pytest.mark.parametrize("stop", ["plain", "arena", "streams", "compiled"])
def test_f_dp_001_both_workers_end_with_the_same_bits(tour: Tour, stop: str) -> None:
    assert tour.seen(stop)["digest"] == tour.seen(stop, 1)["digest"]


def test_c_streamsync_001_gradients_of_late_streams_are_sent_whole(tour: Tour) -> None:
    # Each body runs on a stream of its own, and a hook makes backward's stream later still. A copy
    # that did not wait for them would send what the memory held before.
    assert tour.seen("streams")["losses"] == pytest.approx(tour.seen("plain")["losses"], rel=1e-4)


def test_the_memory_that_gradients_lie_in_is_registered_with_the_driver(tour: Tour) -> None:
    assert tour.seen("arena")["pinned"] is (True if tour.on_gpu else None)


def test_f_dp_005_an_overflow_of_one_worker_moves_no_weight_of_any(tour: Tour) -> None:
    ours, weights = tour.weights("scaler"), plainly_with_a_scaler()

    assert tour.seen("scaler")["digest"] == tour.seen("scaler", 1)["digest"]
    for name, value in weights.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * max(1.0, float(value.norm())), name


def test_f_dp_003_a_nan_on_a_gpu_is_named_with_parameter_and_element(tour: Tour) -> None:
    for slot in (0, 1):
        halt = tour.seen("halted", slot)["halt"]
        place = {name: halt[name] for name in ("parameter", "element", "step")}
        assert place == POISONED
        assert (halt["reason"], halt["value"], halt["worker"]) == ("non_finite_gradient", "nan", 1)


def test_f_dp_006_the_other_worker_goes_on_when_one_is_killed_in_backward(tour: Tour) -> None:
    assert tour.seen("killed")["step"] == SPEC["steps"]
    with JournalReader(tour.folder / "killed" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []


def plainly_with_a_scaler() -> dict[str, torch.Tensor]:
    """The weights of plain PyTorch on the CPU, whose GradScaler skips one step."""
    torch.manual_seed(1)
    model, data = Model(), Sentences(SPEC["samples"])
    optimizer = make_optimizer(model, SPEC)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, indices in enumerate(islice(unions(SPEC), SPEC["steps"]), 1):
        x, y, _ = zip(*[data[index] for index in indices], strict=True)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, torch.stack(x), torch.stack(y))).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        if step == OVERFLOWS_AT:
            model.head.bias.grad.fill_(float("inf"))  # type: ignore[union-attr]  # it has one
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict())


def open_line(running: ExitStack, folder: Path, name: str) -> dict[str, str]:
    """A service for one stop; only `arena` shares memory."""
    shared = folder / "shared" if name == "arena" else None
    if shared is not None:
        shared.mkdir()
    service = running.enter_context(Service(folder / name, 2, shared_dir=str(shared or "")))
    return {
        "name": name,
        "address": service.address,
        "run_id": service.run_id,
        "shared_dir": str(shared or ""),
    }


def start(folder: Path, slot: int, device: str, stops: list[dict[str, str]]) -> Worker:
    spec, out = folder / f"spec-{slot}.json", folder / f"out-{slot}.json"
    spec.write_text(json.dumps({"slot": slot, "device": device, "stops": stops}))
    process = nursery("trainer").start(
        [str(Path(__file__).with_name("tour.py")), str(spec), str(out)],
        clean_environment(RANK=str(slot), WORLD_SIZE="2"),
        folder / f"output-{slot}.log",
    )
    return Worker(process, out)
