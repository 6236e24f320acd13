"""Generates the protobuf modules and their types from `proto/andon/v1`.

Run by `make proto` with the pinned generator of `.venv-proto`: its output runs on protobuf
5.29 to 7, while newer generators refuse older runtimes. `--check` compares instead of writing.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PROTOS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("andon/v1/*.proto"))
SERVICES = {"andon/v1/coordinator.proto", "andon/v1/reducer.proto", "andon/v1/ring.proto"}


def generate(out: Path) -> list[Path]:
    """Writes the generated modules under `out`; returns their paths relative to it."""
    messages = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", *PROTOS]
    services = [
        "protoc",
        f"-I{ROOT}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out={out}",
        *sorted(SERVICES),
    ]
    for arguments in (messages, services):
        if protoc.main(arguments) != 0:
            sys.exit(f"protoc failed: {' '.join(arguments)}")
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*"))


def main() -> None:
    """Generates in place, or with `--check` says which committed files are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
        committed = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*_pb2*.py*"))
        stale = sorted(
            {str(path) for path in fresh if path not in committed}
            | {str(path) for path in committed if path not in fresh}
            | set(filecmp.cmpfiles(folder, ROOT, [str(path) for path in fresh], shallow=False)[1])
        )
    if stale:
        sys.exit("generated code is stale, run `make proto`: " + ", ".join(stale))


if __name__ == "__main__":
    main()
