"""The kept command: what an audit starts again, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_cli.kept_command import KeptCommand, resuming, secret_in

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ANDON_STEPS": "5", "ANDON_TOKEN": "t", "HOME": "/"}


def test_a_command_is_kept_with_what_decides_bits_and_nothing_else(tmp_path: Path) -> None:
    command = ["python", "train.py", "--lr", "3e-4"]

    KeptCommand.of(command, ENVIRONMENT, folder=tmp_path, answer_encoding="same").write(tmp_path)

    kept = KeptCommand.read(tmp_path)
    assert kept is not None
    assert (kept.command, kept.folder) == (tuple(command), str(tmp_path))
    assert kept.variables == {"OMP_NUM_THREADS": "1", "ANDON_STEPS": "5"}
    assert (tmp_path / "command.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "argument",
    ["--api-key=hunter2", "--wandb_token", "--password", "postgres://me:hunter2@host/runs"],
)
def test_a_command_with_a_secret_is_left_out(tmp_path: Path, argument: str) -> None:
    command = ["python", "train.py", argument, "hunter2"]

    KeptCommand.of(command, ENVIRONMENT, folder=tmp_path, answer_encoding="same").write(tmp_path)

    assert "hunter2" not in (tmp_path / "command.json").read_text()
    kept = KeptCommand.read(tmp_path)
    assert kept is not None
    assert not kept.command
    assert kept.left_out


def test_usual_arguments_are_no_secrets() -> None:
    assert not secret_in(["python", "train.py", "--tokens", "1e9", "--max_token_len=8"])


def test_a_run_goes_on_by_one_command_that_a_shell_reads(tmp_path: Path) -> None:
    def command(*words: str, flags: tuple[str, ...] = ()) -> str:
        kept = KeptCommand.of(
            ["python", *words], {}, folder=tmp_path, answer_encoding="", flags=flags
        )
        return resuming(kept, "7f3a", 2)

    whole = command("my train.py", "--n=1", flags=("--workers=3", "--spares=1"))
    older = command("-m", "train")
    secret = command("train.py", "--password=x", flags=("--workers=1",))

    assert whole == "andon run --workers=3 --spares=1 --resume 7f3a 'my train.py' --n=1"
    assert older == "andon run --workers=2 --resume 7f3a -m train"
    assert secret == "andon run --workers=1 --resume 7f3a SCRIPT"
    assert resuming(None, "7f3a", 0) == "andon run --workers=1 --resume 7f3a SCRIPT"
