"""What a script prepares: models that stay where they are, and models that are refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from andon_trainer import Line
from andon_trainer.schedules.loop_checks import check_device
from andon_trainer.script.prepared import Prepared, is_on_several_devices, place, refuse_modules
from unit.andon_trainer.gpus import needs_cuda
from unit.andon_trainer.solo import SAMPLES, data, model

CPU, META = torch.device("cpu"), torch.device("meta")


class Mapped(nn.Sequential):
    """As transformers returns a model: it has a map, and refuses to move."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 1))
        self.hf_device_map = {"": "cpu"}

    def to(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"a dispatched model can't be moved to {arguments}, {named}")


def test_a_model_with_a_device_map_is_left_where_it_is(line: Line) -> None:
    net = Mapped()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    loader: Any = DataLoader(data(), 8)
    net, optimizer, loader = line.prepare(net, optimizer, loader)
    before = net[0].weight.clone()

    for x, y, _ in loader:
        optimizer.zero_grad()
        line.backward((net(x) - y).square().mean())
        optimizer.step()

    assert not torch.equal(net[0].weight, before)


def test_a_model_on_several_devices_is_not_moved_and_not_missed() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    place(net, CPU)

    assert is_on_several_devices(net)
    assert {part.device for part in net.parameters()} == {CPU, META}


@needs_cuda
def test_a_model_on_a_gpu_and_the_cpu_trains_as_on_one_device() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(5, 7).to("cuda"), nn.Linear(7, 1)
    twins = copy.deepcopy(first).cpu(), copy.deepcopy(last)
    nets: Any = nn.ModuleList([first, last])
    parts = [*twins[0].parameters(), *twins[1].parameters()]
    optimizer: Any = torch.optim.SGD(nets.parameters(), lr=0.1)
    plain = torch.optim.SGD(parts, lr=0.1)
    loader: Any = DataLoader(data(), 8)
    line = Line(device="cuda")
    nets, optimizer, loader = line.prepare(nets, optimizer, loader, micro_batch_size=3)

    for x, y, _ in loader:
        optimizer.zero_grad()
        line.backward((last(torch.tanh(first(x)).cpu()) - y.cpu()).square().mean())
        optimizer.step()
    line.close()
    x, y, _ = data().tensors
    for start in range(0, SAMPLES, 8):
        rows = slice(start, start + 8)
        plain.zero_grad()
        (twins[1](torch.tanh(twins[0](x[rows]))) - y[rows]).square().mean().backward()
        plain.step()

    assert {part.device.type for part in nets.parameters()} == {"cuda", "cpu"}
    for ours, theirs in zip(nets.parameters(), parts, strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_a_mapped_model_on_another_device_says_how_to_load_it() -> None:
    with pytest.raises(RuntimeError, match=r'is on cpu.*device_map=\{"": line.device\}'):
        check_device([Mapped()], torch.device("cuda", 1))


def test_a_weight_without_values_is_refused_by_its_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    with pytest.raises(ValueError, match=r"1\.weight is on the meta device.*offload"):
        Prepared.sort([net])


def test_an_embedding_that_renormalises_itself_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^0 has max_norm.*line.committed"):
        refuse_modules([nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))])


def test_a_sync_batch_norm_says_that_it_works_as_a_batch_norm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_modules([nn.Sequential(nn.SyncBatchNorm(2))])

    assert ["0 is a SyncBatchNorm" in message for message in caplog.messages] == [True]


def test_a_sync_batch_norm_in_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    with pytest.raises(ValueError, match=r"leave convert_sync_batchnorm.*--average-buffers"):
        refuse_modules([nn.SyncBatchNorm(2)])


def test_a_sparse_gradient_becomes_dense_alone_as_it_does_on_a_line(line: Line) -> None:
    net = nn.Sequential(nn.Embedding(SAMPLES, 2, sparse=True), nn.Linear(2, 1))
    # Adam, and decay of weights, take dense gradients only.
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    loader: Any = DataLoader(data(), 8)
    net, optimizer, loader = line.prepare(net, optimizer, loader, micro_batch_size=3)
    twin = copy.deepcopy(net)
    twin[0].sparse = False
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)

    for _, y, word in loader:
        optimizer.zero_grad()
        line.backward((net(word) - y).square().mean())
        optimizer.step()
    _, y, word = data().tensors
    for start in range(0, SAMPLES, 8):
        plain.zero_grad()
        rows = slice(start, start + 8)
        (twin(word[rows]) - y[rows]).square().mean().backward()
        plain.step()

    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", ["prepare", "join"])
def test_a_data_parallel_inside_is_refused(line: Line, call: str) -> None:
    with pytest.raises(TypeError, match=r"leave DataParallel\(\.\.\.\) out"):
        getattr(line, call)(nn.Sequential(nn.DataParallel(model())))


@pytest.mark.parametrize("call", ["prepare", "join"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_part_that_torchscript_compiled_is_refused_by_its_name(
    line: Line, call: str, *, inside: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch says that TorchScript is old.
        trace: Any = torch.jit.trace
        traced = trace(model(), torch.zeros(2, 5))
    made = nn.Sequential(traced) if inside else traced
    name = "0" if inside else "TopLevelTracedModule"

    with pytest.raises(TypeError, match=rf"^{name} is compiled by TorchScript .* torch\.compile"):
        getattr(line, call)(made)


@pytest.mark.parametrize("call", ["prepare", "join"])
@pytest.mark.parametrize("of", ["parameters", "buffers"])
def test_a_lazy_layer_says_to_run_one_forward(line: Line, call: str, of: str) -> None:
    lazy = nn.LazyLinear(3) if of == "parameters" else nn.LazyBatchNorm1d(affine=False)
    net = nn.Sequential(nn.Linear(5, 3), lazy)
    optimizer = [torch.optim.SGD(net.parameters(), lr=0.1)] if call == "prepare" else []

    with pytest.raises(ValueError, match=r"^1\..* run one forward before line\.prepare"):
        getattr(line, call)(net, *optimizer)
    with torch.no_grad():
        net(torch.zeros(2, 5))

    getattr(line, call)(net, *optimizer)
