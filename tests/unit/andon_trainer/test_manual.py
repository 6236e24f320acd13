"""Exchanges by hand, alone: what scripts see, and what is refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from andon.protocol.run_settings import RunPlan
from andon_trainer import Line, LineHalted, RunOver
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.broadcast import HEAD_BYTES, pack, unpack
from andon_trainer.averaging.collectives import SoloCollectives
from andon_trainer.averaging.solo_gate import SoloGate
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import StepReport, Timings
from andon_trainer.model.layout import ModelPlan, plan_model
from andon_trainer.place.solo import SoloMember
from andon_trainer.schedules.manual import ManualStepper
from andon_trainer.state.replica import Replica


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(device="cpu")
    yield line
    line.close()


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))


def backward(model: nn.Module, factor: float = 1.0) -> None:
    loss = factor * model(torch.ones(2, 3)).square().sum()
    loss.backward()


def test_each_model_and_its_optimizer_move_once_a_step(line: Line) -> None:
    generator, discriminator = models()
    line.join(generator, discriminator)
    steps = []

    for _ in range(3):
        for model in (generator, discriminator):
            model.zero_grad()
            backward(model)
            line.all_reduce_gradients(model, weight=2)
        steps.append((line.should_commit(), line.committed, line.step))

    assert steps == [(True, True, 1), (True, True, 2), (True, True, 3)]
    assert line.loss is None


def test_alone_the_mean_is_the_gradient_and_none_where_there_is_none(line: Line) -> None:
    generator, discriminator = models()
    line.join(generator, discriminator)
    backward(generator)
    expected = [part.grad.clone() for part in generator.parameters() if part.grad is not None]

    line.all_reduce_gradients(generator)
    line.all_reduce_gradients(discriminator)

    for parameter, gradient in zip(generator.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in discriminator.parameters())


def test_a_backward_that_adds_to_a_finished_mean_is_refused_by_name(line: Line) -> None:
    generator, discriminator = models()
    line.join(generator, discriminator)
    backward(discriminator)
    line.all_reduce_gradients(discriminator)
    backward(generator)
    backward(discriminator)  # as a generator's loss does, on its way to the generator
    line.all_reduce_gradients(generator)

    with pytest.raises(RuntimeError, match=r"1\.[01]\.\w+ got a gradient .* last backward"):
        line.should_commit()
    line.all_reduce_gradients(discriminator)  # After its last backward.
    assert line.should_commit()


def test_a_gradient_between_the_commit_and_the_optimizers_step_is_refused_by_name(
    line: Line,
) -> None:
    generator, discriminator = models()
    line.join(generator, discriminator)
    backward(generator)
    line.all_reduce_gradients(generator)
    assert line.should_commit()
    backward(generator)

    torch.optim.SGD(discriminator.parameters()).step()
    with pytest.raises(RuntimeError, match=r"0\.\w+ got a gradient"):
        torch.optim.SGD(generator.parameters()).step()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_refused_and_counts_as_no_call(line: Line, weight: float) -> None:
    generator, _ = models()
    line.join(generator)

    with pytest.raises(ValueError, match="weight must be finite and at least 0"):
        line.all_reduce_gradients(generator, weight=weight)

    assert line.should_commit()


def test_weights_that_sum_to_0_are_refused_and_leave_no_local_gradient(line: Line) -> None:
    generator, _ = models()
    line.join(generator)
    backward(generator)

    with pytest.raises(ValueError, match="the weight 0, so there is no mean"):
        line.all_reduce_gradients(generator, weight=0)

    assert all(part.grad is not None and not part.grad.any() for part in generator.parameters())


def test_f_dp_003_a_nan_halts_and_the_step_is_begun_anew(line: Line) -> None:
    generator, discriminator = models()
    line.join(generator, discriminator)
    backward(generator)
    line.all_reduce_gradients(generator)
    backward(discriminator, float("nan"))

    with pytest.raises(LineHalted) as caught:
        line.all_reduce_gradients(discriminator)

    assert (caught.value.reason, caught.value.step) == ("non_finite_gradient", 1)
    assert caught.value.parameter.startswith("1.")
    assert all(part.grad is None for part in generator.parameters())
    assert line.should_commit()
    assert line.step == 1


def test_what_is_rank_0s_alone_is_ones_own(line: Line) -> None:
    _, discriminator = models()
    line.join(discriminator)
    before = {name: each.clone() for name, each in discriminator.state_dict().items()}
    tensor = torch.tensor([1.0, float("nan")])

    line.barrier()
    line.sync_buffers(discriminator)
    line.sync_params(discriminator)
    line.broadcast(tensor)

    assert tensor[0] == 1
    for name, each in discriminator.state_dict().items():
        assert torch.equal(each, before[name])
    with pytest.raises(ValueError, match="tensor is sparse"):
        line.broadcast(torch.eye(2).to_sparse())


def test_the_line_is_complete_after_its_steps_or_when_a_script_stops_it() -> None:
    steps = []
    for line, most in ((Line(device="cpu", total_steps=2), 9), (Line(device="cpu"), 3)):
        line.join(models()[0])
        while not line.complete:
            if line.step == most - 1:
                line.stop("enough")
            assert line.should_commit()
        steps.append((line.step, line.stopped))
        line.close()

    assert steps == [(2, "steps"), (3, "enough")]


def test_a_run_that_ends_before_a_step_can_ends_the_script_s_loop_and_no_more(line: Line) -> None:
    model, _ = models()
    line.join(model)
    backward(model)
    assert line.should_commit()

    member: Any = line._session.member
    # Somebody drained it, while nobody could finish a step.
    member.position = replace(member.position, stop_reason="drained")
    backward(model)
    line.sync_params(model)
    line.all_reduce_gradients(model)
    committed = line.should_commit()

    assert (committed, line.complete, line.step) == (False, True, 1)
    assert model.weight.grad is None
    with pytest.raises(RunOver, match=r"drained.*while not line\.complete") as over:
        line.barrier()
    assert over.value.exit_code == 1


def test_a_worker_that_took_itself_for_another_rank_computes_the_first_step_again() -> None:
    line = Line(device="cpu", launch_slot=1, launch_size=2)
    generator, _ = models()
    line.join(generator)
    answers = []

    for _ in range(2):
        view = (line.rank, line.world_size)
        backward(generator)
        line.all_reduce_gradients(generator)
        answers.append((*view, line.should_commit()))

    assert answers == [(1, 2, False), (0, 1, True)]
    assert line.step == 1
    line.close()


def test_a_number_is_averaged_between_two_steps_and_not_within_one(line: Line) -> None:
    generator, _ = models()
    line.join(generator)

    assert line.mean(3) == 3
    line.barrier()
    with pytest.raises(RuntimeError, match="step 1 is under way"):
        line.mean(3)
    assert line.should_commit()
    assert line.mean(4) == 4


def test_the_two_ways_of_joining_are_not_mixed(line: Line) -> None:
    generator, discriminator = models()
    with pytest.raises(RuntimeError, match=r"call line\.join\(model, \.\.\.\)"):
        line.barrier()
    line.join(generator)

    calls: list[Callable[[], object]] = [
        lambda: line.backward(torch.zeros(())),
        lambda: line.shards(10, 2),
        lambda: next(line.epochs(1)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"this script called line\.join"):
            call()
    with pytest.raises(RuntimeError, match=r"belongs to line\.prepare"), line.accumulate(2):
        pass
    with pytest.raises(RuntimeError, match="called already"):
        line.join(discriminator)
    with pytest.raises(ValueError, match="was not joined"):
        line.all_reduce_gradients(discriminator)


def test_what_can_not_be_joined_is_named(line: Line) -> None:
    generator, _ = models()

    with pytest.raises(TypeError, match="not SGD: give an optimizer"):
        line.join(generator, torch.optim.SGD(generator.parameters()))  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(ValueError, match="weight belongs to two of the joined modules"):
        line.join(generator, nn.Sequential(generator, nn.Linear(2, 1)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0, 3.5], dtype=torch.bfloat16),
        torch.tensor(2**53 + 1, dtype=torch.int64),
        torch.tensor([[True, False]]),
        torch.randn(3, 2, dtype=torch.complex64).t(),
        torch.empty(0, 4, dtype=torch.float64),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_bundle_brings_any_type_bit_for_bit(tensor: torch.Tensor) -> None:
    tensors = {"before": torch.tensor([1], dtype=torch.uint8), "it": tensor}
    bundle = pack("broadcast", tensors, filled=True)
    others = {name: torch.zeros_like(each) for name, each in tensors.items()}

    unpack(bundle, others)

    assert pack("broadcast", others, filled=True).tobytes() == bundle.tobytes()
    assert bundle.size == HEAD_BYTES + 1 + tensor.nbytes


def test_a_bundles_head_tells_calls_and_tensors_apart() -> None:
    tensor = torch.zeros(2, 3)
    bundles = [
        pack("broadcast", {"it": tensor}, filled=True),
        pack("sync_params", {"it": tensor}, filled=True),
        pack("broadcast", {"other": tensor}, filled=True),
        pack("broadcast", {"it": tensor.reshape(3, 2)}, filled=True),
        pack("broadcast", {"it": tensor.int()}, filled=True),
    ]

    heads = {bundle[:HEAD_BYTES].tobytes() for bundle in bundles}

    assert len(heads) == len(bundles)


def alone_with(member: SoloMember, plan: ModelPlan) -> SoloCollectives:
    return SoloCollectives(SoloGate(member, TrainedModels(plan=plan, device=torch.device("cpu"))))


class ReportingMember(SoloMember):
    """Keeps what was reported of each step."""

    def __init__(self) -> None:
        super().__init__(RunPlan(global_batch=1))
        self.timings: list[Timings] = []

    def report(self, report: StepReport) -> None:
        self.timings.append(report.timings)
        super().report(report)


def test_a_step_reports_the_scripts_own_time_and_that_no_device_was_clocked() -> None:
    model, member = models()[0], ReportingMember()
    plan = plan_model([model])
    collectives = alone_with(member, plan)
    began = time.perf_counter()
    stepper = ManualStepper(
        member,
        collectives,
        plan,
        Replica([model]),
        view=lambda: (0, 1),
        between_steps=lambda: None,
    )
    computed = []

    for _ in range(2):
        model.zero_grad()
        since = time.perf_counter()
        backward(model)
        computed.append(time.perf_counter() - since)
        stepper.average(model, 1.0)
        assert stepper.should_commit()
    whole = time.perf_counter() - began
    stepper.close()

    for timings, least in zip(member.timings, computed, strict=True):
        assert timings.compute_s >= least
        assert (timings.busy_s, timings.micro_batches, timings.computed) == (0.0, 0, 0)
    assert sum(timings.compute_s for timings in member.timings) <= whole


@pytest.mark.parametrize("synced", [False, True])
def test_weights_that_are_initialised_after_joining_are_told_of(
    line: Line, caplog: pytest.LogCaptureFixture, *, synced: bool
) -> None:
    model, _ = models()
    line.join(model)
    nn.init.normal_(model.get_parameter("weight").data)
    if synced:  # Now all workers have rank 0's.
        line.sync_params(model)

    for _ in range(2):
        line.all_reduce_gradients(model)

    told = ["weight was changed between line.join" in each.message for each in caplog.records]
    assert told == [True] * (not synced)


def test_a_scaler_is_refused_before_its_first_overflow_halts_the_line(line: Line) -> None:
    model, _ = models()
    old = torch.amp.GradScaler("cpu")
    old.scale(torch.ones(()))  # Of an earlier cell of a notebook.
    line.join(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()

    with pytest.raises(RuntimeError, match=r"GradScaler that was not prepared: .* bfloat16"):
        line.all_reduce_gradients(model)


class OneOfTwo(SoloMember):
    """A place beside another worker, who gives nothing."""

    def next_round(self) -> Assigned:
        return replace(super().next_round(), roster=(0, 1))


def beside_another(model: nn.Module) -> ManualStepper:
    plan = plan_model([model])
    member = OneOfTwo(RunPlan(global_batch=1))
    collectives = alone_with(member, plan)
    return ManualStepper(
        member,
        collectives,
        plan,
        Replica([model]),
        view=lambda: (0, 2),
        between_steps=lambda: None,
    )


@pytest.mark.parametrize(("synced", "training"), [(False, True), (True, True), (False, False)])
def test_a_buffer_that_steps_of_several_workers_change_is_told_of_unless_it_is_copied(
    caplog: pytest.LogCaptureFixture, *, synced: bool, training: bool
) -> None:
    model = models()[1].train(training)
    stepper = beside_another(model)

    for _ in range(4):
        backward(model)
        stepper.average(model, 1.0)
        if synced:
            stepper.sync_buffers(model)
        assert stepper.should_commit()
    stepper.close()

    told = "a step changes the buffer 1.running_mean and 2 others, and each worker keeps its own"
    assert [told in each for each in caplog.messages] == [True] * (training and not synced)


def test_a_hook_on_a_parameter_that_several_workers_average_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = models()[0]
    stepper = beside_another(model)
    name, part = next(iter(model.named_parameters()))
    part.register_hook(torch.neg)  # type: ignore[no-untyped-call]  # torch's own

    backward(model)
    stepper.average(model, 1.0)
    stepper.close()

    (told,) = caplog.messages
    assert f"{name} has a hook (register_hook)" in told
    assert "between line.all_reduce_gradients(model) and optimizer.step()" in told
