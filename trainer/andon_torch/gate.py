"""The gate: which calls may carry values that are not finite, and what a bad one is called.

Theory of operation. What autograd exchanges while it computes gradients is gradients. So by default
the gate is closed to sums and means of floating numbers that begin inside a backward pass, and open
to all others: a masked maximum, a logged NaN, a broadcast of weights.

The gate costs nothing while all is well: the engine looks for bad values in the pass that copies
them. Only once one is found does the rank look for its parameter, among all that Python's garbage
collector knows. The same is done for gradient scalers: one that is in use expects overflows, skips
the optimizer's step and lowers the scale. Such overflows are counted.
"""

from __future__ import annotations

import enum
import gc
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_torch.parameters import find_parameter
from andon_trainer.core.peer_work import Found, Gate

__all__ = [
    "GateMode",
    "GradientWatch",
    "backward_pass",
    "describe",
    "first_bad",
    "gate_mode",
]

_MEANT = frozenset({"sum", "avg"})
"""What gradients are reduced by."""


class GateMode(enum.Enum):
    """To what the gate is closed."""

    BACKWARD = "backward"
    """To sums and means inside a backward pass."""
    ALL = "all"
    """To every reduction of floating numbers."""
    OFF = "off"
    """To nothing."""


def gate_mode(env: Mapping[str, str]) -> GateMode:
    """The mode that ANDON_GATE names.

    Raises:
        ValueError: it names none.
    """
    text = env.get("ANDON_GATE") or GateMode.BACKWARD.value
    try:
        return GateMode(text)
    except ValueError:
        modes = ", ".join(mode.value for mode in GateMode)
        raise ValueError(f"ANDON_GATE is {text!r}, and must be one of {modes}") from None


def backward_pass() -> int | None:
    """The number of the backward pass that this thread computes in; None: it computes in none."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def first_bad(values: Tensor) -> int | None:
    """The index of the first element that is not finite, in order; None: all are."""
    flat = values.detach().reshape(-1)
    finite = torch.isfinite(flat)
    if bool(finite.all()):
        return None
    return int((~finite).nonzero()[0])


def _value_text(value: float | complex) -> str:
    """A bad value as people write it: `nan`, `inf` or `-inf`."""
    if isinstance(value, complex):
        value = value.imag if math.isfinite(value.real) else value.real
    return str(value)


@dataclass(slots=True)
class _Counts:
    """What was seen since the session began."""

    steps: int = 0
    last_step: int | None = None
    overflows: int = 0
    last_overflow: int | None = None


class GradientWatch:
    """Decides about gates, and counts the backward passes that exchanged. Any thread may use it."""

    def __init__(self, mode: GateMode) -> None:
        """Has seen nothing yet."""
        self._mode = mode
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None

    @property
    def closed(self) -> bool:
        """Whether gradients are looked at."""
        return self._mode is not GateMode.OFF

    @property
    def steps(self) -> int:
        """Backward passes that reduced something."""
        return self._counts.steps

    @property
    def overflows(self) -> int:
        """Backward passes whose gradients overflowed, and a gradient scaler expected that."""
        return self._counts.overflows

    def gate_for(self, inputs: Sequence[Tensor], reduction: str) -> Gate | None:
        """The gate of a reduction that begins now in this thread; None: all values are legal."""
        dtype = inputs[0].dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        backward = backward_pass()
        if backward is not None and reduction in _MEANT:
            self.note_step(backward)
        closed = self._mode is GateMode.ALL or (
            self._mode is GateMode.BACKWARD and backward is not None and reduction in _MEANT
        )
        return _TensorGate(self, inputs, backward) if closed else None

    def expects_overflow(self, backward: int | None) -> bool:
        """Whether a gradient scaler is in use; then this is counted as a step's overflow."""
        if not self._scales():
            return False
        with self._lock:
            if backward is None or backward != self._counts.last_overflow:
                self._counts.overflows += 1
                self._counts.last_overflow = backward
        return True

    def note_step(self, backward: int) -> None:
        """A backward pass exchanges something; only its first time counts."""
        with self._lock:
            if backward != self._counts.last_step:
                self._counts.steps += 1
                self._counts.last_step = backward

    def step_in(self, backward: int | None) -> int:
        """The step of what begins in a backward pass; outside of one, the steps so far."""
        counts = self._counts
        return counts.steps + (backward is not None and backward != counts.last_step)

    def _scales(self) -> bool:
        known = self._scaler() if self._scaler is not None else None
        if known is not None and _in_use(known):
            return True
        for each in gc.get_objects():
            # Not isinstance: it asks an object for its class, and some answer with an import.
            if issubclass(type(each), torch.amp.GradScaler) and _in_use(each):
                self._scaler = weakref.ref(each)
                return True
        return False


def _in_use(scaler: torch.amp.GradScaler) -> bool:
    """Whether the scaler is enabled, and has scaled a loss."""
    return scaler.is_enabled() and getattr(scaler, "_scale", None) is not None


class _TensorGate:
    """The gate of one call; see `andon_trainer.core.peer_work.Gate`."""

    def __init__(
        self, watch: GradientWatch, inputs: Sequence[Tensor], backward: int | None
    ) -> None:
        self._watch = watch
        self._inputs = inputs
        self._backward = backward

    def first_bad(self, values: memoryview) -> int | None:
        """The index of the first element that is not finite; None: all are."""
        if not len(values):
            return None
        view = bytearray(values) if values.readonly else values
        return first_bad(torch.frombuffer(view, dtype=self._inputs[0].dtype))

    def expected(self) -> bool:
        """Whether a gradient scaler expects overflows."""
        return self._watch.expects_overflow(self._backward)

    def explain(self, part: int, element: int) -> Found:
        """Names an element of the call's input."""
        tensor = self._inputs[part]
        if element >= tensor.numel():  # The input is a list with one tensor for each rank.
            for tensor in self._inputs:
                if element < tensor.numel():
                    break
                element -= tensor.numel()
        with torch.no_grad():
            return describe(tensor.detach(), element)


def describe(tensor: Tensor, element: int) -> Found:
    """What people call an element of a tensor that is exchanged: its parameter, if one is known."""
    value = _value_text(tensor.reshape(-1)[element].item())
    place = find_parameter(tensor, element)
    if place is not None:
        return Found(parameter=place.parameter, element=place.element, value=value)
    index = torch.unravel_index(torch.tensor(element), tensor.shape) if tensor.dim() else ()
    return Found(element=tuple(int(each) for each in index), value=value)
