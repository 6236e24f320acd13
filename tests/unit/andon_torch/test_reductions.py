"""Reductions by type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from andon_torch.reductions import TorchReduce, reduction_of
from andon_torch.tensors import bytes_of

INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def reduced(op: Any, dtype: torch.dtype, *rows: list[Any], into: int | None = None) -> Tensor:
    tensors = [torch.tensor(row).to(dtype) for row in rows]
    views = [bytes_of(each) for each in tensors]
    result = torch.zeros(len(rows[0])).to(dtype) if into is None else tensors[into]
    out = bytes_of(result)
    TorchReduce(reduction_of(op, dtype), dtype, len(rows))(out, views, last=True)
    return result


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_numbers_are_reduced_by_every_operation(dtype: torch.dtype) -> None:
    rows = [5, 2], [3, 8], [1, 5]

    assert reduced(ReduceOp.SUM, dtype, *rows).tolist() == [9, 15]
    assert reduced(ReduceOp.AVG, dtype, *rows).tolist() == [3, 5]
    assert reduced(ReduceOp.PRODUCT, dtype, *rows).tolist() == [15, 80]
    assert reduced(ReduceOp.MIN, dtype, *rows).tolist() == [1, 2]
    assert reduced(ReduceOp.MAX, dtype, *rows).tolist() == [5, 8]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_bits_are_reduced(dtype: torch.dtype) -> None:
    rows = [1, 0, 1], [1, 1, 0]

    assert reduced(ReduceOp.BAND, dtype, *rows).int().tolist() == [1, 0, 0]
    assert reduced(ReduceOp.BOR, dtype, *rows).int().tolist() == [1, 1, 1]
    assert reduced(ReduceOp.BXOR, dtype, *rows).int().tolist() == [0, 1, 1]


def test_a_sum_of_bools_is_or_and_a_product_is_and() -> None:
    rows = [True, False, True], [True, False, False]

    assert reduced(ReduceOp.SUM, torch.bool, *rows).tolist() == [True, False, True]
    assert reduced(ReduceOp.PRODUCT, torch.bool, *rows).tolist() == [True, False, False]


def test_complex_numbers_are_summed() -> None:
    assert reduced(ReduceOp.AVG, torch.complex64, [1 + 2j], [3 + 4j]).tolist() == [2 + 3j]


@pytest.mark.parametrize("into", range(4))
def test_the_result_may_lie_where_any_input_does(into: int) -> None:
    rows = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]

    assert reduced(ReduceOp.SUM, torch.float64, *rows, into=into).tolist() == [10, 100]


def test_sums_go_from_the_lowest_rank_to_the_highest() -> None:
    rows = [[1e16], [1.0], [-1e16], [1.0]]

    assert reduced(ReduceOp.SUM, torch.float64, *rows).item() == ((1e16 + 1.0) - 1e16) + 1.0


def test_a_mean_is_divided_in_the_last_reduction_only() -> None:
    given, out = torch.full((1,), 6.0), torch.zeros(1)
    views = [bytes_of(each) for each in (given, out)]
    reduce = TorchReduce("avg", torch.float32, 4)

    reduce(views[1], [views[0], views[0]], last=False)
    assert out.item() == 12
    reduce(views[1], [views[1]], last=True)
    assert out.item() == 3


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.BAND, torch.float32),
        (ReduceOp.MAX, torch.complex64),
        (ReduceOp.AVG, torch.bool),
        (ReduceOp.SUM, torch.float8_e5m2),
    ],
)
def test_what_has_no_meaning_is_refused(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(NotImplementedError, match="andon has no reduction"):
        reduction_of(op, dtype)
