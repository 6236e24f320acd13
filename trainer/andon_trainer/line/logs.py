"""What a script logs and prints: scalars beside a step, and lines that only one worker prints."""

from __future__ import annotations

import builtins
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch

from andon.host.scalar_files import CsvFile, ScalarFile, TensorBoardFile
from andon.protocol.limits import MAX_SCALAR_NAMES
from andon.protocol.scalars import Scalar, ScalarNames
from andon_trainer.line.properties import LineProperties

__all__ = ["Logs"]

log = logging.getLogger(__name__)


class Logs(LineProperties):
    """What `Line` tells people on a script's behalf."""

    _scalar_names: ScalarNames
    _last_logged: dict[str, float]
    _scalar_file: ScalarFile | None = None
    _file_failed: bool = False
    """Whether the file of scalars can't be written; the script goes on without it."""

    def log(self, values: Mapping[str, SupportsFloat | torch.Tensor]) -> None:
        """Logs numbers beside `line.step`: a validation loss, a learning rate, a temperature.

        Any worker may call it, at any time after `prepare` or `join`; others need not. On a line
        the numbers go to the journal, the board and Prometheus, and `andon export` gives them out.
        What several workers log under one name is shown as their mean. Alone, a run with a folder
        gets a file `scalars.csv`. `Line(log_to=...)` writes a file in both cases.

        ```python
        line.log({"val/loss": val, "lr": scheduler.get_last_lr()[0]})
        ```

        Args:
            values: numbers or tensors of one element, by name; NaN and infinity are allowed. A name
                has at most 64 letters, digits and characters `_ . / -`. A run has at most 64 names;
                of further ones a warning tells once. A second number of the same name, worker and
                step replaces the first. To read a tensor of a GPU waits for the GPU.

        Raises:
            ValueError: a name or a value is none of these.
            RuntimeError: the script has not called `prepare` or `join`, or closed the line.
        """
        if self._closed:
            raise RuntimeError("this Line is closed: call line.log before line.close")
        member = self._member
        step = self.step
        # Everything is checked before anything is kept.
        wanted = [Scalar(name, step, _number(name, value)) for name, value in values.items()]
        scalars = [scalar for scalar in wanted if self._takes(scalar.name)]
        if not scalars:
            return
        self._last_logged.update((scalar.name, scalar.value) for scalar in scalars)
        member.talk.log(scalars)
        if self.is_main and not self._file_failed:
            self._write(scalars)

    @property
    def logged(self) -> dict[str, float]:
        """The last number of each name that this process logged."""
        return dict(self._last_logged)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = False,
    ) -> None:
        """Prints on the worker that has rank 0 now, and on no other; see `is_main`.

        The arguments are those of Python's `print`.

        ```python
        line.print("validation loss", val)
        ```
        """
        if self.is_main:
            builtins.print(*values, sep=sep, end=end, file=file, flush=flush)

    def _takes(self, name: str) -> bool:
        if self._scalar_names.take(name):
            return True
        if self._scalar_names.refuse(name):
            log.warning(
                "line.log does not keep %s: a run has at most %d names, and this script has used "
                "more. Log fewer, or put what varies into the value",
                name,
                MAX_SCALAR_NAMES,
            )
        return False

    def _write(self, scalars: Sequence[Scalar]) -> None:
        """Writes a file of them, if one is wanted."""
        config = self._worker.config
        form = config.log_to or ("csv" if config.solo else "")
        if config.run_dir is None or not form:
            return
        try:
            if self._scalar_file is None:
                self._scalar_file = opened = (
                    CsvFile(config.run_dir / "scalars.csv")
                    if form == "csv"
                    else TensorBoardFile(config.run_dir / "tensorboard")
                )
                self._undo.append(opened.close)
            worker = self._member.position.worker or 0
            for scalar in scalars:
                self._scalar_file.write(scalar, worker, time.time())
            self._scalar_file.flush()
        except OSError as error:
            # A full disk must not end a training that needs no more of it.
            self._file_failed = True
            log.warning("what line.log gets is not written to a file any more: %s", error)


def _number(name: str, value: SupportsFloat | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"line.log got a tensor of shape {tuple(value.shape)} for {name!r}, and logs "
                "single numbers: give it a mean, for example"
            )
        value = value.detach()  # PyTorch warns of a loss that is made a number with its graph.
    if isinstance(value, str):
        raise ValueError(f"line.log got a text for {name!r}, and logs numbers: print it")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"line.log got no number for {name!r}: {error}") from None
