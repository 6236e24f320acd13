"""Lent memory: where gradients lie on the host, in the exchange's own memory if it has any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from andon_trainer.exchange.path import Floats, Memory

__all__ = ["Lend", "PageLock", "lend_nothing"]

log = logging.getLogger(__name__)

Lend = Callable[[int], tuple[Floats, Memory] | None]
"""Where a block's gradients may lie, and the memory of which that is a part; see `Lender`."""


def lend_nothing(_block: int) -> None:
    """For exchanges that have no memory of their own."""


class PageLock:
    """Keeps lent memory registered with the CUDA driver, so that a GPU copies straight into it."""

    def __init__(self, runtime: Any, synchronize: Callable[[], None]) -> None:
        """Nothing is registered yet.

        Args:
            runtime: `torch.cuda.cudart()`, or what behaves like it.
            synchronize: returns once no copy is on its way to registered memory.
        """
        self._runtime = runtime
        self._synchronize = synchronize
        self._memory: Memory | None = None
        self._refused: Memory | None = None

    def takes(self, memory: Memory) -> bool:
        """Registers memory, in place of what was; False if the driver does not take it."""
        if memory is self._memory:
            return True
        if memory is self._refused:
            return False
        self._let_go()
        failure = int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if failure:
            log.info(
                "the CUDA driver does not pin shared memory (error %d): gradients are copied once "
                "more",
                failure,
            )
            self._refused = memory
            return False
        self._memory = memory
        return True

    def _let_go(self) -> None:
        if self._memory is not None:
            self._synchronize()
            self._runtime.cudaHostUnregister(self._memory.ctypes.data)
            self._memory = None
