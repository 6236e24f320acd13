"""Synchronisations: what `Line` makes a script wait for its GPU that the plain script does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.run_settings import RunPlan
from andon_trainer import Line, LineHalted
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.readings import DeviceReader, HostReader, PendingNumbers, Reader
from andon_trainer.averaging.solo_averaging import SoloAverager
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import plan_model
from andon_trainer.place.solo import SoloMember
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.stepper import Stepper, StepperGate
from andon_trainer.script.gates import Audit, gate_optimizer
from andon_trainer.state.replica import Replica
from unit.andon_trainer.gpus import needs_cuda
from unit.andon_trainer.stand_in import DEVICE, Waits

SAMPLES, BATCH, CLASSES = 18, 6, 3
STEPS = SAMPLES // BATCH
LOOKS = 2
"""Reads of the weights' sums: once at joining, and once before the first batch."""


def test_a_plain_script_waits_for_nothing_on_the_stand_in_for_a_gpu() -> None:
    net, optimizer, loader = script(DEVICE)

    with Waits() as waits:
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net, x.to(DEVICE), y.to(DEVICE)).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()

    assert (waits.reads, waits.events) == ([], 0)


@pytest.mark.parametrize(("micro", "bodies"), [(None, STEPS), (3, 2 * STEPS)])
def test_alone_a_step_reads_nothing_and_waits_once_when_backward_is_queued(
    micro: int | None, bodies: int
) -> None:
    waits = Waits(micro or BATCH)

    with waits:
        member = train_alone(DeviceReader(waits.event, lambda _device: None), micro)

    assert member.position.step == STEPS
    assert len(waits.reads) == LOOKS
    assert waits.events == STEPS
    # Of each body its loss, what got right, its factor, and what it is a mean over; of each step
    # the norms.
    assert waits.copies == 4 * bodies + STEPS


def test_the_count_finds_what_reads_at_once() -> None:
    waits = Waits(BATCH)

    with waits:
        train_alone(HostReader(), None)

    assert len(waits.reads) == 5 * STEPS + LOOKS


def test_a_loss_that_arrives_after_backward_still_halts_before_the_weights_move() -> None:
    member, stepper, net, optimizer = alone(torch.device("cpu"), Late(), None)
    before = [part.detach().clone() for part in net.parameters()]

    x, y = next(stepper.batches(lambda: None))
    with pytest.raises(LineHalted) as halted:
        stepper.backward(loss_of(net, x, y) * float("nan"), None)
    optimizer.step()

    assert (halted.value.reason, member.position.step) == ("non_finite_loss", 0)
    assert all(map(torch.equal, net.parameters(), before))


def test_a_count_that_arrives_after_backward_is_checked_before_the_weights_move() -> None:
    member, stepper, net, optimizer = alone(torch.device("cpu"), Late(), None)

    x, y = next(stepper.batches(lambda: None))
    with pytest.raises(ValueError, match=f"this batch has {BATCH}: not {BATCH + 1}"):
        stepper.backward(loss_of(net, x, y), None, correct=torch.tensor(BATCH + 1))
    optimizer.step()

    assert member.position.step == 0


@needs_cuda
def test_on_a_gpu_no_call_of_a_solo_loop_synchronises() -> None:
    line = Line(device="cuda")
    net, optimizer, loader = script(line.device)
    pinned = DataLoader(loader.dataset, BATCH, shuffle=True, pin_memory=True)
    net, optimizer, batches = line.prepare(net, optimizer, pinned)

    try:
        for epoch in line.epochs(3):
            for x, y in batches:
                # From the second epoch on: the first allocates, and builds optimizer state.
                torch.cuda.set_sync_debug_mode("error" if epoch else "default")
                optimizer.zero_grad()
                line.backward(loss_of(net, x, y))
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        line.close()

    assert line.step == 3 * STEPS


class Late:
    """A reader whose numbers are on their way until somebody waits."""

    def __init__(self) -> None:
        self._waits = Waits()

    def begin(self, tensor: torch.Tensor) -> PendingNumbers:
        return PendingNumbers(tensor.detach().clone(), self._waits.event())


def script(
    device: torch.device,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).to(device)
    data = TensorDataset(torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % CLASSES)
    return net, torch.optim.AdamW(net.parameters()), DataLoader(data, BATCH, shuffle=True)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


def alone(
    device: torch.device, reader: Reader, micro: int | None
) -> tuple[SoloMember, Stepper, nn.Module, torch.optim.Optimizer]:
    """What `Line.prepare` makes for a script that is alone, with a reader of the test's."""
    net, optimizer, loader = script(device)
    plan = plan_model([net])
    feeder = LoaderFeeder(loader, 0, micro)
    member = SoloMember(RunPlan(global_batch=BATCH, seed=0, dataset_size=SAMPLES))
    replica = Replica([net])
    replica.optimizers = [optimizer]
    parts = LoopParts(
        member=member,
        accumulated=AccumulatedGradients(plan),
        feeder=feeder,
        replica=replica,
        device=device,
    )
    models = TrainedModels(plan=plan, device=device)
    gate = StepperGate()
    gate.stepper = stepper = Stepper(parts, SoloAverager(member, models, reader))
    audit = Audit([net], [optimizer])
    audit.open(plan)
    audit.close()  # It has noted what is exchanged; its hook would outlive the test.
    gate_optimizer(optimizer, gate, audit)
    return member, stepper, net, optimizer


def train_alone(reader: Reader, micro: int | None) -> SoloMember:
    """An epoch on the stand-in for a GPU."""
    member, stepper, net, optimizer = alone(DEVICE, reader, micro)
    for x, y in stepper.batches(lambda: None):
        optimizer.zero_grad()
        logits = net(x)
        right = (logits.argmax(1) == y).sum()
        # The factor may be a GradScaler's scale, or part of a mean: both are looked at.
        loss = F.cross_entropy(logits, y) * torch.ones((), device=DEVICE)
        stepper.backward(loss, None, correct=right)
        optimizer.step()
    return member
