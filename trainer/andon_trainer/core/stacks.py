"""Stacks: in which part of a worker's work a thread is, by the code that it is in. Pure.

Theory of operation. Nothing marks where a script is: marks would cost something in every step, and
a script that hangs in a place that nobody thought of would have none. Its stack says it at any
time. Whose code a frame is follows from its file, and what it does from the names of PyTorch's and
Andon's own modules.

The innermost call decides: a hook of the user that runs inside backward is a part of backward. But
whoever makes samples is in the data, whatever else of PyTorch it calls; and a thread that is in
Andon's code for the exchange, with no code of the user below, waits there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from andon.protocol.slowness import MAX_STACK_LINES, CodeLine, SlowPhase, ThreadStack

__all__ = ["CodePlaces", "RawFrame", "phase_of", "stack_of", "waits_for_loading"]

RawFrame = tuple[str, int, str]
"""The file, the line, and the function of a call."""

_PHASES = (
    ("/torch/utils/data/", SlowPhase.DATA),
    ("/andon_trainer/data/", SlowPhase.DATA),
    ("/torch/optim/", SlowPhase.OPTIMIZER),
    ("/torch/autograd/", SlowPhase.BACKWARD),
    ("/torch/_tensor.py", SlowPhase.BACKWARD),
    ("/torch/serialization.py", SlowPhase.DISK),
    ("/torch/nn/", SlowPhase.FORWARD),
    ("/andon_trainer/state/", SlowPhase.DISK),
    ("/andon_trainer/exchange/", SlowPhase.EXCHANGE),
    ("/andon_trainer/averaging/", SlowPhase.EXCHANGE),
    ("/andon_trainer/place/", SlowPhase.EXCHANGE),
    ("/andon_trainer/hosts/", SlowPhase.EXCHANGE),
    ("/andon_trainer/peers/", SlowPhase.EXCHANGE),
    ("/andon_torch/", SlowPhase.EXCHANGE),
    ("/andon/tcp/", SlowPhase.EXCHANGE),
)
"""Of PyTorch and Andon, by a part of the path."""

_AT_ONCE = (SlowPhase.EXCHANGE, SlowPhase.DISK, SlowPhase.DATA)
"""Where Andon and PyTorch are by themselves: they wait."""


@dataclass(frozen=True, slots=True)
class CodePlaces:
    """Where code that is not the user's lies."""

    library: tuple[str, ...]
    """Folders of Python's own library."""
    packages: tuple[str, ...]
    """Folders of packages, and Andon's own."""

    def is_own(self, file: str) -> bool:
        """Whether a file is the user's own."""
        if file.startswith("<") or any(
            each in file for each in ("/site-packages/", "/dist-packages/")
        ):
            return False
        return not any(file.startswith(f"{each}/") for each in (*self.library, *self.packages))


def stack_of(thread: str, frames: Sequence[RawFrame], places: CodePlaces) -> ThreadStack:
    """A thread's calls, the innermost first; of a deep stack its inner part."""
    lines = (
        CodeLine(file, line, function, places.is_own(_slashed(file)))
        for file, line, function in frames[:MAX_STACK_LINES]
    )
    return ThreadStack(thread, tuple(lines))


def phase_of(frames: Sequence[RawFrame], places: CodePlaces) -> SlowPhase:
    """In which part of its work the script's thread is.

    Args:
        frames: its calls, the innermost first.
        places: whose code is whose.
    """
    found = [_looked_at(_slashed(name), places) for name, _, _ in frames]
    waits_in = _innermost_of_ours(found)
    if waits_in is not None and waits_in in _AT_ONCE:
        return waits_in
    if any(phase is SlowPhase.DATA for _, phase in found):
        return SlowPhase.DATA
    # Andon's own frames lie around backward and the optimizer: they only count innermost.
    phases = (phase for _, phase in found if phase not in (None, SlowPhase.EXCHANGE))
    return next(phases, None) or (SlowPhase.SCRIPT if found else SlowPhase.UNSPECIFIED)


def waits_for_loading(frames: Sequence[RawFrame], places: CodePlaces) -> bool:
    """Whether the script's thread waits for a batch that others load, and loads none itself."""
    found = [_looked_at(_slashed(name), places) for name, _, _ in frames]
    return _innermost_of_ours(found) is SlowPhase.DATA


def _innermost_of_ours(found: Sequence[tuple[bool, SlowPhase | None]]) -> SlowPhase | None:
    """The phase of PyTorch's or Andon's code, if the user's own is not further in."""
    for own, phase in found:
        if own or phase is not None:
            return phase
    return None


def _looked_at(file: str, places: CodePlaces) -> tuple[bool, SlowPhase | None]:
    """Whether a file is the user's own, and else the phase that its code is of."""
    if places.is_own(file):
        return True, None
    return False, next((phase for part, phase in _PHASES if part in file), None)


def _slashed(file: str) -> str:
    return file.replace("\\", "/")
