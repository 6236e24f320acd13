"""Averaged running statistics: where they travel, and what a void step leaves of them."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Policy
from andon_trainer.averaging.block_numbers import rooms_for
from andon_trainer.averaging.running_statistics import MeanStatistics
from andon_trainer.model.layout import plan_model
from unit.andon_trainer.assigned_work import work
from unit.andon_trainer.seat import Seat

Floats = npt.NDArray[np.float32]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def forward(model: nn.Module, seed: int) -> None:
    model(torch.randn(6, 2, generator=torch.Generator().manual_seed(seed)))


def norm_of(model: nn.Sequential) -> nn.BatchNorm1d:
    layer = model[1]
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


def statistics_of(model: nn.Sequential) -> torch.Tensor:
    layer = norm_of(model)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return torch.cat([layer.running_mean, layer.running_var])


class HalfSeat(Seat):
    """A place beside one other worker of the same weight, whose change is half of this one's."""

    def answer(self) -> None:
        for block, flat in self.submitted.items():
            self.averages[block][:] = 0.75 * flat


def seated(model: nn.Module, *, void_at: int | None = None) -> tuple[HalfSeat, MeanStatistics]:
    seat = HalfSeat(plan_model([model]).layout)
    seat.policy = Policy(average_buffers=True)
    seat.void_at = void_at
    return seat, MeanStatistics(seat.averaging, [model])


@pytest.mark.parametrize(
    ("sizes", "elements", "expected"),
    [
        ([5, 3, 4], 3, [range(1, 2)]),
        ([5, 3, 4], 4, [range(2, 3)]),
        ([5, 3, 4], 6, [range(1, 3)]),
        ([5, 2, 4, 3], 7, [range(0, 2)]),
        ([4, 4, 4], 4, [range(0, 1)]),
        ([2, 3], 5, [range(0, 2)]),
        ([2, 3], 11, [range(0, 2), range(0, 2), range(0, 1)]),
    ],
    ids=["least", "exact", "neighbours", "first of equals", "first block", "all", "more than all"],
)
def test_statistics_travel_in_the_least_blocks_that_have_room(
    sizes: list[int], elements: int, expected: list[range]
) -> None:
    assert list(rooms_for(sizes, elements)) == expected


def test_a_commit_moves_floats_by_the_mean_of_the_changes_and_not_before() -> None:
    model = net()
    seat, statistics = seated(model)
    statistics.begin()
    start = statistics_of(model)
    forward(model, 1)
    mine = statistics_of(model)

    assert statistics.exchange(3.0)
    before = statistics_of(model)
    statistics.apply()

    assert torch.equal(before, mine)
    assert torch.allclose(statistics_of(model), start + 0.75 * (mine - start))
    assert [(call.sequence, weight) for call, weight in seat.calls] == [(0, 3.0), (1, 1.0)]
    assert [call.data is None for call, _ in seat.calls] == [True, False]
    assert seat.held


@pytest.mark.parametrize(
    ("encoding", "exact"),
    [(Encoding.BFLOAT16, False), (Encoding.INT8_BLOCK, True), (Encoding.TOPK, True)],
)
def test_changes_travel_as_float32_where_their_loss_would_never_be_sent(
    encoding: Encoding, *, exact: bool
) -> None:
    model = net()
    seat, statistics = seated(model)
    seat.policy = Policy(average_buffers=True, encoding=encoding)
    statistics.begin()
    forward(model, 1)

    assert statistics.exchange(1.0)

    (call, _), _ = seat.calls
    wanted = Encoding.FLOAT32 if exact else encoding
    assert (call.encoding(seat.policy), call.answer_encoding(seat.policy)) == (wanted, wanted)


def test_what_has_no_room_in_all_blocks_together_travels_in_several_exchanges() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(9, affine=False))
    seat, statistics = seated(model)
    statistics.begin()
    model[1](torch.randn(4, 9))
    mine = statistics_of(model)
    start = torch.cat([torch.zeros(9), torch.ones(9)])

    assert statistics.exchange(1.0)
    statistics.apply()

    assert [call.sequence for call, _ in seat.calls] == list(range(10))
    assert torch.allclose(statistics_of(model), start + 0.75 * (mine - start))


def test_a_void_step_leaves_the_lines_values_until_its_gradient_is_used_again() -> None:
    model = net()
    _, statistics = seated(model)
    statistics.begin()
    start = statistics_of(model)
    forward(model, 1)
    statistics.keep()
    mine = statistics_of(model)

    statistics.put_away()
    waiting = statistics_of(model)
    statistics.take_out()

    assert torch.equal(waiting, start)
    assert torch.equal(statistics_of(model), mine)
    assert norm_of(model).num_batches_tracked == 1


def test_a_step_that_is_computed_again_begins_with_the_lines_values() -> None:
    model = net()
    seat, statistics = seated(model, void_at=1)
    statistics.begin()
    start = statistics_of(model)
    forward(model, 1)
    statistics.keep()

    assert not statistics.exchange(1.0)
    statistics.put_away()
    statistics.begin()
    forward(model, 2)
    twin = net()
    forward(twin, 2)
    seat.void_at = None
    assert statistics.exchange(1.0)
    statistics.apply()

    assert torch.allclose(statistics_of(model), start + 0.75 * (statistics_of(twin) - start))


def test_what_forward_did_between_two_steps_goes_into_the_next_mean() -> None:
    model = net()
    _, statistics = seated(model)
    statistics.begin()
    forward(model, 1)
    assert statistics.exchange(1.0)
    statistics.apply()
    agreed = statistics_of(model)

    forward(model, 2)
    statistics.begin()
    forward(model, 3)
    mine = statistics_of(model)
    assert statistics.exchange(1.0)
    statistics.apply()

    assert torch.allclose(statistics_of(model), agreed + 0.75 * (mine - agreed))


def test_a_state_that_was_installed_is_what_the_next_change_starts_from() -> None:
    model, donor = net(), net()
    seat, statistics = seated(model)
    statistics.begin()
    for seed in range(5):
        forward(donor, seed)
    model.load_state_dict(donor.state_dict())
    seat.stand(installed_from=object())

    statistics.begin()
    assert statistics.exchange(1.0)
    statistics.apply()

    assert torch.equal(statistics_of(model), statistics_of(donor))


def test_a_worker_that_is_alone_exchanges_nothing_and_keeps_its_own() -> None:
    model = net()
    seat, statistics = seated(model)
    seat.stand(assigned=work())
    statistics.begin()
    forward(model, 1)
    mine = statistics_of(model)

    assert statistics.exchange(1.0)
    statistics.apply()

    assert torch.equal(statistics_of(model), mine)
    assert seat.held
    assert not seat.calls


def test_c_commit_001_a_mean_of_a_round_that_was_never_committed_is_not_the_next_ones() -> None:
    model = net()
    seat, statistics = seated(model)
    statistics.begin()
    forward(model, 1)
    assert statistics.exchange(1.0)  # The line halts before the commit, which the script catches.
    seat.stand(assigned=work())  # The next round has no other worker.
    forward(model, 2)
    mine = statistics_of(model)

    assert statistics.exchange(1.0)
    statistics.apply()

    assert torch.equal(statistics_of(model), mine)


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.FLOAT16])
def test_statistics_that_can_not_be_sent_are_left_out_and_the_log_names_the_layer(
    encoding: Encoding, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    seat, statistics = seated(model)
    seat.policy = Policy(average_buffers=True, encoding=encoding)
    statistics.begin()
    variance = norm_of(model).running_var
    assert variance is not None
    variance[1] = 1e6 if encoding is Encoding.FLOAT16 else torch.nan

    with caplog.at_level(logging.WARNING):
        assert statistics.exchange(1.0)
        assert statistics.exchange(1.0)
    statistics.apply()

    assert [weight for call, weight in seat.calls if call.data is None] == [0.0, 0.0]
    (record,) = caplog.records
    assert "the running statistics in 1 changed by" in record.getMessage()
    assert torch.equal(statistics_of(model), statistics_of(net()))


def test_a_variance_is_never_below_0() -> None:
    model = net()
    _, statistics = seated(model)
    statistics.begin()
    variance = norm_of(model).running_var
    assert variance is not None
    variance.fill_(1e-9)
    assert statistics.exchange(1.0)
    assert statistics._mean is not None
    statistics._mean *= 2  # As after a coarse encoding.

    statistics.apply()

    assert variance.tolist() == [0.0] * 3
