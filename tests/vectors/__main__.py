"""Writes the generated conformance vectors, or names the files that are stale.

usage: PYTHONPATH=proto:tests python -m vectors [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vectors.all import made

FOLDER = Path(__file__).resolve().parents[2] / "conformance"


def main() -> None:
    """Writes, or with `--check` compares."""
    files = made()
    known = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("messages/*")}
    stale = known - files.keys()
    if "--check" in sys.argv[1:]:
        stale |= {
            name
            for name, data in files.items()
            if not (FOLDER / name).is_file() or (FOLDER / name).read_bytes() != data
        }
        if stale:
            sys.exit(
                "conformance vectors are stale, run `make vectors`: " + ", ".join(sorted(stale))
            )
        return
    (FOLDER / "messages").mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).unlink()
    for name, data in files.items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
