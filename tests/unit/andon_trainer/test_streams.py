"""A script alone with a stream: its epochs, its end, a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, IterableDataset

from andon_trainer import Line
from unit.andon_trainer.solo import BATCH, model
from unit.andon_trainer.streams import Plain


class Rows(IterableDataset[Any]):
    """Rows for the small model, with a length if it says one."""

    def __init__(self, size: int, says: int | None = None) -> None:
        self._rows = Plain(size)
        self._says = says

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        if self._says is None:
            raise TypeError("no length")
        return self._says


def trained(loader: Any, epochs: int, **settings: Any) -> tuple[list[float], Any, Any]:
    """Losses, model and loader of a script that trains alone."""
    micro = settings.pop("micro", None)
    with Line(device="cpu", **settings) as line:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = ExponentialLR(optimizer, 0.9)
        net, optimizer, scheduler, loader = line.prepare(
            net, optimizer, scheduler, loader, micro_batch_size=micro
        )
        losses = []
        for _epoch in line.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
                scheduler.step()
                if line.committed:
                    assert line.loss is not None
                    losses.append(line.loss)
    return losses, net, loader


def plain(loader: Any, epochs: int) -> tuple[list[float], Any]:
    """The same script without a line."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.9)
    losses = []
    for _epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses, net


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {}),
        (16, {}),
        (22, {}),
        (16, {"drop_last": True}),
        (22, {"drop_last": True}),
        (22, {"num_workers": 1}),
    ],
)
@pytest.mark.parametrize("says", [False, True])
def test_f_dp_005_a_stream_trains_as_it_does_in_plain_pytorch(
    size: int, options: dict[str, Any], *, says: bool
) -> None:
    stream = Rows(size, size if says else None)

    losses, net, _ = trained(DataLoader(stream, BATCH, **options), 3)

    expected, other = plain(DataLoader(stream, BATCH, drop_last="drop_last" in options), 3)
    assert losses == expected
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_micro_batches_of_a_stream_that_ends_within_them_are_one_step() -> None:
    stream = Rows(22)

    losses, net, _ = trained(DataLoader(stream, BATCH), 2, micro=3)

    expected, other = plain(DataLoader(stream, BATCH), 2)
    assert losses == pytest.approx(expected)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_prepared_loader_has_a_length_only_if_the_stream_says_one() -> None:
    _, _, unknown = trained(DataLoader(Rows(22), BATCH), 1)
    _, _, known = trained(DataLoader(Rows(22, 22), BATCH), 1)

    assert len(known) == 3
    with pytest.raises(TypeError, match=r"'Rows' has no len\(\)"):
        len(unknown)


def test_an_object_with_nothing_but_iter_is_trained_on() -> None:
    losses, _, _ = trained(DataLoader(Plain(22), BATCH), 1)  # type: ignore[arg-type]  # no Dataset

    assert losses == plain(DataLoader(Rows(22), BATCH), 1)[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_resumed_in_the_middle_of_a_streams_epoch(tmp_path: Path, workers: int) -> None:
    def stream() -> Any:
        return DataLoader(Rows(30), 4, num_workers=workers)

    whole, net, _ = trained(stream(), 2, seed=3)
    trained(
        stream(), 2, seed=3, run_id="first", run_dir=tmp_path, checkpoint_every=5, total_steps=13
    )

    checkpoint = tmp_path / "checkpoints" / "step-00000010"  # of 8 steps an epoch: the second one
    rest, again, _ = trained(stream(), 2, seed=3, resume=checkpoint)

    assert rest == whole[10:]
    assert all(map(torch.equal, net.parameters(), again.parameters()))
