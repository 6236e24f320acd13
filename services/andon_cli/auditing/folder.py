"""An audit's own folder: what it needs to go on where it was interrupted.

By default it is the folder `audit` in the run's folder; nothing else in there is touched.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from andon.host.manifest import CheckpointDamaged, Manifest, checkpoints_in, step_of
from andon.host.private_files import make_folder, open_private
from andon_cli.auditing.scope import AuditRefused

__all__ = ["AuditFolder"]


class AuditFolder:
    """The files of one audit; open while it runs."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        """Takes a folder that is locked; see `open`."""
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the folder, unless it is there, and locks it.

        Raises:
            AuditRefused: it can't be made, holds something else, or another audit uses it.
        """
        try:
            # What an earlier audit left is removed: it must not be a run's checkpoints.
            if path.is_dir() and any(path.iterdir()) and not (path / "lock").exists():
                raise AuditRefused(
                    f"{path} holds something else than an audit: choose an empty folder, --out DIR"
                )
            make_folder(path)
            lock = open(path / "lock", "a", encoding="ascii", opener=open_private)  # noqa: SIM115
        except OSError as error:
            raise AuditRefused(
                f"the audit's folder {path} can't be made ({error.strerror}): choose another one, "
                "--out DIR"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise AuditRefused(
                f"another audit uses {path}: wait for it, or choose another folder, --out DIR"
            ) from None
        return cls(path, lock)

    def __enter__(self) -> Self:
        """The folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks it."""
        self._lock.close()

    @property
    def order(self) -> Path:
        """What the script is asked to do."""
        return self.path / "order.jsonl"

    @property
    def report(self) -> Path:
        """What it found."""
        return self.path / "report.jsonl"

    @property
    def output(self) -> Path:
        """What it printed."""
        return self.path / "output.log"

    def equal_to(self, audit: Mapping[str, Any]) -> int:
        """Up to which step this audit was made before it was interrupted; 0: it was not begun."""
        try:
            state = json.loads(self._state.read_text("utf-8"))
            if state["audit"] == audit and not state["over"]:
                return int(state["equal_to"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return 0

    def checkpoint(self, step: int) -> Path | None:
        """The newest whole checkpoint that the audit has written up to a step."""
        for folder in checkpoints_in(self.path):
            with suppress(FileNotFoundError, CheckpointDamaged):
                if step_of(folder) <= step:
                    Manifest.read(folder).verify(folder)
                    return folder.absolute()
        return None

    def note(self, audit: Mapping[str, Any], equal_to: int, *, over: bool = False) -> None:
        """Notes how far an audit has come."""
        draft = self._state.with_suffix(".draft")
        with open(draft, "w", encoding="utf-8", opener=open_private) as file:
            json.dump({"audit": audit, "equal_to": equal_to, "over": over}, file)
        draft.replace(self._state)

    def clear(self, *, checkpoints: bool) -> None:
        """Removes what an earlier attempt left."""
        for path in (self.order, self.report, self.output):
            path.unlink(missing_ok=True)
        if checkpoints:
            self._state.unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    @property
    def _state(self) -> Path:
        return self.path / "state.json"
