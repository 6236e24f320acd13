"""Wrappers: a model's modules and tensors under the names that they have without any wrapper.

Names are on the wire, in checkpoints and in digests, and must be the same on every worker. A
compiled module is another module around the original, and puts `_orig_mod.` before its names; so
does a wrapper of the script's own with `module.`, as DataParallel taught everybody to write. One
worker may have such a wrapper and another not.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["named_modules", "named_parameters", "original_of", "plain_name", "unwrapped"]

_COMPILED = "_orig_mod"
"""What `torch.compile` calls the module that it wraps."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The model that a script's model is around.

    A compiled module stands for its original. So does a module that consists of a single child
    called `module`, without a parameter or a buffer of its own.
    """
    while True:
        original = original_of(module)
        bare = not (original._parameters or original._buffers)
        inner = original._modules.get("module")
        if bare and inner is not None and len(original._modules) == 1:
            original = inner
        if original is module:
            return module
        module = original


def original_of(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; the module itself if it is not compiled."""
    # By its attribute: importing the class would load the compiler.
    # TorchScript's modules have no `get` here; they are refused later, by name.
    while _COMPILED in module._modules and (original := module._modules[_COMPILED]) is not None:
        module = original
    return module


def plain_name(name: str) -> str:
    """The name of a module or tensor as if nothing above it was compiled."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, as `root.named_modules()` has it, but none that wraps a compiled one."""
    for path, module in root.named_modules():
        if _COMPILED not in module._modules:
            yield plain_name(path), module


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, as `root.named_parameters()` has it, by its plain name."""
    for name, parameter in root.named_parameters():
        yield plain_name(name), parameter
