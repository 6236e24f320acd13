"""Real models by their own code: two workers match one process, and each other bit for bit."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.harness import Service, Worker, clean_environment
from integration.nursery import nursery
from models.zoo import ZOO

pytestmark = [
    pytest.mark.integration,
    pytest.mark.models,
    pytest.mark.skipif(
        find_spec("transformers") is None,
        reason="needs transformers: .venv/bin/python -m pip install -c constraints.txt "
        "--group models",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two workers (slots 0 and 1) and one plain process (2) wrote what they saw.

    Each of the three processes trains all models one after another. The workers join a new line for
    each.
    """
    folder = tmp_path_factory.mktemp("models")
    with ExitStack() as services:
        lines = {}
        for name in ZOO:
            service = services.enter_context(Service(folder / f"service-{name}", 2))
            lines[name] = [service.address, service.run_id]
        visitors = [
            visit(folder, 0, {"lines": lines}),
            visit(folder, 1, {"lines": lines}),
            visit(folder, 2, {}),
        ]
        for visitor in visitors:
            services.callback(visitor.kill)
        for visitor in visitors:
            assert visitor.wait() == 0, visitor.output
    return folder


@pytest.mark.parametrize("name", ZOO)
def test_f_dp_005_a_real_model_matches_one_process(folder: Path, name: str) -> None:
    first, second, plain = (seen(folder, slot)[name] for slot in range(3))

    assert first["digest"] == second["digest"]
    assert first["losses"] == second["losses"]
    assert len(plain["losses"]) == 20
    assert first["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert plain["losses"][-1] < plain["losses"][0] - 0.02, "it learns"
    if not ZOO[name].adam:
        # Adam divides by a gradient's size, and so makes rounding errors as large as any other.
        assert relative_error(folder, name) <= 1e-5


def visit(folder: Path, slot: int, spec: dict[str, Any]) -> Worker:
    """Starts a process that trains all models."""
    out = folder / f"out-{slot}.json"
    written = folder / f"spec-{slot}.json"
    written.write_text(json.dumps({**spec, "slot": slot % 2, "names": list(ZOO)}))
    launched = {"RANK": str(slot), "WORLD_SIZE": "2"} if "lines" in spec else {}
    process = nursery("models").start(
        [str(Path(__file__).with_name("visit.py")), str(written), str(out)],
        clean_environment(**launched),
        folder / f"output-{slot}.log",
    )
    return Worker(process, out)


def seen(folder: Path, slot: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"out-{slot}.json").read_text())
    return found


def relative_error(folder: Path, name: str) -> float:
    """The greatest difference of a tensor's weights between line and plain, relative to its norm.

    Attention's bias of the keys has no gradient but rounding errors: it stays next to 0.
    """
    mine, plain = (torch.load(folder / f"out-{slot}-{name}.pt") for slot in (0, 2))
    assert mine.keys() == plain.keys()
    return max(
        float((mine[part].double() - value.double()).norm() / max(value.double().norm(), 0.01))
        for part, value in plain.items()
        if torch.is_floating_point(value)
    )
