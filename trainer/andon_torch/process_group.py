"""The process group: PyTorch's collectives as calls between the ranks.

Theory of operation. A `ProcessGroup` written in Python is the whole group, for tensors of all
devices, and not one backend of several. Its methods are called by Python (`torch.distributed`) and,
those for which PyTorch has a way, by C++ (DistributedDataParallel, functional collectives). Some
have an old and a new name; both are here, with PyTorch's parameter names.

A method checks its tensors, says which bytes it gives and takes, and begins one call. Nothing is
sent, and no call is counted, if it raises before.

`new_group` must not be defined: PyTorch would send it the groups of all backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from andon.protocol.peer_calls import Call, CallKind
from andon_torch import requests
from andon_torch.autoload import BACKEND
from andon_torch.identity import Caller, GroupIdentity
from andon_torch.own_sends import OwnSends
from andon_torch.reductions import TorchReduce, reduction_of
from andon_torch.requests import Request, listed, nested, only, root_of
from andon_torch.tensors import Staging, check_tensor, name_of
from andon_torch.tracing import untraced
from andon_torch.works import CallWork, DoneWork, SeveralWorks
from andon_trainer.core import peer_work
from andon_trainer.core.peer_work import Gate, Part

__all__ = ["AndonProcessGroup", "Caller", "Watch"]


class Watch(Protocol):
    """Decides which calls may carry values that are not finite."""

    def gate_for(self, inputs: Sequence[Tensor], reduction: str) -> Gate | None:
        """The gate of a reduction that begins now in this thread; None: all values are legal."""


@untraced
class AndonProcessGroup(GroupIdentity):
    """A group of ranks whose collectives are andon's."""

    def __init__(
        self,
        caller: Caller,
        name: str,
        timeout: timedelta,
        watch: Watch,
        on_shutdown: Callable[[], None],
    ) -> None:
        """Takes the parts of a group of a session that was formed.

        Args:
            caller: begins calls.
            name: the group's, as PyTorch knows it.
            timeout: how long a call may take unless it says otherwise.
            watch: decides about gates.
            on_shutdown: called once, when the group ends.
        """
        super().__init__(caller, name, timeout, on_shutdown)
        self._watch = watch
        self._own_sends = OwnSends()
        # Works since `_start_coalescing`; by thread, for DDP begins calls in those of autograd.
        self._coalescing = threading.local()

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows is waited for together."""
        self._coalescing.works = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """The work of the calls since `_start_coalescing`."""
        works: list[Work] = self._coalescing.works
        self._coalescing.works = None
        return SeveralWorks(works, [each for work in works for each in work.result()])

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Every rank's tensors become the reduction of all ranks'."""
        changed = listed(tensors)
        return self._reduce(requests.all_reduce(changed), opts, timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """As `allreduce`, of many tensors."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        """The root's tensor becomes the reduction of all ranks'."""
        root = root_of(opts)
        request = requests.reduce(only(tensors), root, is_root=root == self.rank())
        return self._reduce(request, opts if op is None else op, timeout)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Every rank's output becomes the reduction of all ranks' inputs for it."""
        outputs, inputs = listed(output_tensors), nested(input_tensors)
        asked = [
            requests.reduce_scatter(output, each, self.size(), self.rank())
            for output, each in zip(outputs, inputs, strict=True)
        ]
        return _together([self._reduce(each, opts, timeout) for each in asked], outputs)

    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None
    ) -> Work:
        """As `reduce_scatter`, of one tensor that holds the inputs for all ranks in order."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputTensors: Any, inputTensors: Any, opts: Any = None
    ) -> Work:
        """As `reduce_scatter_single`, of many tensors."""
        outputs, inputs = listed(outputTensors), listed(inputTensors)
        return self._reduce(requests.reduce_scatter_single(outputs, inputs, self.size()), opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that move elements as they are.

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Every rank's tensors become the root's."""
        moved, root = listed(tensors), root_of(opts)

        def request(chosen: list[int]) -> Request:
            some = [moved[i] for i in chosen]
            return requests.broadcast(some, root, is_root=root == self.rank())

        return self._move_by_type(moved, request, moved, opts, timeout)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Every rank gets all ranks' inputs."""
        return self._allgather(nested(output_tensors), listed(input_tensors), opts, timeout)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:
        """As `allgather`, of many tensors; outputs are by rank, then by input."""
        by_rank, inputs = nested(output_lists), listed(input_list)
        if len(by_rank) != self.size() or any(len(each) != len(inputs) for each in by_rank):
            raise ValueError("all_gather_coalesced: each rank needs one output for each input")
        outputs = [[each[i] for each in by_rank] for i in range(len(inputs))]
        return self._allgather(outputs, inputs, opts)

    def _allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any, timeout: Any = None
    ) -> Work:
        def request(chosen: list[int]) -> Request:
            some = [outputs[i] for i in chosen]
            return requests.all_gather(some, [inputs[i] for i in chosen], self.size())

        results = [each for output in outputs for each in output]
        return self._move_by_type(inputs, request, results, opts, timeout)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As `allgather`, into one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None
    ) -> Work:
        """As `all_gather_single`, of many tensors."""
        outputs, inputs = listed(output_lists), listed(input_list)

        def request(chosen: list[int]) -> Request:
            some = [outputs[i] for i in chosen]
            return requests.all_gather_single(some, [inputs[i] for i in chosen], self.size())

        return self._move_by_type(outputs, request, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """The root gets all ranks' inputs."""
        root = root_of(opts)
        outputs = [each for output in nested(output_tensors) for each in output]
        request = requests.gather(
            outputs, only(input_tensors), root, self.size(), is_root=root == self.rank()
        )
        return self._move(request, opts, timeout)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Every rank gets its one of the root's inputs."""
        root = root_of(opts)
        inputs = [each for given in nested(input_tensors) for each in given]
        request = requests.scatter(
            only(output_tensors), inputs, root, self.size(), is_root=root == self.rank()
        )
        return self._move(request, opts, timeout)

    def alltoall(
        self, output_tensor: Any, input_tensor: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Every rank gets its one of every rank's inputs."""
        request = requests.all_to_all(listed(output_tensor), listed(input_tensor), self.size())
        return self._move(request, opts, timeout)

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As `alltoall`, of one tensor that is divided along its first dimension."""
        request = requests.all_to_all_single(
            output_tensor, input_tensor, output_split_sizes, input_split_sizes, self.size()
        )
        return self._move(request, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """No rank goes on before all have called."""
        work = peer_work.Work(call=Call(kind=CallKind.BARRIER), itemsize=1)
        return self._begin(work, Staging(), [], opts, timeout)

    # From one rank to another.

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        """Gives a tensor to another rank, or to this one."""
        return self._point(only(tensors), dstRank, tag, receives=False)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        """Takes a tensor from another rank, or from this one."""
        return self._point(only(tensors), srcRank, tag, receives=True)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Takes a tensor from whichever other rank sends first."""
        return self._point(only(tensors), None, tag, receives=True)

    def _point(self, tensor: Tensor, peer: int | None, tag: int, *, receives: bool) -> Work:
        if peer is not None and not 0 <= peer < self.size():
            raise ValueError(f"the group has no rank {peer}")
        self._check([tensor])
        staging, limit = Staging(), self._timeout.total_seconds()
        if peer == self.rank():
            own = self._own_sends
            if receives:
                met = own.receive(tag, staging.takes(tensor))
            else:
                view = staging.gives(tensor)
                staging.ready()
                met = own.send(tag, view)
            return self._noted(CallWork(met, staging, [tensor], limit))
        work = peer_work.Work(
            call=Call(
                kind=CallKind.SEND, dtype=name_of(tensor.dtype), count=tensor.numel(), tag=tag
            ),
            itemsize=tensor.itemsize,
            parts=(
                Part((), (staging.takes(tensor),)) if receives else Part((staging.gives(tensor),)),
            ),
            peer=peer,
            receives=receives,
        )
        return self._begin(work, staging, [tensor])

    # What the above have in common.

    def _reduce(self, request: Request, opts: Any, timeout: Any = None) -> Work:
        if not request.results:
            return DoneWork([])
        self._check(request.all)
        dtype = request.results[0].dtype
        op = getattr(opts, "reduceOp", opts)
        reduction = reduction_of(ReduceOp.SUM if op is None else op, dtype)
        staging = Staging()
        work = peer_work.Work(
            call=_call_of(request, reduction),
            itemsize=dtype.itemsize,
            parts=request.shape(staging),
            reduce=TorchReduce(reduction, dtype, self.size()),
            gate=self._watch.gate_for(request.inputs, reduction),
        )
        return self._begin(work, staging, request.results, opts, timeout)

    def _move(self, request: Request, opts: Any, timeout: Any = None) -> Work:
        self._check(request.all)
        staging = Staging()
        work = peer_work.Work(
            call=_call_of(request),
            itemsize=request.all[0].itemsize,
            parts=request.shape(staging),
        )
        return self._begin(work, staging, request.results, opts, timeout)

    def _move_by_type(
        self,
        tensors: list[Tensor],
        request: Callable[[list[int]], Request],
        results: list[Tensor],
        opts: Any,
        timeout: Any = None,
    ) -> Work:
        """One call for all tensors of a type, in the order in which types first come up.

        Args:
            tensors: one for each part of the calls.
            request: the call of the tensors with these indices.
            results: of all calls.
            opts: as `_move`.
            timeout: as `_move`.
        """
        by_type: dict[torch.dtype, list[int]] = {}
        for i, each in enumerate(tensors):
            by_type.setdefault(each.dtype, []).append(i)
        asked = [request(chosen) for chosen in by_type.values()]
        for one in asked:
            self._check(one.all)
        return _together([self._move(one, opts, timeout) for one in asked], results)

    def _begin(
        self,
        work: peer_work.Work,
        staging: Staging,
        results: Sequence[Tensor],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        staging.ready()
        coalesces = getattr(self._coalescing, "works", None) is not None
        # `torch.distributed` says so where it waits before it returns.
        awaited = getattr(opts, "asyncOp", True) is False and not coalesces
        call = self._caller.begin(work, awaited=awaited)
        self._begun += 1
        return self._noted(CallWork(call, staging, list(results), self._limit(opts, timeout)))

    def _noted(self, work: Work) -> Work:
        works = getattr(self._coalescing, "works", None)
        if works is not None:
            works.append(work)
        return work

    def _limit(self, opts: Any, timeout: Any) -> float:
        """A call's time-out in seconds; PyTorch says -1 ms where it means the group's."""
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        if not isinstance(limit, timedelta) or limit <= timedelta(0):
            limit = self._timeout
        return limit.total_seconds()

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Refuses tensors that can't be moved, or that another backend was to move.

        PyTorch gives a group of Python all tensors, whatever `cpu:andon,cuda:nccl` says.
        """
        for each in tensors:
            check_tensor(each)
        if not any(each.is_cuda for each in tensors):
            return
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        if backends and backends.get("cuda") != BACKEND:
            raise RuntimeError(
                f"this group was made with {config!r}, and this PyTorch gives all its tensors to "
                "andon. What works: init_process_group('andon') for all tensors, or "
                "init_process_group('nccl') and new_group(backend='andon') for those on the CPU"
            )


def _call_of(request: Request, reduction: str = "") -> Call:
    return Call(
        kind=request.kind,
        dtype=name_of(request.all[0].dtype),
        count=request.count,
        reduction=reduction,
        root=request.root,
        tensors=request.tensors,
    )


def _together(works: list[Work], results: list[Tensor]) -> Work:
    """Works as one."""
    if not works:
        return DoneWork(results)
    return works[0] if len(works) == 1 else SeveralWorks(works, results)
