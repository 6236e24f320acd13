"""Coupled samples: a loss that compares samples is noticed, once, and ordinary models are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from andon_trainer.averaging.step_gather import OwnRows
from andon_trainer.schedules.coupled_samples import CoupledSamples
from unit.andon_trainer.step_bench import StepBench

SAMPLES, WIDTH = 4, 6
Loss = Callable[[torch.Tensor], torch.Tensor]


def info_nce(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def barlow(z: torch.Tensor) -> torch.Tensor:
    return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()


FROZEN = torch.randn(32, WIDTH)
TABLE = nn.Embedding(10, WIDTH)
COUPLED: dict[str, Loss] = {
    "info nce": lambda z: info_nce(F.normalize(z), F.normalize(z.flip(1))),
    "of two views": lambda z: info_nce(torch.cat([z, z.flip(1)]), torch.cat([z.flip(1), z])),
    "with another term": lambda z: 0.5 * info_nce(z, z.tanh()) + z.mean(),
    "by einsum": lambda z: torch.einsum("id,jd->ij", z, z).logsumexp(1).mean(),
    "by distances": lambda z: torch.cdist(z, z).max(1).values.mean(),
    "by pairs": lambda z: F.pdist(z).mean(),
    "by differences": lambda z: (z[:, None] - z[None]).pow(2).sum(-1).min(1).values.mean(),
    "by cosines": lambda z: F.cosine_similarity(z[:, None], z[None], dim=-1).max(1).values.mean(),
    "with a table's rows": lambda z: info_nce(z, TABLE(torch.arange(len(z)))),
    "by a covariance": barlow,
}


class Encoder(nn.Module):
    """A layer that has a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, samples: int) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.randn(samples, WIDTH))
        return out


class Classifier(nn.Module):
    """As many classes as a batch has samples, and layers as wide."""

    def __init__(self, *, adapter: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SAMPLES, SAMPLES, bias=False), nn.ReLU(), nn.Linear(SAMPLES, SAMPLES)
        )
        self.centres = nn.Parameter(torch.randn(SAMPLES, SAMPLES))
        self.low = nn.Parameter(torch.randn(SAMPLES, 2))

    def forward(self, samples: int) -> torch.Tensor:
        x = self.layers(torch.randn(samples, SAMPLES))
        x = x @ (self.low @ self.low.T)  # As an adapter's product of weights.
        scores: torch.Tensor = x @ F.normalize(self.centres, dim=1).T
        return scores


class Transformer(nn.Module):
    """Attention over as many positions as there are samples, fused or not."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        layer = nn.TransformerEncoderLayer(8, 1 if not fused else 2, 16, batch_first=True)
        self.layer, self.fused = layer, fused
        self.head = nn.Linear(8, SAMPLES)

    def forward(self, samples: int) -> torch.Tensor:
        x = self.embedding(torch.randint(10, (samples, SAMPLES)))
        if not self.fused:
            x = (x @ x.mT).softmax(-1) @ x
        scores: torch.Tensor = self.head(self.layer(x)).mean(1)
        return scores


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "a classifier": Classifier,
    "attention": lambda: Transformer(fused=False),
    "fused attention": lambda: Transformer(fused=True),
}


@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_a_loss_that_compares_samples_is_noticed_once(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    check, encoder = CoupledSamples(), Encoder()

    for _ in range(2):
        check.look(loss(encoder(SAMPLES)), SAMPLES)

    assert [record.getMessage()[:39] for record in caplog.records] == [
        "the loss compares the samples of a batc"
    ]


def test_features_without_a_graph_are_noticed_when_they_follow_the_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check, encoder = CoupledSamples(), Encoder()

    check.look(info_nce(encoder(SAMPLES), FROZEN[:SAMPLES]), SAMPLES)
    assert caplog.text == ""
    check.look(info_nce(encoder(3), FROZEN[:3]), 3)

    assert "compares only its own 3" in caplog.text


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_models_are_not_though_classes_or_positions_are_as_many_as_samples(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    check, model = CoupledSamples(), make()

    for samples in (SAMPLES, 3, SAMPLES, 2):
        scores = model(samples)
        check.look(F.cross_entropy(scores, torch.arange(samples)), samples)

    assert caplog.text == ""


@pytest.mark.parametrize("own", [True, False], ids=["own rows", "all rows"])
def test_own_rows_against_all_are_noticed(caplog: pytest.LogCaptureFixture, *, own: bool) -> None:
    check = CoupledSamples()
    z = Encoder()(SAMPLES)
    mine: torch.Tensor = OwnRows.apply(z, 2.0)  # type: ignore[no-untyped-call]  # torch's own
    every = torch.cat([torch.randn(2, WIDTH), F.normalize(mine)])

    head = nn.Linear(WIDTH, WIDTH)(every)  # After the gather, on all rows.
    check.look_at_gathered((F.normalize(z if own else every) @ head.T).logsumexp(1).mean())

    assert ("compares this worker's own rows with those" in caplog.text) is own


@pytest.mark.parametrize(("workers", "warns"), [(1, False), (3, True)])
def test_a_worker_that_has_all_samples_is_told_nothing(
    workers: int, caplog: pytest.LogCaptureFixture, *, warns: bool
) -> None:
    bench = StepBench()
    bench.assign((0, SAMPLES), end="commit", roster=tuple(range(workers)))

    def coupled(_body: int, _loss: torch.Tensor) -> torch.Tensor:
        z = bench.model(bench.inputs[bench.computed[-1]])
        return info_nce(z, z)

    bench.spoil = coupled
    bench.run()

    assert ("docs/guide/coupled-losses.md" in caplog.text) is warns
