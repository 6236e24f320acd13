"""PyTorch's collectives as calls, on ranks in one process."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from andon_torch.process_group import AndonProcessGroup
from andon_torch.testing import CallsDiffered
from unit.andon_torch.torch_ranks import TorchRanks

C10D: Any = torch.distributed.distributed_c10d

DENSE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e5m2,
]  # fmt: skip


def inputs(size: int = 3, count: int = 5) -> list[Tensor]:
    return [torch.arange(count, dtype=torch.float32) + 10 * rank for rank in range(size)]


def options(kind: str, **values: Any) -> Any:
    made = getattr(C10D, f"{kind}Options")()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_all_reduce_gives_all_ranks_the_sum() -> None:
    ranks, given = TorchRanks(), inputs()
    expected = torch.stack(given).sum(0)

    ranks.all_call(lambda group: group.allreduce([given[group.rank()]]))

    assert all(torch.equal(each, expected) for each in given)


@pytest.mark.parametrize("name", ["allreduce", "allreduce_coalesced"])
def test_many_tensors_are_one_call(name: str) -> None:
    ranks = TorchRanks(2)
    given = [[torch.ones(3), torch.full((2, 2), 2.0)] for _ in range(2)]

    ranks.all_call(lambda group: getattr(group, name)(given[group.rank()]))

    assert all(float(each.sum()) in (6.0, 16.0) for row in given for each in row)
    assert [group._get_sequence_number_for_group() for group in ranks.groups] == [1, 1]


def test_only_the_root_gets_a_reduction() -> None:
    ranks, given = TorchRanks(), inputs()
    opts = options("Reduce", rootRank=1, reduceOp=ReduceOp.MAX)

    ranks.all_call(lambda group: group.reduce([given[group.rank()]], opts))

    assert torch.equal(given[1], inputs()[2])
    assert torch.equal(given[0], inputs()[0])


def test_reduce_scatter_of_lists_may_be_uneven() -> None:
    ranks = TorchRanks(2)
    outputs = [torch.zeros(1), torch.zeros(3)]
    given = [[torch.ones(1) * (rank + 1), torch.ones(3) * (rank + 5)] for rank in range(2)]

    ranks.all_call(
        lambda group: group.reduce_scatter([outputs[group.rank()]], [given[group.rank()]])
    )

    assert outputs[0].tolist() == [3]
    assert outputs[1].tolist() == [11, 11, 11]


@pytest.mark.parametrize("name", ["reduce_scatter_single", "_reduce_scatter_base"])
def test_reduce_scatter_of_one_tensor(name: str) -> None:
    ranks = TorchRanks(2)
    outputs = [torch.zeros(2) for _ in range(2)]
    opts = options("ReduceScatter", reduceOp=ReduceOp.AVG)

    ranks.all_call(
        lambda group: getattr(group, name)(
            outputs[group.rank()], torch.arange(4.0) * (group.rank() + 1), opts
        )
    )

    assert [each.tolist() for each in outputs] == [[0, 1.5], [3, 4.5]]


def test_broadcast_of_tensors_of_several_types() -> None:
    ranks = TorchRanks(2)
    given = [[torch.full((2,), rank + 1), torch.full((2,), rank + 0.5)] for rank in range(2)]

    ranks.all_call(
        lambda group: group.broadcast(given[group.rank()], options("Broadcast", rootRank=1))
    )

    assert given[0][0].tolist() == [2, 2]
    assert given[0][1].tolist() == [1.5, 1.5]


def test_all_gather_into_lists_and_into_one_tensor() -> None:
    ranks, given = TorchRanks(), inputs()
    lists = [[torch.zeros(5) for _ in range(3)] for _ in range(3)]
    whole = [torch.zeros(15) for _ in range(3)]

    ranks.all_call(lambda group: group.allgather([lists[group.rank()]], [given[group.rank()]]))
    ranks.all_call(lambda group: group._allgather_base(whole[group.rank()], given[group.rank()]))

    assert all(torch.equal(each, torch.cat(given)) for each in whole)
    assert all(torch.equal(torch.cat(each), torch.cat(given)) for each in lists)


def test_all_gather_coalesced_is_by_rank_then_by_input() -> None:
    ranks = TorchRanks(2)
    given = [[torch.full((1,), rank), torch.full((2,), rank + 0.5)] for rank in range(2)]
    outputs = [
        [[torch.zeros(1, dtype=torch.int64), torch.zeros(2)] for _ in range(2)] for _ in range(2)
    ]

    ranks.all_call(
        lambda group: group.allgather_coalesced(outputs[group.rank()], given[group.rank()])
    )

    assert all(
        torch.equal(outputs[r][s][i], given[s][i]) for r in (0, 1) for s in (0, 1) for i in (0, 1)
    )


def test_gather_and_scatter_are_the_roots() -> None:
    ranks, given = TorchRanks(), inputs()
    gathered = [torch.zeros(5) for _ in range(3)]
    scattered = [torch.zeros(5) for _ in range(3)]
    is_root = [False, False, True]

    ranks.all_call(
        lambda group: group.gather(
            [gathered] if is_root[group.rank()] else [],
            [given[group.rank()]],
            options("Gather", rootRank=2),
        )
    )
    ranks.all_call(
        lambda group: group.scatter(
            [scattered[group.rank()]],
            [gathered] if is_root[group.rank()] else [],
            options("Scatter", rootRank=2),
        )
    )

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scattered, given, strict=True))


def test_all_to_all_of_uneven_rows() -> None:
    ranks = TorchRanks(2)
    given = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(2)]
    outputs = [torch.zeros(2, 2), torch.zeros(4, 2)]
    given_rows, taken_rows = [1, 2], [[1, 1], [2, 2]]

    ranks.all_call(
        lambda group: group.all_to_all_single(
            outputs[group.rank()], given[group.rank()], taken_rows[group.rank()], given_rows
        )
    )

    assert outputs[0].tolist() == [[0, 1], [10, 11]]
    assert outputs[1].tolist() == [[2, 3], [4, 5], [12, 13], [14, 15]]


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_every_dense_type_is_moved(dtype: torch.dtype) -> None:
    ranks = TorchRanks(2)
    source = torch.arange(3).to(dtype)
    outputs = [[torch.zeros(3).to(dtype) for _ in range(2)] for _ in range(2)]

    ranks.all_call(lambda group: group.allgather([outputs[group.rank()]], [source]))

    for each in outputs[0]:
        assert torch.equal(each.view(torch.uint8), source.view(torch.uint8))


def test_tensors_with_gaps_are_read_and_written_in_order() -> None:
    ranks = TorchRanks(2)
    given = [torch.arange(6.0).view(2, 3).t(), torch.ones(4, 3)[:3, :2]]
    expected = given[0].clone() + 1

    ranks.all_call(lambda group: group.allreduce([given[group.rank()]]))

    assert torch.equal(given[0], expected)
    assert torch.equal(given[1], expected)


def test_a_result_lands_though_its_work_is_dropped() -> None:
    ranks = TorchRanks(2)
    given = [torch.arange(6.0).view(2, 3).t() for _ in range(2)]

    for group in ranks.groups:
        group.allreduce([given[group.rank()]])

    assert torch.equal(given[0], 2 * torch.arange(6.0).view(2, 3).t())


def test_sends_are_matched_by_tag_and_in_order() -> None:
    one, two = TorchRanks(2).groups
    first, second, other = torch.zeros(1), torch.zeros(1), torch.zeros(1)

    for value, tag in ((1.0, 0), (2.0, 0), (3.0, 7)):
        one.send([torch.tensor([value])], 1, tag)
    two.recv([other], 0, 7).wait()
    two.recv([first], 0, 0).wait()
    two.recv([second], 0, 0).wait()

    assert (first.item(), second.item(), other.item()) == (1, 2, 3)


def test_who_receives_from_any_rank_learns_which_it_was() -> None:
    ranks, value = TorchRanks(3), torch.zeros(1)

    work = ranks.groups[0].recv_anysource([value], 0)
    ranks.groups[2].send([torch.ones(1)], 0, 0)
    work.wait()

    assert work._source_rank() == 2
    assert value.item() == 1


def test_a_rank_may_send_to_itself() -> None:
    group, value = TorchRanks(2).groups[1], torch.zeros(2)

    sent = group.send([torch.ones(2)], 1, 3)
    received = group.recv([value], 1, 3)

    assert sent.wait()
    assert received.wait()
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.ones(2, device="meta"), "meta"),
    ],
)
def test_what_can_not_be_exchanged_is_refused_and_the_group_stays_usable(
    make: Any, says: str
) -> None:
    ranks, given = TorchRanks(2), inputs(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch gives up quantised tensors.
        refused = make()

    for group in ranks.groups:
        with pytest.raises(NotImplementedError, match=says):
            group.allreduce([refused])
        with pytest.raises(NotImplementedError, match=says):
            group.broadcast([torch.ones(1), refused])
    ranks.all_call(lambda group: group.allreduce([given[group.rank()]]))

    assert torch.equal(given[0], torch.stack(inputs(2)).sum(0))


def test_premultiplied_sums_are_refused() -> None:
    group = TorchRanks(2).groups[0]
    opts = options("Allreduce", reduceOp=torch._C._distributed_c10d._make_nccl_premul_sum(2.0))

    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        group.allreduce([torch.ones(1)], opts)


def test_calls_that_do_not_fit_are_refused() -> None:
    group = TorchRanks(2).groups[0]

    with pytest.raises(ValueError, match="one for each"):
        group.allgather([[torch.zeros(2)]], [torch.zeros(2)])
    with pytest.raises(ValueError, match="3 elements are not 2 times 1"):
        group._allgather_base(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="different types"):
        group.allreduce([torch.zeros(2), torch.zeros(2, dtype=torch.int32)])
    with pytest.raises(ValueError, match="rows"):
        group.all_to_all_single(torch.zeros(3), torch.zeros(2), [], [])
    with pytest.raises(ValueError, match="no rank 2"):
        group.send([torch.zeros(1)], 2, 0)


def test_ranks_that_make_different_calls_get_an_error() -> None:
    one, two = TorchRanks(2).groups

    work = one.allreduce([torch.zeros(2)])
    two.allreduce([torch.zeros(3)])

    with pytest.raises(CallsDiffered):
        work.wait()


def test_a_time_out_of_minus_one_means_the_groups() -> None:
    group = TorchRanks(1).groups[0]

    assert group._limit(options("Allreduce", timeout=timedelta(milliseconds=-1)), None) == 30
    assert group._limit(options("Allreduce", timeout=timedelta(seconds=2)), None) == 2
    assert group._limit(None, timedelta(seconds=3)) == 3


def test_a_group_is_told_another_time_out_and_pytorchs_function_says_that_it_tells_none() -> None:
    group = TorchRanks(1).groups[0]

    with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
        C10D._set_pg_timeout(timedelta(seconds=4), group)
    unchanged = group._limit(None, None)
    group.set_timeout(timedelta(seconds=4))

    assert (unchanged, group._limit(None, None)) == (30, 4)


def test_coalesced_calls_are_waited_for_together() -> None:
    ranks, given = TorchRanks(2), inputs(2)
    works = []
    for group in ranks.groups:
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([given[group.rank()]])
        group.barrier()
        works.append(group._end_coalescing(torch.device("cpu")))

    assert all(work.wait() and work.is_success() for work in works)
    assert torch.equal(given[0], torch.stack(inputs(2)).sum(0))


def test_a_group_is_what_pytorch_asks_for() -> None:
    group = TorchRanks(2).groups[1]

    assert (group.rank(), group.size(), group.name(), group.group_name) == (1, 2, "andon", "0")
    # `init_process_group(device_id=...)` asks for this.
    assert not group._get_backend(torch.device("cuda:0")).supports_splitting
    assert torch.device("cpu") in group._device_types
    with pytest.raises(RuntimeError, match="no tensors of mps"):
        group._get_backend(torch.device("mps"))
    # PyTorch would send it the groups of other backends.
    assert not hasattr(group, "new_group")
    # C++ calls both names.
    ours = vars(AndonProcessGroup)
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("alltoall_base", "all_to_all_single"),
    ):
        assert ours[old] is ours[new]


def test_a_group_of_a_mixed_backend_refuses_tensors_of_the_other_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = TorchRanks(2).groups[0]
    monkeypatch.setitem(C10D._world.pg_backend_config, group, "cpu:andon,cuda:nccl")
    on_gpu = type("OnGpu", (torch.Tensor,), {"is_cuda": True})

    with pytest.raises(RuntimeError, match="What works"):
        group.allreduce([torch.ones(1).as_subclass(on_gpu)])


def test_shutdown_counts_once() -> None:
    ranks = TorchRanks(2)

    ranks.groups[1].shutdown()
    ranks.groups[1].abort()

    assert ranks.ended == [1]


def test_monitored_barrier_is_refused_by_pytorch() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        dist.monitored_barrier(TorchRanks(1).groups[0])
