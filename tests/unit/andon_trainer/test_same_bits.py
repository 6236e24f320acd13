"""`same_bits` in a script that is alone: what is a grain, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.records import PositionRange
from andon_trainer import Line
from andon_trainer.data.feed import Share
from andon_trainer.data.orders import BatchOrders

DATA = TensorDataset(torch.arange(22.0).reshape(22, 1))


def prepared(
    line: Line, net: nn.Module, *, micro: int | None = 3, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader: Any = DataLoader(DATA, **(options or {"batch_size": 8}))
    return line.prepare(net, optimizer, loader, micro_batch_size=micro)  # type: ignore[no-any-return]  # prepare gives back what it takes


def test_a_loop_body_has_a_grain() -> None:
    sizes = []
    with Line(same_bits=True) as line:
        net, optimizer, loader = prepared(line, nn.Linear(1, 1))
        for _ in line.epochs(1):
            for (x,) in loader:
                sizes.append(len(x))
                optimizer.zero_grad()
                line.backward(F.mse_loss(net(x), x))
                optimizer.step()

        assert sizes == [3, 3, 2, 3, 3, 2, 3, 3]
        assert len(loader) == 8


def test_a_grain_of_no_weight_is_absent() -> None:
    weights = []
    for counted in (None, 0.0):
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        with Line(same_bits=True, total_steps=1) as line:
            net, optimizer, loader = prepared(line, net)  # type: ignore[assignment]  # the same object
            for _ in line.epochs(1):
                for number, (x,) in enumerate(loader):
                    optimizer.zero_grad()
                    loss = (net(x) * (float("nan") if number == 1 and counted == 0 else 1)).mean()
                    line.backward(loss, weight=counted if number == 1 else None)
                    optimizer.step()
        weights.append(net.weight.item())

    # Positions 0 to 7; the second grain's 3, 4, 5 do not count in the second run.
    expected = [1 - 0.01 * mean for mean in (28 / 8, (0 + 1 + 2 + 6 + 7) / 5)]
    assert weights == pytest.approx(expected)


def test_samples_of_a_batch_sampler_stand_at_their_positions() -> None:
    batches = [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]
    orders = BatchOrders(batches, DATA, seed=0, spread=False)

    def pieces(start: int, stop: int) -> list[tuple[list[int], int, int]]:
        share = Share(
            0,
            (PositionRange(start, stop),),
            batch=PositionRange(start // 5 * 5, start // 5 * 5 + 5),
            grain=2,
        )
        return [(each.indices, each.start, each.positions) for each in orders.pieces(share, 2)]

    assert pieces(0, 5) == [([0, 1], 0, 2), ([2, 3], 2, 2), ([4], 4, 1)]
    assert pieces(5, 10) == [([5, 6], 5, 5)]  # The other grains hold no sample.
    assert pieces(12, 14) == [([9, 10], 12, 2)]


def test_a_batch_larger_than_those_of_the_first_epoch_is_refused() -> None:
    class Growing:
        epoch = 0

        def __iter__(self) -> Any:
            self.epoch += 1
            return iter([[0, 1], list(range(1 + self.epoch))])

    orders = BatchOrders(Growing(), DATA, seed=0, spread=False)

    assert orders.enter(0)
    with pytest.raises(ValueError, match="a batch can't grow"):
        orders.enter(1)


def tuned(net: nn.Module) -> Any:
    """A module as mode="max-autotune" makes it; the mode itself would load the whole compiler."""
    compiled: Any = torch.compile(net, backend="eager")
    compiled.dynamo_ctx.compiler_config = {"max_autotune": True}
    return compiled


def itself(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def dynamic(net: nn.Module) -> Any:
    return torch.compile(net, dynamic=True, backend="eager")


@pytest.mark.parametrize(
    ("net", "micro", "why"),
    [
        (nn.Linear(1, 1), None, r"micro_batch_size=8"),
        (nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)), 3, "1 is a SyncBatchNorm"),
    ],
    ids=["no-size", "sync-batch-norm"],
)
def test_what_is_no_grain_is_refused_by_name(net: Any, micro: int | None, why: str) -> None:
    with Line(same_bits=True) as line, pytest.raises(ValueError, match=why):
        prepared(line, net, micro=micro)


@pytest.mark.parametrize("first", [True, False], ids=["compiled-first", "prepared-first"])
def test_each_size_of_a_compiled_model_has_a_graph_of_its_own(first: bool) -> None:
    graphs: list[list[Any]] = []
    # All compiled modules of torch's own share one code object, which may have as many graphs as it
    # is allowed, from other tests: then nothing more is compiled.
    torch.compiler.reset()

    def backend(graph: Any, inputs: list[torch.Tensor]) -> Any:
        graphs.append([size for each in inputs for size in each.shape])
        return graph.forward

    net: Any = nn.Linear(1, 1)
    with Line(same_bits=True, total_steps=4) as line:
        given: Any = torch.compile(net, backend=backend) if first else net
        compiled: Any
        compiled, optimizer, loader = prepared(line, given)
        compiled = compiled if first else torch.compile(net, backend=backend)
        for _ in line.epochs(2):
            for (x,) in loader:  # Of 3 and of 2 samples.
                optimizer.zero_grad()
                line.backward(F.mse_loss(compiled(x), x))
                optimizer.step()

    assert len(graphs) == 2
    assert all(type(size) is int for sizes in graphs for size in sizes)


def test_rows_of_other_grains_are_refused_in_a_loop_body() -> None:
    with Line(same_bits=True) as line:
        _, _, loader = prepared(line, nn.Linear(1, 1))
        (x,) = next(iter(loader))

        with pytest.raises(RuntimeError, match="gather between two steps"):
            line.gather(x)


@pytest.mark.parametrize(
    ("compiled", "why"), [(dynamic, "dynamic=False"), (tuned, "by their time"), (itself, "see how")]
)
def test_a_model_whose_kernels_may_differ_is_refused(compiled: Any, why: str) -> None:
    with Line(same_bits=True) as line, pytest.raises(ValueError, match=why):
        prepared(line, compiled(nn.Linear(1, 1)), micro=3)


def test_manual_steps_are_refused() -> None:
    with (
        Line(same_bits=True) as line,
        pytest.raises(ValueError, match=r"same_bits is for line\.prepare"),
    ):
        line.join(nn.Linear(1, 1))


def test_a_mean_by_workers_is_refused_with_the_remedy() -> None:
    with Line(same_bits=True) as line:
        prepared(line, nn.Linear(1, 1))

        with pytest.raises(RuntimeError, match=r"line\.tally\(loss_sum, n\)"):
            line.mean(1.0)


def test_a_gradient_that_would_be_added_to_a_grains_is_refused() -> None:
    with Line(same_bits=True) as line:
        net, _, loader = prepared(line, nn.Linear(1, 1))
        (x,) = next(iter(loader))
        F.mse_loss(net(x), x).backward()  # type: ignore[no-untyped-call]  # torch's own

        with pytest.raises(RuntimeError, match=r"optimizer\.zero_grad\(\) first"):
            line.backward(F.mse_loss(net(x), x))
