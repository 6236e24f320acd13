"""A footprint tells whether a loop body drew random numbers, or moved buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon_trainer.state.footprint import Footprint


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Linear(2, 2), ""),
        (nn.Dropout(0.5), "draws random numbers, as dropout does"),
        (nn.BatchNorm1d(2), "changes buffers, as BatchNorm does"),
    ],
)
def test_what_a_forward_leaves_behind_is_said(layer: nn.Module, said: str) -> None:
    before = Footprint([layer], torch.device("cpu"))

    layer(torch.ones(3, 2))

    assert before.since() == said
