"""Numbers that a script logs, on their way to status, board and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["log"]


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Shows numbers as curves beside the run's own: `andon_torch.log({"loss": loss})`.

    Args:
        values: numbers by name; a tensor of one element counts as its number.
        step: to which step they belong. Default: how many backward passes have exchanged something.

    Raises:
        RuntimeError: this process has no group of the backend "andon".
        TypeError: a value is no number.
    """
    from andon_torch.session import living

    sessions = living()
    if not sessions:
        raise RuntimeError(
            'andon_torch.log needs a process group: call init_process_group("andon") first'
        )
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"andon_torch.log: {name} is no number, but {value!r}") from None
        sessions[0].note(name, number, step)
