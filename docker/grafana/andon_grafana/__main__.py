"""Writes docker/grafana/dashboards; `--check` only says whether they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from andon_grafana.boards import BOARDS, build

__all__ = ["FOLDER", "encoded", "written"]

FOLDER = Path(__file__).resolve().parents[1] / "dashboards"


def encoded(dashboard: Dashboard) -> str:
    """A dashboard as Grafana reads it."""
    return json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def written() -> dict[str, str]:
    """What the folder has to hold: text by name."""
    return {board.file: encoded(build(board)) for board in BOARDS}


def _check() -> int:
    files = written()
    there = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.json")}
    stale = sorted(
        name for name in files.keys() | there.keys() if files.get(name) != there.get(name)
    )
    for name in stale:
        print(f"docker/grafana/dashboards/{name} is not what its code says: run `make dashboards`")
    return 1 if stale else 0


def main() -> int:
    """Writes the dashboards, or checks them."""
    match sys.argv[1:]:
        case []:
            for name, text in written().items():
                (FOLDER / name).write_text(text, "utf-8")
            return 0
        case ["--check"]:
            return _check()
    print("usage: python -m andon_grafana [--check]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
