"""The scripts of examples/plain: with Andon they end with Gloo's weights, and stop at a NaN."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, see its docs

from integration.harness import Service, clean_environment
from integration.nursery import Child, nursery

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).parents[2] / "examples" / "plain"
RANKS = 2
PATIENCE_S = 100
RAY = os.environ.get("ANDON_RAY")
LEASE_S = "15"
"""Beyond what a busy machine keeps a rank from its reports: here nobody freezes."""


def skipped_without(*packages: str) -> pytest.MarkDecorator:
    """Skips a recipe that needs more than PyTorch."""
    reason = f"needs {' and '.join(packages)}: pip install -c constraints.txt --group plain"
    return pytest.mark.skipif(any(find_spec(each) is None for each in packages), reason=reason)


NAMED = r"rank 1 on \S+ gave nan in (net\.)?[02]\.(weight|bias)\["
"""What a message says where the parameter is known."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A script, and what it says at a NaN."""

    script: str
    says: str = NAMED


RECIPES = [
    Recipe("ddp.py"),
    Recipe("fsdp2.py"),
    Recipe("hsdp.py"),
    Recipe("dcp.py"),
    pytest.param(
        Recipe("lightning_ddp.py"), marks=[pytest.mark.plain, skipped_without("lightning")]
    ),
    pytest.param(
        Recipe("accelerate_loop.py"), marks=[pytest.mark.plain, skipped_without("accelerate")]
    ),
    pytest.param(
        Recipe("hf_trainer.py"),
        marks=[pytest.mark.plain, skipped_without("transformers", "accelerate")],
    ),
]


@contextmanager
def started(recipe: Recipe, folder: Path, **more: str) -> Iterator[list[Child]]:
    """The two ranks of a script, as torchrun starts them; any that still runs is killed."""
    folder.mkdir()
    # Held here, as torchrun's agent does, so that nobody else can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    with _inside(folder):
        for rank in range(RANKS):
            environment = clean_environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
                LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                CUDA_VISIBLE_DEVICES="", TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", **more,
            )  # fmt: skip
            script = str(SCRIPTS / recipe.script)
            ranks.append(nursery("plain").start([script], environment, folder / f"{rank}.log"))
    try:
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def ended(ranks: list[Child]) -> tuple[list[int], list[str]]:
    """Exit codes and outputs."""
    codes = [each.wait(PATIENCE_S) for each in ranks]
    return codes, [each.output.read_text() for each in ranks]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "model.pt")
    return weights


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.script.removesuffix(".py"))
def test_a_plain_script_ends_with_gloos_weights_and_stops_at_a_nan(
    tmp_path: Path, recipe: Recipe
) -> None:
    with Service(tmp_path / "run", RANKS, "--liveness", LEASE_S) as service:
        there = {"BACKEND": "andon", "ANDON_ADDRESS": service.address}
        # Gloo meanwhile, from which nothing is shared.
        with started(recipe, tmp_path / "gloo", BACKEND="gloo") as gloo:
            with started(recipe, tmp_path / "andon", **there) as andon:
                codes, outputs = ended(andon)
            assert codes == [0, 0], outputs
            with started(recipe, tmp_path / "nan", **there, PLANT_NAN="1:3") as stopped:
                codes_of_nan, outputs_of_nan = ended(stopped)
            codes, outputs = ended(gloo)
            assert codes == [0, 0], outputs

    theirs, ours = weights_of(tmp_path / "gloo"), weights_of(tmp_path / "andon")
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name]), name
    assert codes_of_nan == [3, 3], outputs_of_nan
    assert not (tmp_path / "nan" / "model.pt").exists()
    for output in outputs_of_nan:
        assert re.search(recipe.says, output), output


@pytest.mark.plain
@skipped_without("ray")
@pytest.mark.skipif(
    not RAY,
    reason="starts a cluster, for a minute and a half; CI does: "
    "ANDON_RAY=1 make test ARGS='tests/integration/test_plain_scripts.py -k ray'",
)
@pytest.mark.timeout(600)
def test_ray_train_ends_with_the_weights_of_ddp(tmp_path: Path) -> None:
    # The same rows in the same order, and AdamW moves each element by itself.
    with started(Recipe("hsdp.py"), tmp_path / "gloo", BACKEND="gloo") as gloo:
        codes, outputs = ended(gloo)
    with by_ray(tmp_path / "andon") as trains:
        trained, _ = trains.communicate(timeout=4 * PATIENCE_S)

    assert codes == [0, 0], outputs
    assert trains.returncode == 0, trained
    theirs, ours = weights_of(tmp_path / "gloo"), weights_of(tmp_path / "andon")
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name]), name


@pytest.mark.plain
@skipped_without("ray")
@pytest.mark.skipif(RAY != "all", reason="another cluster: `make soak` runs it, with ANDON_RAY=all")
@pytest.mark.timeout(300)
def test_ray_train_stops_at_a_nan(tmp_path: Path) -> None:
    with by_ray(tmp_path / "nan", PLANT_NAN="1:3") as stops:
        stopped, _ = stops.communicate(timeout=2 * PATIENCE_S)

    assert stops.returncode == 1, stopped
    assert re.search(NAMED, stopped), stopped


@contextmanager
def by_ray(folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Ray's script, on a cluster of its own; its rank 0 serves the session."""
    folder.mkdir()
    # Ray's sockets need a short name.
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        environment = clean_environment(
            RAY_TMPDIR=scratch, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0",
            # Ray gives a group up that takes a minute to start, as on a slow machine.
            RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(4 * PATIENCE_S),
            CUDA_VISIBLE_DEVICES="", ANDON_LIVENESS=LEASE_S, **more,
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ray_train.py")],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
