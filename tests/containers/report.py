"""How long everything took: the images, and each scenario."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

__all__ = ["Report"]


@dataclass(slots=True)
class Report:
    """Seconds by name, in the order of their ends."""

    began: float = field(default_factory=time.monotonic)
    preparation_s: dict[str, float] = field(default_factory=dict)
    scenarios_s: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds what happens inside to the preparation; images are made by several threads."""
        began = time.monotonic()
        yield
        with self._lock:
            self.preparation_s[name] = time.monotonic() - began

    def add(self, scenario: str, outcome: str, seconds: float) -> None:
        """Adds the seconds of a scenario's test, that of its set-up included."""
        self.scenarios_s[scenario] = self.scenarios_s.get(scenario, 0.0) + seconds
        if self.outcomes.get(scenario, "passed") == "passed":
            self.outcomes[scenario] = outcome

    def lines(self) -> list[str]:
        """The report as text."""
        made = [f"{seconds:6.1f} s  {name}" for name, seconds in self.preparation_s.items()]
        ran = [
            f"{seconds:6.1f} s  {self.outcomes[name]:7} {name}"
            for name, seconds in self.scenarios_s.items()
        ]
        return [*made, *ran, f"{time.monotonic() - self.began:6.1f} s  in all"]

    def write(self, file: Path) -> None:
        """Writes the report as JSON."""
        rounded = [
            {name: round(seconds, 1) for name, seconds in each.items()}
            for each in (self.preparation_s, self.scenarios_s)
        ]
        content = {
            "preparation_s": rounded[0],
            "scenarios_s": rounded[1],
            "outcomes": self.outcomes,
            "all_s": round(time.monotonic() - self.began, 1),
        }
        file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
