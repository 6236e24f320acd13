"""Generates the protobuf modules, their types and their reference from `proto/andon/v1`.

`make proto` runs it with the pinned generator in `.venv-proto`. The code that it generates works
with protobuf 5.29 to 7; code from newer generators refuses older runtimes. `--check` compares the
files instead of writing them.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

from reference import write_reference

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT.parent / "docs" / "reference"
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


def document(out: Path) -> list[Path]:
    """Writes the pages of the reference into `out`; returns their paths relative to it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder) / "descriptors.binpb"
        arguments = ["protoc", f"-I{ROOT}", "--include_source_info", *PROTOS]
        if protoc.main([*arguments, f"--descriptor_set_out={descriptors}"]) != 0:
            sys.exit("protoc failed to write descriptors")
        write_reference(descriptors, out)
    return sorted(path.relative_to(out) for path in out.rglob("*.md"))


def compare(fresh: list[Path], folder: Path, kept: Path, committed: list[Path]) -> set[str]:
    """The files whose content differs in `kept` and `folder`, or that only one of them has."""
    differ = filecmp.cmpfiles(folder, kept, [str(path) for path in fresh], shallow=False)[1]
    return {str(path) for path in set(fresh) ^ set(committed)} | set(differ)


def main() -> None:
    """Generates in place, or with `--check` names the committed files that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        for page in REFERENCE.glob("*.md"):
            page.unlink()
        document(REFERENCE)
        return
    with tempfile.TemporaryDirectory() as folder:
        code, pages = Path(folder) / "code", Path(folder) / "pages"
        code.mkdir()
        # What Python compiled of them is no file of theirs.
        there = [path for kind in ("py", "pyi") for path in ROOT.rglob(f"*_pb2*.{kind}")]
        committed = sorted(path.relative_to(ROOT) for path in there)
        stale = compare(generate(code), code, ROOT, committed)
        written = sorted(path.relative_to(REFERENCE) for path in REFERENCE.glob("*.md"))
        stale |= compare(document(pages), pages, REFERENCE, written)
    if stale:
        sys.exit("generated files are stale, run `make proto`: " + ", ".join(sorted(stale)))


if __name__ == "__main__":
    main()
