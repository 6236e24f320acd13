"""What the benchmarks of schedules share: flags that choose among names, and their JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["chosen_from", "merged_rows", "write_rows"]


def chosen_from(table: Mapping[str, object]) -> Callable[[str], list[str]]:
    """The type of a flag that takes names of `table`, with commas between them."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in table:
                raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(table)}")
        return chosen

    return names


def merged_rows(
    before: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The rows of `before`, each replaced by the new one of the same `names`, then the others."""
    named = {tuple(row[name] for name in names): row for row in (*before, *new)}
    return list(named.values())


def write_rows(
    path: Path, machine: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> None:
    """Writes the machine and the rows as JSON, a row a line: some rows hold long lists."""
    described = json.dumps(machine, indent=2).replace("\n", "\n  ")
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n  "machine": {described},\n  "rows": [\n{lines}\n  ]\n}}\n')
