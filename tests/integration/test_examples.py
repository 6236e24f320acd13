"""The examples, alone and on a line of two workers: they compute the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, see its docs

from integration.harness import Service, Worker, clean_environment, on_line
from integration.nursery import Child, nursery

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
_PATIENCE_S = 90
_RESULT = re.compile(r"^(?:step|epoch) (\d+): loss (\d+\.\d{6})$", re.MULTILINE)

needs_models = [
    pytest.mark.models,
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("peft") is None,
        reason="needs transformers and peft: pip install -c constraints.txt --group models",
    ),
]


@dataclass(frozen=True)
class Example:
    """A script of examples/, with what makes it short."""

    script: str
    arguments: tuple[str, ...]
    imports: Literal["trainer", "models"] = "trainer"
    tolerance: float = 1e-4

    def start(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Child:
        """Starts it in a folder of its own."""
        folder.mkdir()
        with monkeypatch.context() as moved:
            moved.chdir(folder)
            return nursery(self.imports).start(
                [str(EXAMPLES / self.script), *self.arguments],
                clean_environment(**environment),
                folder / "output",
            )


def result_of(process: Child) -> list[tuple[str, str]]:
    """The last step, or epoch, and its loss, if this process printed it."""
    code = process.wait(_PATIENCE_S)
    text = process.output.read_text()
    assert code == 0, text
    return _RESULT.findall(text)[-1:]


@pytest.mark.parametrize(
    "example",
    [
        Example("vision.py", ("--steps", "12")),
        Example("lstm.py", ("--steps", "20")),
        Example("gan.py", ("--steps", "20")),
        Example("muon.py", ("--steps", "20"), tolerance=1e-3),  # Muon computes in bfloat16.
        Example("shared_momentum.py", ("--epochs", "2")),
        Example("trainer.py", ("--epochs", "2")),
        Example("from_ddp/with_line.py", ()),
        pytest.param(Example("lora.py", ("--steps", "8"), "models"), marks=needs_models),
        pytest.param(
            Example("gpt_scaler.py", ("--steps", "14"), "models", 1e-2), marks=needs_models
        ),
    ],
    ids=lambda example: Path(example.script).stem,
)
def test_an_example_computes_the_same_alone_and_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Example
) -> None:
    alone = example.start(tmp_path / "alone", monkeypatch)
    with Service(tmp_path / "run", 2) as service:
        workers = [
            example.start(tmp_path / f"worker-{slot}", monkeypatch, **on_line(service, slot, 2))
            for slot in range(2)
        ]
        try:
            ((steps, loss),) = result_of(alone)
            found = [line for worker in workers for line in result_of(worker)]
        finally:
            for process in (alone, *workers):
                process.kill()

    assert found
    for step, of_two in found:
        assert step == steps
        assert float(of_two) == pytest.approx(float(loss), rel=example.tolerance)


def test_the_script_for_ddp_that_is_beside_the_one_for_a_line_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Held here, as torchrun's agent does, so that nobody else can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ddp = Example("from_ddp/with_ddp.py", ())
    workers = [
        ddp.start(
            tmp_path / str(rank), monkeypatch,
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), CUDA_VISIBLE_DEVICES="",
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        for rank in range(2)
    ]  # fmt: skip

    # Not their ends: a process group of Gloo sometimes hangs in its destruction.
    try:
        Worker(workers[0], tmp_path).await_output("epoch 4: loss")
    finally:
        for worker in workers:
            worker.kill()

    losses = [float(loss) for _, loss in _RESULT.findall(workers[0].output.read_text())]
    assert losses[-1] < 0.5 * losses[0]
