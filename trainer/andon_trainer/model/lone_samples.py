"""Lone samples: what BatchNorm does with a batch that has one value per channel.

Theory of operation. The variance of one value is 0, so BatchNorm can't train on it, and torch
raises. In a script of one process that is the script's own doing. On a line it is not: a share may
be one sample because there are many workers, because the last batch of an epoch is short, because
shares follow speed, or because a lost worker's last position was dealt out again. More rows can't
be added, since the script's loss is a mean over all rows that its model gets.

So in the loop body of one sample, a layer that gets one value per channel normalises by its running
statistics, as in eval mode. They stay as they are, and the gradient goes through the layer's weight
and bias as ever. A layer that gets more values (an image's pixels) trains as ever.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from andon_trainer.model.layout import module_prefixes
from andon_trainer.model.wrappers import named_modules

__all__ = ["LoneSamples"]

log = logging.getLogger(__name__)


class LoneSamples:
    """Lets the BatchNorm layers of some models train on one sample. Used by one thread."""

    def __init__(self, modules: Sequence[nn.Module], *, wanted: bool) -> None:
        """Finds the layers.

        Args:
            modules: the models.
            wanted: whether the script's own batches and micro-batches have one sample: then torch's
                error stays what it is.
        """
        found = {
            id(layer): (prefix + (name or type(layer).__name__), layer)
            for prefix, module in zip(module_prefixes(modules), modules, strict=True)
            for name, layer in named_modules(module)
            if isinstance(layer, _BatchNorm) and not _is_shared(layer)
        }
        self._layers = [] if wanted else list(found.values())
        self._evaluating: dict[str, _BatchNorm] = {}
        """Layers in the middle of a forward on one value per channel, by their names."""
        self._told = False

    @contextmanager
    def allowed(self, samples: int) -> Iterator[None]:
        """Around a loop body, and its backward, on so many samples."""
        if samples != 1 or not self._layers:
            yield
            return
        # Only now: hooks slow each forward down, and a batch of one sample is rare.
        handles: list[RemovableHandle] = []
        for name, layer in self._layers:
            handles += self._watch(name, layer)
        try:
            with _INTERPRETED.held():
                yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in self._evaluating.values():  # Their forward raised.
                layer.training = True
            self._evaluating.clear()

    def _watch(self, name: str, layer: _BatchNorm) -> Iterator[RemovableHandle]:
        """Puts the layer into eval mode for each call with one value per channel."""

        def before(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not (layer.training and inputs and _is_lone(inputs[0])):
                return
            if layer.running_mean is None:
                raise ValueError(
                    f"{name} got one value per channel, whose variance is 0, and has no running "
                    "statistics to use instead: leave track_running_stats=False out, write "
                    "drop_last=True, or use a layer that needs no batch, such as GroupNorm"
                )
            self._tell(name)
            layer.training = False
            self._evaluating[name] = layer

        def after(_layer: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
            if self._evaluating.pop(name, None) is not None:
                layer.training = True

        yield layer.register_forward_pre_hook(before)
        yield layer.register_forward_hook(after)

    def _tell(self, name: str) -> None:
        if self._told:
            return
        self._told = True
        log.warning(
            "a share of one sample: the BatchNorm %r, and any other that gets one value per "
            "channel, normalises it by its running statistics, as in eval mode. If that happens "
            "often, make batch_size greater, or use a layer that needs no batch, such as GroupNorm",
            name,
        )


def _is_shared(layer: nn.Module) -> bool:
    """Whether a layer's statistics are those of several processes, which wait for each other."""
    distributed = torch.distributed
    return (
        isinstance(layer, nn.SyncBatchNorm)
        and distributed.is_available()
        and distributed.is_initialized()
    )


class _Interpreted:
    """Compiled models run as they were written: their graphs know nothing of hooks.

    That is a stance of the whole process, so the first loop body that needs it sets it, and the
    last one undoes it: those of several lines, or of several loaders, may end in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies = 0
        self._undo = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a loop body."""
        # Not loaded: nothing was compiled. Torch has stances since 2.6.
        stance = getattr(torch.compiler, "set_stance", None)
        if "torch._dynamo" not in sys.modules or stance is None:
            yield
            return
        with self._lock:
            if not self._bodies:
                self._undo.enter_context(stance("force_eager"))
            self._bodies += 1
        try:
            yield
        finally:
            with self._lock:
                self._bodies -= 1
                if not self._bodies:
                    self._undo.close()


_INTERPRETED = _Interpreted()


def _is_lone(given: Any) -> bool:
    """Whether a layer's input, of shape (samples, channels, ...), has one value per channel."""
    if not isinstance(given, torch.Tensor) or given.ndim < 2:
        return False
    return given.shape[:1].numel() * given.shape[2:].numel() == 1
