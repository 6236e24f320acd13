"""What a script logs: scalars beside a step, for the line and for a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import torch

from andon.host.scalar_files import CsvFile, ScalarFile, TensorBoardFile
from andon.protocol.limits import MAX_SCALAR_NAMES
from andon.protocol.scalars import Scalar, ScalarNames
from andon_trainer.line.session import LineSession

__all__ = ["Logs"]

log = logging.getLogger(__name__)


class Logs:
    """Takes what `line.log` gets."""

    def __init__(self, session: LineSession) -> None:
        """Nothing was logged yet."""
        self._session = session
        self._scalar_names = ScalarNames()
        self.last: dict[str, float] = {}
        """The last number of each name."""
        self._scalar_file: ScalarFile | None = None
        self._file_failed = False
        """Whether the file of scalars can't be written; the script goes on without it."""

    def log(self, values: Mapping[str, SupportsFloat | torch.Tensor]) -> None:
        """See `Line.log`."""
        session = self._session
        if session.closed:
            raise RuntimeError("this Line is closed: call line.log before line.close")
        member = session.member
        step = session.step
        # Everything is checked before anything is kept.
        wanted = [Scalar(name, step, _number(name, value)) for name, value in values.items()]
        scalars = [scalar for scalar in wanted if self._takes(scalar.name)]
        if not scalars:
            return
        self.last.update((scalar.name, scalar.value) for scalar in scalars)
        member.talk.log(scalars)
        if not session.rank and not self._file_failed:
            self._write(scalars)

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
        session = self._session
        config = session.worker.config
        form = config.log_to or ("csv" if config.solo else "")
        if config.run_dir is None or not form or config.audit is not None:
            return
        try:
            if self._scalar_file is None:
                self._scalar_file = opened = (
                    CsvFile(config.run_dir / "scalars.csv")
                    if form == "csv"
                    else TensorBoardFile(config.run_dir / "tensorboard")
                )
                session.undo.append(opened.close)
            worker = session.member.position.worker or 0
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
