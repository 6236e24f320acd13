"""Arithmetic: what decides the bits of this process's results, set at its start and watched.

Theory of operation. Under `same_bits` two workers must not only add in one order, but also compute
each sum and product alike. A library chooses its kernel by processor, number of threads, where a
tensor lies in memory, and by a dozen switches. What can be set is set here, when the `Line` is
made; a run's other choices, such as the processor, are stated (`stating`), and the line compares
what its workers state.

MKL chooses its branch when it first computes anything. So its variable helps only before that, and
afterwards this process is refused: linear layers and attention would have other bits when a tensor
lies 4 or 8 bytes further.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import torch

from andon.protocol.arithmetic import ENVIRONMENT, Arithmetic
from andon_trainer.model.compilation import any_compiled, compilers, fix_shapes
from andon_trainer.process.stating import stated

__all__ = ["MKL_OFF", "ProcessArithmetic", "keeps_denormals", "mkl_branch"]

log = logging.getLogger(__name__)

_memory: Any = torch.utils.deterministic
"""A module whose one attribute torch's own types do not know."""

MKL_OFF = 1
"""MKL's number for: no branch was asked for."""


class ProcessArithmetic:
    """This process's arithmetic, from `Line(same_bits=True)` on until the line is closed."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Sets what decides bits, and leaves variables for the libraries in `environment`.

        Raises:
            RuntimeError: MKL has computed something already, and chose kernels by itself.
        """
        for name, value in ENVIRONMENT.items():
            environment.setdefault(name, value)
        branch = mkl_branch()
        if branch == MKL_OFF:
            raise RuntimeError(
                "same_bits: MKL is in use already, without MKL_CBWR, so the bits of a product "
                "depend on where tensors lie in memory. Make the Line before the script computes "
                "anything, or start it with MKL_CBWR=AVX2,STRICT (`andon run --same-bits` sets it)"
            )
        self._branch = branch
        self._compiles = False
        """Whether the script's models are compiled."""
        self._fixed = False
        """Whether the compiler makes a graph for each size."""
        self._threads = _threads_in(environment.get("OMP_NUM_THREADS", ""))
        self._undo = _now()
        if torch.get_num_threads() != self._threads:
            log.info(
                "same_bits: torch computes with %d thread%s instead of %d; OMP_NUM_THREADS gives "
                "another number, which all workers must have",
                self._threads,
                "" if self._threads == 1 else "s",
                torch.get_num_threads(),
            )
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(mode=True)
        # Else each new tensor is filled before it is written: a twentieth of a step. No operation
        # may read what nobody wrote, and one that does is seen where a step is verified.
        _memory.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        torch.set_flush_denormal(False)  # it takes no keyword

    def takes(self, objects: Iterable[object]) -> None:
        """Looks at what the script prepares, before it is stated: models may be compiled."""
        self._compiles = any_compiled(objects)
        self._fix_shapes()

    def stated(self, device: torch.device) -> Arithmetic:
        """What this process states of its arithmetic when it joins, or writes a checkpoint."""
        return stated(
            device,
            mkl_branch=self._branch,
            denormals=keeps_denormals(),
            more=compilers() if self._compiles else {},
        )

    def check(self) -> None:
        """Refuses what the script has changed; cheap, for each loop body and each step.

        Raises:
            RuntimeError: it has.
        """
        self._fix_shapes()  # Here, too: a script may compile once it has prepared.
        threads = torch.get_num_threads()
        if threads != self._threads:
            raise _changed(
                f"torch.set_num_threads({threads})",
                f"start all workers with OMP_NUM_THREADS={threads}",
            )
        if not torch.are_deterministic_algorithms_enabled():
            raise _changed(
                "torch.use_deterministic_algorithms(False)", "use operations that are deterministic"
            )
        if torch.backends.cudnn.benchmark:
            raise _changed("torch.backends.cudnn.benchmark = True", "let it be chosen for you")
        if not keeps_denormals():
            raise _changed("torch.set_flush_denormal(True)", "scale what becomes so small")

    def _fix_shapes(self) -> None:
        """Sets up the compiler, once somebody has loaded it."""
        if self._fixed or "torch._dynamo" not in sys.modules:
            return
        self._fixed = True
        undo, undo_shapes = self._undo, fix_shapes()

        def undo_both() -> None:
            undo_shapes()
            undo()

        self._undo = undo_both

    def restore(self) -> None:
        """Gives back what torch had before; variables stay, since their readers have read them."""
        self._undo()


def keeps_denormals() -> bool:
    """Whether this thread keeps numbers that are too small for a normal float."""
    return bool(torch.full((), 1e-40).mul(1.0).item())


def mkl_branch() -> int | None:
    """The branch of kernels that MKL is bound to, with a bit for STRICT; None: nobody can tell.

    It makes MKL read its variable, if nothing has yet.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]  # torch has none
        return None
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for name in ("mkl_serv_cbwr_get", "MKL_CBWR_Get"):  # As in the wheels; in a shared MKL.
        ask = getattr(library, name, None)
        if ask is not None:
            return int(ask(ctypes.c_int(-1)))  # MKL_CBWR_ALL
    return None


def _now() -> Callable[[], None]:
    """What makes torch's switches again what they are now."""
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    fills = _memory.fill_uninitialized_memory
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, flushes = torch.backends.cudnn.benchmark, not keeps_denormals()

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        _memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = benchmark
        torch.set_flush_denormal(flushes)

    return restore


def _threads_in(text: str) -> int:
    """The number of threads in `OMP_NUM_THREADS`, which may be a list; 1 if there is none."""
    found = re.match(r"\s*(\d+)", text)
    return max(1, int(found[1])) if found else 1


def _changed(what: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"same_bits: the script called {what} after the Line was made, so bits would depend on "
        f"when: leave it out, and {instead}"
    )
