"""What a script gives to `line.prepare` or `line.join`: sorted by kind, and checked.

Every check here refuses something that would train without an error, and differently on each
worker: a parameter whose gradient nobody averages, an optimizer that evaluates the loss several
times, a model that another wrapper averages already.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from andon_trainer.model.wrappers import (
    named_modules,
    named_parameters,
    original_of,
    unwrapped,
)

__all__ = [
    "Prepared",
    "has_device_map",
    "is_on_several_devices",
    "numbered_parameters",
    "place",
    "refuse_modules",
    "refuse_optimizers",
    "refuse_shared_parameters",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Models, optimizers, schedulers, and at most one scaler and one training loader."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    loader: DataLoader[Any] | None
    scaler: torch.amp.GradScaler | None = None
    wrapped: Sequence[DistributedDataParallel] = ()
    """Wrappers of models, which say what processes average inside this host."""

    @classmethod
    def sort(cls, objects: Sequence[Any]) -> Prepared:
        """Sorts the arguments of `prepare`.

        Raises:
            TypeError: an object is none of these, there is no model or more than one loader, or a
                model is wrapped in something that averages gradients itself.
            ValueError: a part of a model can't train on a line; see `refuse_modules`.
        """
        modules = [thing for thing in objects if isinstance(thing, nn.Module)]
        # The line averages in their place: see `hosts`.
        wrapped = [
            ddp for each in modules if isinstance(ddp := original_of(each), DistributedDataParallel)
        ]
        refuse_modules(each for each in modules if original_of(each) not in wrapped)
        refuse_modules((each.module for each in wrapped), in_host=True)
        loaders = [thing for thing in objects if isinstance(thing, DataLoader)]
        scalers = [thing for thing in objects if isinstance(thing, torch.amp.GradScaler)]
        found = cls(
            [unwrapped(module) for module in modules],
            [thing for thing in objects if isinstance(thing, Optimizer)],
            [thing for thing in objects if isinstance(thing, LRScheduler)],
            loaders[0] if loaders else None,
            scalers[0] if scalers else None,
            wrapped,
        )
        if len(loaders) > 1:
            raise TypeError(
                "line.prepare takes one training DataLoader: leave the others as they are, and "
                "iterate line.split(loader) where you evaluate"
            )
        if len(scalers) > 1:
            raise TypeError(
                "line.prepare takes one GradScaler: use it for all optimizers, and call its "
                "update() once, after the last of them"
            )
        known = len(found.models) + len(found.optimizers) + len(found.schedulers)
        known += len(loaders) + len(scalers)
        if known != len(objects) or not found.models:
            raise TypeError(
                "line.prepare takes models, optimizers, schedulers, a GradScaler and a training "
                f"DataLoader, {_unknown(objects)}"
            )
        return found


def _unknown(objects: Sequence[Any]) -> str:
    """What `prepare` was given that it does not take, and what to give in its place."""
    known = (nn.Module, Optimizer, LRScheduler, DataLoader, torch.amp.GradScaler)
    others = [thing for thing in objects if not isinstance(thing, known)]
    if not others:
        return "and at least one model"
    kinds = ", ".join(type(thing).__name__ for thing in others)
    if any(callable(getattr(thing, "step", None)) for thing in others):
        return (
            f"not {kinds}. Of a wrapper around an optimizer or a scheduler give the torch object "
            "that is inside, and do what the wrapper adds under `if line.committed:`; or derive it "
            "from torch.optim.Optimizer"
        )
    return f"not {kinds}"


def refuse_optimizers(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that can't train `modules` on a line.

    Raises:
        ValueError: an optimizer can't work with averaged gradients, or trains a parameter that
            belongs to none of the modules.
    """
    ours = {id(part) for module in modules for part in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, SparseAdam):
            raise ValueError(
                "SparseAdam needs sparse gradients, and averages are dense: use Adam, and "
                "nn.Embedding without sparse=True"
            )
        if _needs_closure(optimizer):
            raise ValueError(
                f"{kind} evaluates the loss several times in one step, and a step on the line has "
                "one gradient: use an optimizer whose step() needs no closure, such as AdamW, or "
                "join by hand, line.join(model), as docs/guide/several-models.md shows"
            )
        for place, part in numbered_parameters(optimizer):
            if part.requires_grad and part.numel() and id(part) not in ours:
                raise ValueError(
                    f"{place} of the {kind}, of shape {tuple(part.shape)}, belongs to none of the "
                    "prepared models: its gradient would not be averaged, and it would become "
                    "different on every worker. Give the module that holds it to line.prepare, "
                    "too; a parameter without a module as nn.ParameterList([parameter])"
                )


def refuse_shared_parameters(modules: Sequence[nn.Module]) -> None:
    """Raises ValueError if two modules share a parameter: it has one gradient, and two means."""
    owners: dict[int, nn.Module] = {}
    for module in modules:
        for name, parameter in named_parameters(module):
            if owners.setdefault(id(parameter), module) is not module:
                raise ValueError(
                    f"{name} belongs to two of the joined modules, and has one gradient: join "
                    "them as one, line.join(nn.ModuleList([...])), and reduce that"
                )


def numbered_parameters(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """An optimizer's parameters, each with its place: `parameter 0 of group 1`."""
    for group, content in enumerate(optimizer.param_groups):
        for index, part in enumerate(content["params"]):
            yield f"parameter {index} of group {group}", part


def refuse_modules(modules: Iterable[nn.Module], *, in_host: bool = False) -> None:
    """Refuses models with a part that can't train on a line.

    Args:
        modules: models.
        in_host: whether the processes of a host go forward together, as under
            DistributedDataParallel.

    Raises:
        TypeError: a part is wrapped for several workers or devices, or is TorchScript's.
        ValueError: a part has no values or no shape here, or would change its weights in forward,
            or wait for other processes there.
    """
    for module in modules:
        for name, part in named_modules(module):
            if not (in_host and isinstance(part, nn.SyncBatchNorm)):
                _refuse_part(name or type(part).__name__, part)
        for name, tensor in (*named_parameters(module), *module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(
                    f"{name} has no shape yet, since its layer is lazy: run one forward before "
                    "line.prepare, `with torch.no_grad(): model(x)`, with inputs of one shape on "
                    "every worker"
                )
            if tensor.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and has no values in this process (offloaded, "
                    "or not loaded yet): load the whole model, with a device_map without cpu "
                    'offload or "disk"'
                )


def _refuse_part(name: str, part: nn.Module) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(
            f"{name} is compiled by TorchScript (torch.jit), whose modules can't be trained on a "
            "line: give line.prepare the model as it was before torch.jit.script or "
            "torch.jit.trace, use torch.compile for speed, and script the trained model at the end"
        )
    if isinstance(part, DataParallel | DistributedDataParallel):
        kind = type(part).__name__
        raise TypeError(
            f"the line averages gradients itself: leave {kind}(...) out, and give line.prepare "
            "the model that is in it; leave no_sync and .module out, too"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise ValueError(
            f"{name} has max_norm, by which each worker's forward would change the rows of its own "
            "samples: leave max_norm out, and limit the norms under `if line.committed:`"
        )
    if isinstance(part, nn.SyncBatchNorm):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ValueError(
                f"{name} is a SyncBatchNorm, whose forward waits for all processes of "
                "torch.distributed, and on a line each worker goes forward by itself: leave "
                "convert_sync_batchnorm(...) out, and serve with --average-buffers if you want "
                "statistics of all workers"
            )
        log.warning(
            "%s is a SyncBatchNorm: on a line it normalises by its own worker's samples, as a "
            "BatchNorm does",
            name,
        )


def place(module: nn.Module, device: torch.device) -> None:
    """Moves a model to `device`, unless its script has placed it: by a `device_map`, or by hand."""
    if not (has_device_map(module) or is_on_several_devices(module)):
        module.to(device)


def has_device_map(module: nn.Module) -> bool:
    """Whether `transformers` has placed the model; then its `to` may raise."""
    return getattr(module, "hf_device_map", None) is not None


def is_on_several_devices(module: nn.Module) -> bool:
    """Whether the model is split."""
    return len({parameter.device for parameter in module.parameters()}) > 1


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` can't be called without an argument."""
    try:
        parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):
        return False  # Its signature is unknown; its step raises if it needs an argument.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    return len(required) > 1  # `self` is one.
