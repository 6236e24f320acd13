"""Compilation: what a compiled model must be like, so that each process compiles the same kernels.

Theory of operation. By default torch compiles a graph for the first size that it sees, and one for
any size when it sees a second one. Which of the two computes a grain, and with which bits, would
depend on what this process has seen before: a short grain, borrowed samples, an evaluation. So each
size gets a graph of its own (`automatic_dynamic_shapes` off). After some graphs torch would give up
and interpret; that raises here, since it would happen to one worker and not to another. Choosing
kernels by timing them is off: `torch.use_deterministic_algorithms` tells the compiler so, and modes
that do nothing else are refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn

__all__ = ["any_compiled", "compilers", "fix_shapes", "refuse_compilation"]

_TUNES = (
    *("max_autotune", "max_autotune_gemm", "max_autotune_pointwise"),
    "coordinate_descent_tuning",
)
"""Options that choose kernels by their time."""


def any_compiled(objects: Iterable[object]) -> bool:
    """Whether a module of these was compiled by `torch.compile(module)`."""
    models = (each for each in objects if isinstance(each, nn.Module))
    return any(_is_wrapper(each) for model in models for each in model.modules())


def refuse_compilation(module: nn.Module, where: str) -> None:
    """Looks at how one module was compiled, if it was; `where` names it.

    Raises:
        ValueError: its kernels may differ from process to process.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"{where} was compiled by its own compile(), and nobody can see how: with same_bits "
            "write model = torch.compile(model, dynamic=False)"
        )
    if not _is_wrapper(module):
        return
    context: Any = getattr(module, "dynamo_ctx", None)
    if getattr(context, "_dynamic", None):
        raise ValueError(
            f"{where} is compiled with dynamic=True, and one graph for all sizes has other bits "
            "than one for a grain: with same_bits write torch.compile(model, dynamic=False)"
        )
    options = getattr(context, "compiler_config", None) or {}
    tunes = next((name for name in _TUNES if options.get(name)), None)
    if tunes is not None:
        raise ValueError(
            f"{where} is compiled with {tunes}, which chooses kernels by their time, in each "
            "process anew: with same_bits leave the mode or the option out"
        )


def fix_shapes() -> Callable[[], None]:
    """Has torch compile a graph for each size, and raise where it would give up; undoes it."""
    # Not imported above: it loads the compiler, which most scripts do not need.
    config: Any = import_module("torch._dynamo").config
    before = config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit
    config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = False, True

    def undo() -> None:
        config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = before

    return undo


def compilers() -> dict[str, str]:
    """Versions of the compilers that make kernels of a compiled model, to be stated."""
    program = shutil.which(os.environ.get("CXX", "g++"))
    found = {"compiler": "none", "triton": "none"}
    if program is not None:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        found["compiler"] = said.stdout.partition("\n")[0].strip()
    with suppress(ImportError):
        found["triton"] = str(import_module("triton").__version__)
    return found


def _is_wrapper(module: nn.Module) -> bool:
    # By its name: importing the class would load the compiler.
    return type(module).__name__ == "OptimizedModule"
