"""From a script's DistributedDataParallel to a host group, and the host's joining of the line.

A model that is wrapped in DistributedDataParallel shows which processes belong together. The
wrapper's own averaging is then switched off: it would average with equal weights, process by
process, and the line's steps need the weighted mean of whatever each process computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from andon.protocol.arithmetic import Arithmetic, difference, remedy
from andon.protocol.layout import Layout
from andon.protocol.run_settings import RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.data.feed import Feeder
from andon_trainer.hosts.calls import meet
from andon_trainer.hosts.group import HostGroup, TorchHostGroup

__all__ = [
    "agree_on_plan",
    "config_of_host",
    "group_of",
    "located_by_leader",
    "refuse_stream",
    "switch_off",
]


def group_of(models: Sequence[DistributedDataParallel], config: LineConfig) -> HostGroup | None:
    """The processes that average inside this host; None if this one is alone.

    Every process of the models' group must call it.

    Raises:
        TypeError: `andon run` started the processes, each as a worker of its own.
        ValueError: nothing says where the line is, the models have several groups, or a wrapper
            does what only its own averaging could do.
    """
    for model in models:
        _refuse_options(model)
    groups = {tuple(dist.get_process_group_ranks(model.process_group)) for model in models}
    if not groups:
        return None
    if len(groups) > 1:
        raise ValueError(
            f"the models are in {len(groups)} process groups of torch.distributed: wrap all of "
            "them with the same process_group, that of this host"
        )
    if len(groups.pop()) == 1:
        return None
    if config.andon_run:
        raise TypeError(
            "`andon run` starts a worker for each process, and the line averages gradients itself: "
            "leave DistributedDataParallel(...) out, and give line.prepare the model that is in "
            "it. To average inside a host by DistributedDataParallel start its processes with "
            "torchrun, and the line with `andon serve`"
        )
    if config.audit is not None:
        raise ValueError(
            "andon audit recomputes a run in one process, and this host has several: name the "
            "command with torchrun --nproc-per-node 1"
        )
    if config.solo:
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, and nothing says where the line is: "
            "start the processes of a host with torchrun, or set ANDON_ADDRESS to the line's "
            "host:port"
        )
    return TorchHostGroup(models[0].process_group)


def _refuse_options(model: DistributedDataParallel) -> None:
    """Refuses what a wrapper does beside averaging, or instead of it."""
    if model._comm_hooks:
        raise ValueError(
            "the model's DistributedDataParallel has a communication hook, and the line exchanges "
            "gradients itself: leave register_comm_hook out"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) casts gradients while it averages them, "
            "and the line does that itself: leave it out, and use torch.autocast"
        )


def refuse_stream(feeder: Feeder) -> None:
    """Raises ValueError if nobody knows how long an epoch is.

    The processes of a host would find a stream's end at different positions, and each by itself.
    """
    if feeder.epoch_size is None:
        raise ValueError(
            "the processes of a host can't divide an IterableDataset of unknown length: give it "
            "__len__, or leave DistributedDataParallel out and start a worker for each GPU with "
            "`andon run`"
        )


def switch_off(models: Sequence[DistributedDataParallel]) -> Callable[[], None]:
    """Stops the wrappers from averaging gradients and copying buffers; returns what undoes that."""
    before = [
        (model, model.require_backward_grad_sync, model.require_forward_param_sync)
        for model in models
    ]
    for model in models:
        model.require_backward_grad_sync = model.require_forward_param_sync = False

    def undo() -> None:
        for model, gradients, buffers in before:
            model.require_backward_grad_sync = gradients
            model.require_forward_param_sync = buffers

    return undo


def config_of_host(config: LineConfig, group: HostGroup) -> LineConfig:
    """The leader's configuration: the launcher counted processes, and the line counts hosts."""
    launch = config.launch
    if launch is not None:
        launch = replace(launch, world_size=max(1, launch.world_size // group.size))
    # Each torchrun counts from 0: slots of two launches would collide. The line hands them out.
    return replace(config, launch=launch, launch_slot=None)


def located_by_leader(config: LineConfig, told: tuple[str, str, Path | None]) -> LineConfig:
    """A follower's configuration, once the leader told where the line is."""
    address, run_id, run_dir = told
    return replace(config, address=address, run_id=run_id, run_dir=run_dir, launch=None)


def agree_on_plan(
    group: HostGroup, layout: Layout, plan: RunPlan, arithmetic: Arithmetic = ()
) -> None:
    """Compares what the processes of a host intend, and with `same_bits` how they compute.

    Raises:
        ValueError: they differ; the message says in what.
    """
    mine = {each.name: getattr(plan, each.name) for each in fields(plan)}
    mine["the model"] = hashlib.sha256(repr(layout).encode()).hexdigest()
    called = meet(group, "line.prepare", (mine, arithmetic))
    intended, computes = called[0].given
    for number, each in enumerate(called):
        found = difference(each.given[1], computes)
        if found is not None:
            name, here, there = found
            raise ValueError(
                f"process {number} of this host computes with {name} {here}, and process 0 with "
                f"{name} {there}. With same_bits a host has one arithmetic: {remedy(name, there)}"
            )
        for name, value in each.given[0].items():
            theirs = intended[name]
            if value != theirs:
                raise ValueError(
                    f"{name} is {value} at process {number} of this host and {theirs} at process "
                    "0: all of them must prepare the same model, the same data and the same seed"
                )
