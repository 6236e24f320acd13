"""What decides bits is set while a `Line` of the same bits is there, watched and stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import CheckpointRefused, Line
from andon_trainer.process.stating import stated, variables_in

DATA = TensorDataset(torch.arange(12.0).reshape(12, 1))
CPU = torch.device("cpu")


def train(line: Line, *, change: bool = False) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader: Any = DataLoader(DATA, batch_size=4)
    net, optimizer, loader = line.prepare(net, optimizer, loader, micro_batch_size=2)
    for _ in line.epochs(1):
        for (x,) in loader:
            if change:
                torch.set_num_threads(3)
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), x))
            optimizer.step()


memory: Any = torch.utils.deterministic


def switches() -> tuple[int, bool, bool, bool]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def test_switches_are_set_for_as_long_as_the_line_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    before = switches()

    with Line(same_bits=True):
        assert switches() == (2, True, False, False)

    assert switches() == before


def test_a_script_that_changes_the_number_of_threads_commits_no_step() -> None:
    threads = torch.get_num_threads()
    try:
        with (
            pytest.raises(RuntimeError, match=r"set_num_threads\(3\).*OMP_NUM_THREADS=3"),
            Line(same_bits=True) as line,
        ):
            train(line, change=True)
    finally:
        torch.set_num_threads(threads)

    assert line.step == 0


def test_a_checkpoint_of_another_arithmetic_is_refused_unless_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"same_bits": True, "run_dir": tmp_path, "checkpoint_every": 1}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Line(**settings, total_steps=1) as line:
        train(line)
    assert json.loads((tmp_path / "arithmetic.json").read_text())["threads"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    other = r"threads 1, and .* threads 2.*=tell"
    with Line(**settings, resume="latest") as line, pytest.raises(CheckpointRefused, match=other):
        train(line)
    with Line(**settings, resume="latest", arithmetic="tell") as line:
        train(line)

    assert line.step == 3
    assert "computed with threads 1" in caplog.text


def test_what_decides_bits_is_stated_and_where_threads_run_is_not() -> None:
    items = dict(stated(CPU, mkl_branch=0x10002, denormals=True, more={}))

    assert items["torch"] == torch.__version__
    assert items["threads"] == str(torch.get_num_threads())
    assert (items["mkl branch"], items["denormals"], items["gpu"]) == ("0x10002", "kept", "none")
    assert items["processor"]
    assert variables_in(
        {
            "MKL_CBWR": "AVX2",
            "OMP_NUM_THREADS": "1",
            "OMP_PLACES": "cores",
            "KMP_AFFINITY": "compact",
            "ATEN_CPU_CAPABILITY": "avx2",
            "HOME": "/root",
        }
    ) == {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
